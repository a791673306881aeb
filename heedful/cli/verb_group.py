"""The group of all commands: its sections in --help, and aliases of commands of other libraries.

A command's module is imported when the command is looked up, so that no command waits for the imports of the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from heedful.cli import settings_command
from heedful.cli.output import note
from heedful.cli.settings_command import ClickCommand, ClickContext, HelpFormatter
from heedful.errors import HeedfulError

SECTIONS: dict[str, tuple[str, ...]] = {  # commands by purpose, in the order of a model's life
    "Start": ("quickstart", "init", "recipe", "models", "check", "completion"),
    "Train": ("tokenizer", "pretrain", "finetune", "tune", "distil", "prune", "evaluate"),
    "Use": ("predict", "select", "index", "search", "look", "convert", "export", "push"),
    "Serve": ("serve", "bench", "kernels"),
    "Study": ("study",),
}
NAMES = tuple(name for names in SECTIONS.values() for name in names)  # of the commands, their modules and functions
COMMAND_CLASSES: dict[str, type[TyperCommand]] = {  # command class by name, if it is not TyperCommand
    "tokenizer": settings_command.TokenizerCommand,
    "pretrain": settings_command.PretrainCommand,
    "finetune": settings_command.FinetuneCommand,
    "tune": settings_command.TuneCommand,
    "distil": settings_command.DistilCommand,
    "serve": settings_command.ServeCommand,
    **dict.fromkeys(("check", "evaluate", "predict", "select"), settings_command.DataCommand),
}
VERB_ALIASES: dict[str, str] = {  # command by its name in other libraries
    **dict.fromkeys(("train", "fit", "fine-tune", "fine_tune"), "finetune"),
    **dict.fromkeys(("distill", "distillation"), "distil"),
    **dict.fromkeys(("pre-train", "pretraining"), "pretrain"),
    "eval": "evaluate",
    "tokenize": "tokenizer",
    "benchmark": "bench",
}
VERB_ADVICE: dict[str, str] = {  # what to use, by the name of a command that only other libraries have
    **dict.fromkeys(("val", "validate"), "heedful evaluate RUN --data DATA --split dev"),
    **dict.fromkeys(("test", "score"), "heedful evaluate RUN --data DATA --split test"),
    **dict.fromkeys(
        ("encode", "embed"), "heedful predict RUN TEXT, with a model for embed; or Engine.encode in Python"
    ),
    **dict.fromkeys(("infer", "run", "pipeline", "generate", "answer"), "heedful predict RUN TEXT"),
    **dict.fromkeys(("upload", "push_to_hub"), "heedful push RUN OWNER/NAME"),
    "download": "NAME[@REVISION] on the hub in place of a folder: every command downloads it",
    "debug": "heedful check DATA",
    "package": "heedful export RUN, or heedful push RUN OWNER/NAME",
}


class Commands(Mapping[str, ClickCommand]):
    """All commands by name."""

    def __getitem__(self, name: str) -> ClickCommand:
        """Import the module of a command, and return the command."""
        if name not in NAMES:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of --help."""
        return iter(NAMES)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(NAMES)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a command of this name, without importing its module."""
        return name in NAMES


@cache
def _command(name: str) -> ClickCommand:
    """Make the command whose function has the name of its module in `heedful.cli`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=COMMAND_CLASSES.get(name))(getattr(import_module(f"heedful.cli.{name}"), name))
    return typer.main.get_command(app)


class VerbGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        """Make the group of `Commands`, with the options of typer.core.TyperGroup."""
        super().__init__(**options | {"commands": Commands()})

    def resolve_command(self, ctx: ClickContext, args: list[str]) -> tuple[str | None, ClickCommand | None, list[str]]:
        """Return the command that the first argument names by its name or an alias.

        Raises:
            HeedfulError: If the name is in `VERB_ADVICE`.
        """
        name = args[0]
        if name not in self.commands and name in VERB_ALIASES:
            if os.environ.get("RANK", "0") == "0":
                note(f"{name} is {VERB_ALIASES[name]} here")
            args = [VERB_ALIASES[name], *args[1:]]
        elif name not in self.commands and name in VERB_ADVICE:
            raise HeedfulError(f"{name} is not a command: use {VERB_ADVICE[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: ClickContext, formatter: HelpFormatter) -> None:
        """Write the commands by purpose, each with the first sentence of its help."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in SECTIONS.items():
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=30)
