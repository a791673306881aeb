"""`SettingsCommand`: a command whose settings are flags and NAME=VALUE arguments.

Commands that train, read data or serve use it. An argument of such a command is the first of these that applies:

- `--batch-size 8` is an option or a settings flag of the command, if there is one of this name.
- `--train.batch_size 8`, `--train.batch_size=8` and `--batch-size 8` are the setting with this path, or with this last
  component if only one path has it. Hyphens equal underscores. A boolean setting without a value is true.
- `batch_size=8` is a setting if the command accepts assignments. It is data if the name is `train`, `dev` or `test`, if
  there is a slash before the "=" (`./a=b.csv`), or if it is the name of a file.
"""

from __future__ import annotations

import os
import re
from collections import deque
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, TypeAlias

import typer
from typer.core import TyperCommand

from heedful.cli.output import note
from heedful.errors import HeedfulError, SettingError

# typer >= 0.2 has its own copy of click, and earlier versions import click: these classes have no common name
ClickContext: TypeAlias = Any
ClickCommand: TypeAlias = Any
HelpFormatter: TypeAlias = Any

ASSIGNMENTS = "heedful.assignments"  # key in the `meta` of a context; its value is a list of settings like "lr=0.1"
SETTING_NAME = re.compile(r"[A-Za-z_][\w.-]*")
HELP_OPTIONS = ("-h", "--help")
BOOLEANS = ("true", "false")  # values of a boolean setting


class Flag(NamedTuple):
    """A short flag for one setting."""

    name: str  # such as "--lr"
    assignment: str  # such as "train.optimizer.lr={}", with {} for the value
    metavar: str  # name of the value in --help
    help: str


