"""Recipes and sample data that ship with Heedful, for `heedful init` to list and copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from heedful.errors import HeedfulError, did_you_mean

SAMPLES = {  # (description, task) by folder of sample data
    "intents": ("data: 600 messages to a lending library, of 8 kinds", "classify"),
    "tags": ("data: 150 sentences with names of people, places and things", "tag"),
    "questions": ("data: 120 questions on 40 texts, one in six without an answer", "qa"),
}
COMMANDS = {  # command with its arguments, by first word of a recipe's name; other recipes are for finetune
    "pretrain": "pretrain DATA",
    "distil": "distil TEACHER DATA",
    "translate": "finetune seq2seq DATA",
}


class Asset(NamedTuple):
    """A recipe, or a folder of sample data."""

    name: str
    about: str  # description
    content: Traversable  # file or folder
    command: str  # command that uses a copy, with {} for the path of the copy


def list_assets() -> Iterator[Asset]:
    """Yield the recipes, sorted by name, and then the sample data."""
    assets = files("heedful") / "assets"
    for path in sorted((assets / "recipes").iterdir(), key=lambda path: path.name):
        about = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        command = COMMANDS.get(path.name.partition("-")[0], "finetune TASK DATA")
        yield Asset(path.name.removesuffix(".toml"), about, path, f"heedful {command} --recipe {{}}")
    for name, (about, task) in SAMPLES.items():
        yield Asset(name, about, assets / name, f"heedful finetune {task} {{}}")


def copy_asset(name: str, to: Path | None = None) -> tuple[Path, Asset]:
    """Copy a recipe to a new file, or sample data to a new folder. Nothing is overwritten.

    Args:
        name: Name of the recipe or of the sample data.
        to: Path of the copy. If None, it is `name` in the working directory, with the suffix .toml for a recipe.

    Returns:
        The path of the copy, and the asset.

    Raises:
        HeedfulError: If there is no such recipe, or if the path exists or cannot be written.
    """
    assets = {asset.name: asset for asset in list_assets()}
    if name not in assets:
        raise HeedfulError(f'there is no recipe "{name}"{did_you_mean(name, list(assets))}: {", ".join(assets)}')
    asset = assets[name]
    is_folder = name in SAMPLES
    path = to or Path(name if is_folder else f"{name}.toml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            with as_file(asset.content) as source:
                shutil.copytree(source, path)
        else:
            with path.open("xb") as file:
                file.write(asset.content.read_bytes())
    except FileExistsError:
        raise HeedfulError(f"{path} exists: give another path with --output") from None
    except OSError as error:
        raise HeedfulError(f"{path} cannot be written: {error.strerror or error}") from None
    return path, asset
