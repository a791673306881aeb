"""The verb that prints all settings as a recipe: init."""

from __future__ import annotations

from typing import Annotated

import typer


def init(
    name: Annotated[
        str, typer.Argument(metavar="TASK", help="A task of finetune, as classify; or pretrain, or distil.")
    ],
) -> None:
    """Print all settings with defaults, as a recipe.

    Each setting is commented out, with its default, its unit and its meaning: heedful init classify > run.toml.
    """
    from heedful.runs.template import template

    print(template(name), end="")
