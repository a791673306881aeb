"""The command `heedful recipe`: list recipes and sample data, or copy one."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import print_json, print_table
from heedful.errors import HeedfulError, did_you_mean


def recipe(
    action: Annotated[str, typer.Argument(help='"ls" to list them, or "cp" to copy one.')] = "ls",
    name: Annotated[str | None, typer.Argument(help="Name of the recipe to copy.")] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to copy it; by default its own name, in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes and sample data, or copy one.

    Recipes are settings for finetune, pretrain and distil.
    """
    from heedful.runs import recipes

    if action not in ("ls", "cp"):
        raise HeedfulError(f'"{action}" is not an action{did_you_mean(action, ["ls", "cp"])}: use ls or cp')
    if action == "ls":
        assets = [{"name": asset.name, "about": asset.about} for asset in recipes.list_assets()]
        return print_json(assets) if as_json else print_table([list(asset.values()) for asset in assets])
    if name is None:
        raise HeedfulError("recipe cp needs a name: heedful recipe ls lists them")
    path, asset = recipes.copy_asset(name, out)
    if as_json:
        return print_json({"name": name, "written": str(path)})
    print(f"copied to {path}: {asset.command.format(quote(str(path)))}")