class SettingsCommand(TyperCommand):
    """A command whose settings are flags and NAME=VALUE arguments. `context_assignments` returns them."""

    settings: tuple[str, ...] = ()  # dataclasses of the settings, as "module:Class"
    accepts_assignments = False  # whether NAME=VALUE can be a setting; if False, it is data
    flags: tuple[Flag, ...] = ()
    reference = "docs/settings.md"  # list of all settings, for --help
    setting_help = "Any other setting"  # description of --PATH VALUE in --help

    def format_options(self, ctx: ClickContext, formatter: HelpFormatter) -> None:
        """Write the options, followed by the flags of settings."""
        super().format_options(ctx, formatter)
        if self.settings:
            rows = [(f"{flag.name} {flag.metavar}", flag.help) for flag in self.flags]
            argument = ", or PATH=VALUE as an argument" if self.accepts_assignments else ""
            rows.append(
                (
                    "--PATH VALUE",
                    f"{self.setting_help}{argument}; the last component of a path is enough if it is unique. "
                    f"{self.reference} lists them.",
                )
            )
            with formatter.section("Settings"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: ClickContext, args: list[str]) -> list[str]:
        """Store the settings among the arguments in the context, and parse the remaining arguments."""
        command_args, assignments = self._split_arguments(args)
        ctx.meta[ASSIGNMENTS] = assignments
        return super().parse_args(ctx, command_args)

    def settings_classes(self) -> list[type]:
        """Return the dataclasses that have the settings."""
        names = [reference.partition(":") for reference in self.settings]
        return [getattr(import_module(module), name) for module, _, name in names]

    def _split_arguments(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Split arguments into those that the base class parses, and assignments of settings."""
        takes_value = {
            option: not param.is_flag for param in self.params for option in param.opts if hasattr(param, "is_flag")
        }
        takes_value |= dict.fromkeys(HELP_OPTIONS, False)
        flags = {flag.name: flag for flag in self.flags}
        command_args: list[str] = []
        assignments: list[str] = []
        queue = deque(args)
        while queue:
            argument = queue.popleft()
            name, equals, value = argument.partition("=")
            if argument == "--":  # the remaining ones are arguments, not options
                command_args += [argument, *queue]
                queue.clear()
            elif name in flags:
                if not equals and not queue:
                    raise HeedfulError(f"{name} needs a value: {flags[name].help}")
                assignments.append(flags[name].assignment.replace("{}", value if equals else queue.popleft()))
            elif name in takes_value:
                command_args.append(argument)
                if takes_value[name] and not equals and queue:
                    command_args.append(queue.popleft())
            elif argument.startswith("--"):
                self._read_setting(name, value if equals else None, queue, assignments)
            elif self.accepts_assignments and equals and _is_setting(argument, name):
                self._check_setting(name, name)
                assignments.append(argument)
            else:
                command_args.append(argument)
        return command_args, assignments

    def _read_setting(self, flag: str, value: str | None, queue: deque[str], assignments: list[str]) -> None:
        """Read a flag that is not an option of the command, and append its assignment.

        Args:
            flag: The flag, such as "--train.batch_size".
            value: The value after "=". If None, the value is the next argument.
            queue: The following arguments. The value is removed from it. If the flag is an alias of an option, that
                option is put in front.
            assignments: The assignments so far.

        Raises:
            HeedfulError: If the setting is unknown, or has no value.
        """
        from heedful.runs.aliases import ALIASES

        name = flag[2:].replace("-", "_")
        alias = ALIASES.get(name)
        if alias and alias.accepted and any(alias.meant[0] in param.opts for param in self.params):
            note(f"{flag} is {alias.meant[0]} here")
            queue.appendleft(alias.meant[0] if value is None else f"{alias.meant[0]}={value}")
            return
        is_boolean = self._check_setting(name, flag)
        if value is None and is_boolean and not (queue and queue[0].lower() in BOOLEANS):
            value = "true"
        elif value is None and (not queue or queue[0].startswith("--")):
            raise HeedfulError(f"{flag} needs a value: write {flag} VALUE")
        elif value is None:
            value = queue.popleft()
        assignments.append(f"{name}={value.lower() if is_boolean else value}")

    def _check_setting(self, name: str, source: str) -> bool:
        """Return whether a setting is a boolean.

        Args:
            name: Path of the setting, or the last component of the path.
            source: The flag or name that the user wrote.

        Raises:
            SettingError: If the setting is unknown.
        """
        from heedful.runs.overrides import find_setting
        from heedful.runs.settings_schema import describe_settings

        first_error: SettingError | None = None
        for cls in self.settings_classes():
            try:
                path = find_setting(cls, name)
            except SettingError as error:
                first_error = first_error or error
            else:
                return any(setting.path == path and setting.annotation is bool for setting in describe_settings(cls))
        self._raise_unknown(name, source, first_error)

    def _raise_unknown(self, name: str, source: str, error: SettingError | None) -> NoReturn:
        """Raise the error for an unknown setting or option, with the closest known name.

        Args:
            name: Name of the setting.
            source: The flag or name that the user wrote.
            error: Error of the search for the setting. It is raised if it is more precise than a suggestion.
        """
        from heedful.runs.aliases import ALIASES

        if name == "set":
            raise HeedfulError("--set is not needed: write a setting as --train.batch_size 8")
        is_precise = name.rpartition(".")[2] in ALIASES or (error is not None and error.code == "ambiguous")
        if error is not None and (is_precise or not source.startswith("--")):
            raise error
        suggestions = self._suggestions()
        close = get_close_matches(source.replace("_", "-")[:100], suggestions, n=1)
        hint = f" (did you mean {suggestions[close[0]]}?)" if close else ""
        raise SettingError(
            f"{source} is neither a flag nor a setting of heedful {self.name}{hint}",
            path=name,
            source=source,
            code="unknown",
        )

    def _suggestions(self) -> dict[str, str]:
        """Map each flag that a user may have meant to the flag to suggest; names of other libraries are included."""
        from heedful.runs.aliases import ALIASES
        from heedful.runs.settings_schema import setting_paths

        suggestions: dict[str, str] = {}
        for cls in reversed(self.settings_classes()):
            for path in setting_paths(cls):
                short_flag = f"--{path.rpartition('.')[2].replace('_', '-')}"
                suggestions[f"--{path}"] = suggestions[short_flag] = f"--{path}"
            for alias in ALIASES.values():
                if alias_path := alias.path(setting_paths(cls)):
                    suggestions[f"--{alias.name.replace('_', '-')}"] = f"--{alias_path}"
        options = [option for param in self.params for option in param.opts if option.startswith("--")]
        return suggestions | {option: option for option in (*options, *(flag.name for flag in self.flags))}


def with_settings_options(
    *settings: str,
    accepts_assignments: bool = False,
    flags: tuple[Flag, ...] = (),
    reference: str = SettingsCommand.reference,
    setting_help: str = SettingsCommand.setting_help,
) -> type[SettingsCommand]:
    """Return a subclass of SettingsCommand with these attributes, for the parameter `cls` of typer's `command`."""
    attributes = {
        "settings": settings,
        "accepts_assignments": accepts_assignments,
        "flags": flags,
        "reference": reference,
        "setting_help": setting_help,
    }
    return type("Command", (SettingsCommand,), attributes)


def context_assignments(context: typer.Context) -> list[str]:
    """Return the settings in the arguments of a command, such as "lr=0.1"."""
    assignments: list[str] = context.meta.get(ASSIGNMENTS, [])
    return assignments


def _is_setting(argument: str, name: str) -> bool:
    """Return whether NAME=VALUE is a setting, rather than a split of data or an existing file."""
    from heedful.data.labelled.split_files import SPLIT_BY_WORD

    return bool(SETTING_NAME.fullmatch(name)) and name.casefold() not in SPLIT_BY_WORD and not os.path.exists(argument)


# -- the commands with settings --------------------------------------------------------------------------------------


def _training_flags(max_length: str) -> tuple[Flag, ...]:
    """Return the flags of commands that train; `max_length` is the path of the setting for --max-length."""
    return (
        Flag("--epochs", "train.epochs={}", "NUMBER", "Passes over the training data (train.epochs)."),
        Flag("--max-steps", "train.max_steps={}", "NUMBER", "Optimizer steps (train.max_steps)."),
        Flag(
            "--time-budget",
            "train.time_budget={}",
            "TIME",
            "Training time, such as 45s, 10m or 2h; in minutes without a unit (train.time_budget).",
        ),
        Flag("--lr", "train.optimizer.lr={}", "NUMBER", "Peak learning rate (train.optimizer.lr)."),
        Flag("--batch-size", "train.batch_size={}", "NUMBER", "Samples per optimizer step (train.batch_size)."),
        Flag("--max-length", f"{max_length}={{}}", "TOKENS", f"Maximum sequence length in tokens ({max_length})."),
        Flag("--seed", "train.seed={}", "NUMBER", "Seed of the sample order, dropout and new heads (train.seed)."),
        Flag("--device", "train.device={}", "auto|cpu|cuda", "Device to train on (train.device)."),
        Flag("--precision", "train.precision={}", "PRECISION", "auto, float32, bfloat16 or float16 (train.precision)."),
    )


PATIENCE = Flag(
    "--patience",
    "fit.patience={}",
    "NUMBER",
    "Evaluations without a better metric before training stops; 0: no early stopping (fit.patience).",
)
SEEDS = Flag("--seeds", "seeds={}", "NUMBER", "Runs with train.seed, train.seed + 1, ... (seeds).")

FinetuneCommand = with_settings_options(
    "heedful.runs.finetune.settings:FinetuneSettings",
    accepts_assignments=True,
    flags=(*_training_flags("max_length"), PATIENCE, SEEDS),
    reference="heedful init TASK",
)
TuneCommand = with_settings_options(  # without the flag --time-budget: tune has an option of this name for the search
    "heedful.runs.finetune.settings:FinetuneSettings",
    accepts_assignments=True,
    flags=tuple(flag for flag in (*_training_flags("max_length"), PATIENCE, SEEDS) if flag.name != "--time-budget"),
    reference="heedful init TASK",
)
PretrainCommand = with_settings_options(
    "heedful.runs.pretrain.settings:PretrainSettings",
    accepts_assignments=True,
    flags=_training_flags("max_seq_length"),
    reference="heedful init pretrain",
)
DistilCommand = with_settings_options(
    "heedful.runs.distil.settings:DistilSettings",
    "heedful.runs.distil.settings:MaskedDistilSettings",
    accepts_assignments=True,
    flags=(*_training_flags("max_length"), PATIENCE, SEEDS),
    reference="heedful init distil",
)
DataCommand = with_settings_options(
    "heedful.data.labelled.data_file:DataOptions",
    reference="heedful init classify",
    setting_help="How data is read, such as --data.columns.text review",
)
ServeCommand = with_settings_options("heedful.serve.settings:ServeSettings", reference="heedful init serve")
TokenizerCommand = with_settings_options("heedful.tokenizer.settings:TokenizerSettings")
