"""Write docs/settings.md, the reference of all settings, from the dataclasses.

Run without arguments to write the page; tests compare it with `page()`.
"""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from heedful.cli.settings_command import DistilCommand, FinetuneCommand, PretrainCommand, SettingsCommand
from heedful.runs.aliases import ALIASES
from heedful.runs.distil.settings import DistilSettings, MaskedDistilSettings
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.overrides import find_setting
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.settings_schema import Setting, describe_settings, setting_paths
from heedful.serve.settings import ServeSettings
from heedful.tokenizer.settings import TokenizerSettings
from heedful.toml_json import toml_lines

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

This page lists all settings; `python scripts/settings_page.py` generates it from the code. On the command line, give a
setting by its path, or by the end of its path if that is unique:

    heedful finetune classify reviews.csv --train.optimizer.weight_decay 0.05
    heedful finetune classify reviews.csv weight_decay=0.05

or in a recipe: `heedful init TASK > run.toml` writes one with all settings, and `--recipe run.toml` reads it.

Settings of `train` and `fit` that you do not give are chosen by the size of the data, and the command reports them.
"With" names the kind of a table to which a setting belongs. The last column has flags, and accepted names from other
libraries.
"""
# title, dataclass, command with flags, and dataclasses whose settings earlier sections list
SECTIONS: tuple[tuple[str, type, type[SettingsCommand] | None, tuple[type, ...]], ...] = (
    ("heedful finetune", FinetuneSettings, FinetuneCommand, ()),
    ("heedful pretrain", PretrainSettings, PretrainCommand, (FinetuneSettings,)),
    ("heedful distil", DistilSettings, DistilCommand, (FinetuneSettings,)),
    ("heedful distil, of a masked language model", MaskedDistilSettings, None, (DistilSettings,)),
    ("heedful serve", ServeSettings, None, ()),
    ("heedful tokenizer", TokenizerSettings, None, ()),
)


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for title, cls, command, listed in SECTIONS:
        known = {
            (setting.path, setting.when, setting.owner)
            for listed_cls in listed
            for setting in describe_settings(listed_cls)
        }
        settings = [
            setting for setting in describe_settings(cls) if (setting.path, setting.when, setting.owner) not in known
        ]
        if cls is MaskedDistilSettings:
            settings = [setting for setting in settings if not setting.path.startswith("pretrain.")]
        parts.append(f"## {title}\n")
        if listed:
            names = " and ".join(name for name, listed_cls, _, _ in SECTIONS if listed_cls in listed)
            more = "; `pretrain` holds those of `heedful pretrain`" if cls is MaskedDistilSettings else ""
            parts.append(f"Settings that are not listed are those of `{names}`{more}.\n")
        lines = ["| Setting | Type | Default | Meaning | Flags and other names |", "|---|---|---|---|---|"]
        lines += [_row(setting, cls, command) for setting in settings]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(setting: Setting, cls: type, command: type[SettingsCommand] | None) -> str:
    """Return the row of a setting, with the flags that set it and its accepted other names."""
    kinds = ", ".join(f"`{kind}`" for kind in setting.when[-1:])
    meaning = f"{setting.doc}{f'; with {kinds}' if kinds else ''}"
    flags = [
        f"`{flag.name}`"
        for flag in (command.flags if command else ())
        if find_setting(cls, flag.assignment.partition("=")[0]) == setting.path
    ]
    paths = setting_paths(cls)
    aliases = [f"`{alias.name}`" for alias in ALIASES.values() if alias.accepted and alias.path(paths) == setting.path]
    cells = (
        f"`{setting.path}`",
        _type(setting.annotation),
        _default(setting.default),
        meaning,
        ", ".join(flags + aliases),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: Any) -> str:
    """Describe a type hint in plain words."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(member) for member in members))
    if origin is Literal:
        return ", ".join(f"`{member}`" for member in members)
    if origin is tuple:
        return f"list of {_type(members[0])}"
    if origin is dict:
        return f"table of {_type(members[1])}"
    if dataclasses.is_dataclass(hint):
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "none"}
    return names.get(hint, "table")


def _default(value: Any) -> str:
    """Describe a default value, as TOML if it is a plain one."""
    if value is dataclasses.MISSING:
        return "required, or from the data"
    if dataclasses.is_dataclass(value):
        return f"kind `{value.kind}`" if hasattr(value, "kind") else "table"
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return "tables"
    plain = list(value) if isinstance(value, tuple) else value
    return f"`{next(toml_lines({'x': plain}, ())).removeprefix('x = ')}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
