"""The commands and their group: settings as flags and as words, names of other libraries, verbs by purpose.

Of a command's arguments,

- `--batch-size 8` is a flag of the command, if it has one of this name;
- `--train.batch_size 8`, `--train.batch_size=8` or `--batch_size 8` is else the setting of this path, or of this end of
  a path where it is unique; hyphens are underscores; a setting that is true or false needs no value to be true;
- `batch_size=8` is that setting too, where the command takes words; `train=FILE`, `dev=FILE` and `test=FILE` are data,
  and so is what has a slash before the "=" (`./a=b.csv`) or is the name of a file that exists.
"""

from __future__ import annotations

import os
import re
from collections import deque
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from heedful.cli.output import note
from heedful.errors import HeedfulError, SettingError

ASSIGNMENTS = "heedful.assignments"  # key of a context's meta: settings given as flags and words, as "lr=0.1"
WORD = re.compile(r"[A-Za-z_][\w.-]*")
HELP = ("-h", "--help")
SWITCH = ("true", "false")
SECTIONS: dict[str, tuple[str, ...]] = {  # verbs by purpose, in the order of a model's life
    "Start": ("quickstart", "init", "recipe", "models", "check", "completion"),
    "Train": ("tokenizer", "pretrain", "finetune", "distil", "evaluate"),
    "Use": ("predict", "look", "convert", "export", "push"),
    "Serve": ("serve", "bench", "kernels"),
    "Study": ("study",),
}
VERB_ALIASES: dict[str, str] = {  # other names of verbs that mean the same
    **dict.fromkeys(("train", "fit", "fine-tune", "fine_tune"), "finetune"),
    **dict.fromkeys(("distill", "distillation"), "distil"),
    **dict.fromkeys(("pre-train", "pretraining"), "pretrain"),
    "eval": "evaluate",
    "tokenize": "tokenizer",
    "benchmark": "bench",
}
VERB_ADVICE: dict[str, str] = {  # other names of verbs, and what to use
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


class Flag(NamedTuple):
    """A flag that is short for one setting."""

    name: str
    assignment: str  # with {} for the value; a path may be any unique end of the setting's
    metavar: str
    help: str


def _flags(max_length: str) -> tuple[Flag, ...]:
    return (
        Flag("--epochs", "train.epochs={}", "NUMBER", "Passes over the training data (train.epochs)."),
        Flag("--max-steps", "train.max_steps={}", "NUMBER", "Optimizer steps (train.max_steps)."),
        Flag(
            "--time-budget",
            "train.time_budget={}",
            "TIME",
            "Training time, as 45s, 10m or 2h; minutes if without a unit (train.time_budget).",
        ),
        Flag("--lr", "train.optimizer.lr={}", "NUMBER", "Peak learning rate (train.optimizer.lr)."),
        Flag("--batch-size", "train.batch_size={}", "NUMBER", "Samples of an update (train.batch_size)."),
        Flag("--max-length", f"{max_length}={{}}", "TOKENS", f"Longest sequence ({max_length})."),
        Flag("--seed", "train.seed={}", "NUMBER", "Seed of the sample order, dropout and new heads (train.seed)."),
        Flag("--device", "train.device={}", "cpu|cuda", "Where it trains (train.device)."),
        Flag("--precision", "train.precision={}", "PRECISION", "auto, float32 or bfloat16 (train.precision)."),
    )


PATIENCE = Flag(
    "--patience",
    "fit.patience={}",
    "NUMBER",
    "Evaluations without a better metric before training stops; 0: no early stopping (fit.patience).",
)
SEEDS = Flag("--seeds", "seeds={}", "NUMBER", "Runs with train.seed, train.seed + 1, ... (seeds).")


class SettingsCommand(TyperCommand):
    """A command whose settings are flags and words too; `assignments_of` returns what was given."""

    settings: tuple[str, ...] = ()  # dataclasses of which one has the settings, as "module:Class"
    words = False  # name=value is a setting, not data
    flags: tuple[Flag, ...] = ()
    listed = "docs/settings.md"  # where all settings are, for --help
    other = "Any other setting"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and then the flags of settings."""
        super().format_options(ctx, formatter)
        if self.settings:
            rows = [(f"{flag.name} {flag.metavar}", flag.help) for flag in self.flags]
            more = ", or PATH=VALUE as an argument" if self.words else ""
            rows.append(
                (
                    "--PATH VALUE",
                    f"{self.other}{more}; the end of a path is enough where it is unique. {self.listed} lists them.",
                )
            )
            with formatter.section("Settings"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take settings out of the arguments, and let the rest be parsed as usual."""
        rest, assignments = self._divided(args)
        ctx.meta[ASSIGNMENTS] = assignments
        return super().parse_args(ctx, rest)

    def classes(self) -> list[Any]:
        """The dataclasses of the settings."""
        named = [place.partition(":") for place in self.settings]
        return [getattr(import_module(module), name) for module, _, name in named]

    def _divided(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Arguments of the command, and assignments."""
        takes = {name: not param.is_flag for param in self.params for name in param.opts if hasattr(param, "is_flag")}
        takes |= dict.fromkeys(HELP, False)
        short = {flag.name: flag for flag in self.flags}
        rest, assignments, left = list[str](), list[str](), deque(args)
        while left:
            name, equals, value = (word := left.popleft()).partition("=")
            if word == "--":
                rest += [word, *left]
                left.clear()
            elif name in short:
                if not equals and not left:
                    raise HeedfulError(f"{name} needs a value: {short[name].help}")
                assignments.append(short[name].assignment.replace("{}", value if equals else left.popleft()))
            elif name in takes:
                rest.append(word)
                if takes[name] and not equals and left:
                    rest.append(left.popleft())
            elif word.startswith("--"):
                self._set(name, value if equals else None, left, rest, assignments)
            elif self.words and equals and _is_setting(word, name):
                self._check(name, name)
                assignments.append(word)
            else:
                rest.append(word)
        return rest, assignments

    def _set(self, flag: str, value: str | None, left: deque[str], rest: list[str], assignments: list[str]) -> None:
        """Take a flag that the command does not have, and its value from the arguments after it."""
        from heedful.runs.aliases import ALIASES

        name = flag[2:].replace("-", "_")
        foreign = ALIASES.get(name)
        if foreign and foreign.accepted and any(foreign.meant[0] in param.opts for param in self.params):
            note(f"{flag} is {foreign.meant[0]} here")
            left.appendleft(foreign.meant[0] if value is None else f"{foreign.meant[0]}={value}")
            return
        is_switch = self._check(name, flag)
        if value is None and is_switch and not (left and left[0].lower() in SWITCH):
            value = "true"
        elif value is None and (not left or left[0].startswith("--")):
            raise HeedfulError(f"{flag} needs a value: write {flag} VALUE")
        elif value is None:
            value = left.popleft()
        assignments.append(f"{name}={value.lower() if is_switch else value}")

    def _check(self, name: str, given: str) -> bool:
        """Whether a setting is true or false.

        Raises:
            SettingError: If there is no setting of that name.
        """
        from heedful.runs.overrides import find_setting
        from heedful.runs.settings_schema import describe_settings

        first: SettingError | None = None
        for cls in self.classes():
            try:
                path = find_setting(cls, name)
            except SettingError as error:
                first = first or error
            else:
                return any(setting.path == path and setting.type is bool for setting in describe_settings(cls))
        self._refuse(name, given, first)

    def _refuse(self, name: str, given: str, error: SettingError | None) -> NoReturn:
        from heedful.runs.aliases import ALIASES
        from heedful.runs.settings_schema import setting_paths

        if name == "set":
            raise HeedfulError("--set is not needed: write a setting as --train.batch_size 8")
        exact = name.rpartition(".")[2] in ALIASES or (error is not None and error.code == "ambiguous")
        if error is not None and (exact or not given.startswith("--")):
            raise error
        meant = dict[str, str]()
        for cls in reversed(self.classes()):
            for path in setting_paths(cls):
                meant[f"--{path}"] = meant[f"--{path.rpartition('.')[2].replace('_', '-')}"] = f"--{path}"
            foreign = {f"--{each.name.replace('_', '-')}": each for each in ALIASES.values()}
            meant |= {flag: f"--{path}" for flag, each in foreign.items() if (path := each.path(setting_paths(cls)))}
        options = [option for param in self.params for option in param.opts if option.startswith("--")]
        meant |= {option: option for option in (*options, *(flag.name for flag in self.flags))}
        close = get_close_matches(given.replace("_", "-")[:100], meant, n=1)
        hint = f" (did you mean {meant[close[0]]}?)" if close else ""
        raise SettingError(
            f"{given} is neither a flag nor a setting of heedful {self.name}{hint}",
            path=name,
            source=given,
            code="unknown",
        )


def with_settings(
    *settings: str,
    words: bool = False,
    flags: tuple[Flag, ...] = (),
    listed: str = SettingsCommand.listed,
    other: str = SettingsCommand.other,
) -> type[SettingsCommand]:
    """The class of a command with settings, for typer's `cls`."""
    attributes = {"settings": settings, "words": words, "short": flags, "listed": listed, "other": other}
    return type("Command", (SettingsCommand,), attributes)


FinetuneCommand = with_settings(
    "heedful.runs.finetune.settings:FinetuneSettings",
    words=True,
    flags=(*_flags("max_length"), PATIENCE, SEEDS),
    listed="heedful init TASK",
)
PretrainCommand = with_settings(
    "heedful.runs.pretrain.settings:PretrainSettings",
    words=True,
    flags=_flags("max_seq_length"),
    listed="heedful init pretrain",
)
DistilCommand = with_settings(
    "heedful.runs.distil.settings:DistilSettings",
    "heedful.runs.distil.settings:MaskedDistilSettings",
    words=True,
    flags=(*_flags("max_length"), PATIENCE, SEEDS),
    listed="heedful init distil",
)
DataCommand = with_settings(
    "heedful.data.labelled.data_file:DataOptions",
    listed="heedful init classify",
    other="How data is read, such as --data.columns.text review",
)
ServeCommand = with_settings("heedful.serve.settings:ServeSettings", listed="heedful init serve")
TokenizerCommand = with_settings("heedful.tokenizer.settings:TokenizerSettings")


def context_assignments(context: typer.Context) -> list[str]:
    """The settings that were given to a command, as "lr=0.1"."""
    found: list[str] = context.meta.get(ASSIGNMENTS, [])
    return found


class VerbGroup(TyperGroup):
    """All verbs: listed by purpose, and known by names of other libraries."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first argument."""
        name = args[0]
        if name not in self.commands and name in VERB_ALIASES:
            if os.environ.get("RANK", "0") == "0":
                note(f"{name} is {VERB_ALIASES[name]} here")
            args = [VERB_ALIASES[name], *args[1:]]
        elif name not in self.commands and name in VERB_ADVICE:
            raise HeedfulError(f"{name} is not a command: use {VERB_ADVICE[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs with their first sentences, by purpose."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in SECTIONS.items():
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=30)


def _is_setting(word: str, name: str) -> bool:
    """Whether name=value is a setting, and not a split or a file."""
    from heedful.data.labelled.split_files import SPLITS

    return bool(WORD.fullmatch(name)) and name.casefold() not in SPLITS and not os.path.exists(word)
