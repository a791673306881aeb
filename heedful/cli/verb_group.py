"""The group of all commands: its sections in --help, and aliases of commands of other libraries."""

from __future__ import annotations

import os

from typer.core import TyperGroup

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


class VerbGroup(TyperGroup):
    """The group of all commands."""

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
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=30)
