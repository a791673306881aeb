"""The command `heedful init`: print all settings of a command or task as a recipe."""

from __future__ import annotations

from typing import Annotated

import typer


def init(
    name: Annotated[
        str, typer.Argument(metavar="TASK", help="A task of finetune, such as classify; or pretrain, distil or serve.")
    ],
) -> None:
    """Print all settings with defaults, as a recipe.

    Each setting is commented out, with its default, its unit and its meaning: heedful init classify > run.toml.
    """
    from heedful.runs import recipe_template as template

    if name == "serve":
        from heedful.serve.settings import ServeSettings

        header = [
            "# Settings of heedful serve, each with its default. To change one, remove the # in front of it.",
            "# Give this file to the command with --settings FILE.",
        ]
        text = template.comment_out(ServeSettings(), header)
    else:
        text = template.recipe_template(name)
    print(text, end="")
