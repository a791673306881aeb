"""The command `heedful completion`: print a completion script for a shell.

A script has tables of candidates, generated from the commands, so that a shell completes without starting Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args, get_type_hints

import typer

from heedful.cli.settings_command import ClickCommand, SettingsCommand

if TYPE_CHECKING:
    from heedful.runs.settings_schema import Setting

SHELLS = ("bash", "zsh", "fish")
ANY_FILE = "*"  # the value is a file or folder
NO_VALUE = "-"  # no value follows, or only one after "="
PLACEHOLDER = "@TABLES@\n"  # replaced by the tables in a template


class CompletionItem(NamedTuple):
    """One candidate for completion, and the values that may follow it.

    Args:
        word: A command, an option, or the position of an argument, from 1. An option after "?" is only offered once
            part of it has been typed. A setting after "=" is only offered as NAME=VALUE. If a command has such
            settings, settings with a dot and those after "?" are offered as PATH=VALUE too.
        values: The values that may follow, separated by spaces; or ANY_FILE; or NO_VALUE, alone or before values.
        help: Description in one line.
    """

    word: str
    values: str
    help: str

    def __str__(self) -> str:
        """Return the item as a line of a table: its columns, separated by "|"."""
        return "|".join(column.replace("|", "/").replace("\n", " ") for column in self)


def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a completion script for bash, zsh or fish.

    The script completes commands, flags, settings (--PATH VALUE and PATH=VALUE), tasks and recipes. Save it where the
    shell looks for it, with heedful completion bash > FILE, or add to ~/.bashrc: source <(heedful completion bash)

    bash-completion: ~/.local/share/bash-completion/completions/heedful

    zsh: _heedful in a folder of $fpath

    fish: ~/.config/fish/completions/heedful.fish
    """
    print(completion_script(shell, context.find_root().command), end="")


def completion_script(shell: str, group: ClickCommand) -> str:
    """Return the completion script of a shell for a group of commands."""
    from importlib.resources import files

    from heedful._version import __version__
    from heedful.cli.verb_group import VERB_ALIASES

    branches = []
    for verb, candidates in candidate_tables(group).items():
        names = [verb, *(alias for alias, name in VERB_ALIASES.items() if name == verb)]
        text = "\n".join(map(str, candidates))
        if shell == "fish":
            quoted = text.replace("\\", "\\\\").replace("'", "\\'")
            pattern = " ".join(names) if verb else "''"
            branches.append(f"        case {pattern}\n            string split \\n -- '{quoted}'\n")
        else:
            quoted = text.replace("'", "'\\''")
            pattern = "|".join(names) if verb else "''"
            branches.append(f"        {pattern}) table='\n{quoted}\n' ;;\n")
    template = (files("heedful") / "assets" / "completion" / f"heedful.{shell}").read_text(encoding="utf-8")
    return template.replace("@VERSION@", __version__).replace(PLACEHOLDER, "".join(branches))


def candidate_tables(group: ClickCommand) -> dict[str, list[CompletionItem]]:
    """Return the candidates after each command of a group. Those after `heedful` have the key ""."""
    commands: dict[str, ClickCommand] = dict(group.commands)
    verb_items = [CompletionItem(verb, NO_VALUE, command.get_short_help_str(70)) for verb, command in commands.items()]
    verb_items += [
        CompletionItem("--help", NO_VALUE, "Show the verbs."),
        CompletionItem("--version", NO_VALUE, "Print the version."),
    ]
    tables = {"": verb_items}
    for verb, command in commands.items():
        options = list(_options(command))
        if isinstance(command, SettingsCommand):
            options += _settings(command, {option.word for option in options})
        tables[verb] = [*_arguments(command), *options]
    return tables


def _options(command: ClickCommand) -> Iterator[CompletionItem]:
    """Yield the options of a command, and its flags of settings."""
    from heedful.runs.overrides import find_setting
    from heedful.runs.settings_schema import describe_settings

    known_values = _known_values()
    hints = get_type_hints(unwrap(command.callback))
    for param in command.params:
        if not hasattr(param, "is_flag"):  # an argument
            continue
        values = NO_VALUE if param.is_flag else " ".join(known_values.get(param.opts[0], ()))
        is_number = {int, float} & {hints[param.name], *get_args(hints[param.name])}
        if not values and not is_number:
            values = ANY_FILE
        yield from (CompletionItem(option, values, param.help or "") for option in param.opts)
    if isinstance(command, SettingsCommand) and command.flags:
        cls = command.settings_classes()[0]
        settings = {setting.path: setting for setting in describe_settings(cls)}
        for flag in command.flags:
            path = find_setting(cls, flag.assignment.partition("=")[0])
            choices = settings[path].choices if path in settings else ()
            yield CompletionItem(flag.name, " ".join(map(str, choices)), flag.help)
    yield CompletionItem("--help", NO_VALUE, "Show the options.")


def _settings(command: SettingsCommand, options: set[str]) -> Iterator[CompletionItem]:
    """Yield settings of a command by path, by the last component of the path if it is unique, and as NAME=VALUE.

    Args:
        command: The command.
        options: Options that the command already has.
    """
    from heedful.data.labelled.columns import COLUMN_NAMES
    from heedful.runs.settings_schema import describe_settings

    by_path: dict[str, CompletionItem] = {}
    short_flags: dict[str, CompletionItem] = {}  # by last component of the path
    assignments: dict[str, CompletionItem] = {}  # by last component of the path
    for cls in command.settings_classes():
        for setting in describe_settings(cls):
            path, name = setting.path, setting.name
            if path == "data.columns":
                for role in COLUMN_NAMES:
                    by_path[f"{path}.{role}"] = CompletionItem(f"--{path}.{role}", "", setting.doc)
                continue
            if setting.table and not setting.choices:
                continue
            values = _setting_values(setting)
            item = by_path.setdefault(path, CompletionItem(f"--{path}", values, setting.doc))
            if item.values != values:  # another kind has a setting with this path
                merged = dict.fromkeys([*item.values.split(), *values.split()])
                by_path[path] = item._replace(values=" ".join(merged))
            if not _has_unique_name(setting, cls):
                continue
            help = f"{path}: {setting.doc}"
            is_option = f"--{name.replace('_', '-')}" in options
            if "." in path and not is_option:
                short_flags.setdefault(name, CompletionItem(f"?--{name}", by_path[path].values, help))
            if command.accepts_assignments and ("." not in path or is_option):
                assignments.setdefault(name, CompletionItem(f"={name}", by_path[path].values, help))
    yield from (*by_path.values(), *short_flags.values(), *assignments.values())


def _setting_values(setting: Setting) -> str:
    """Return the values of a setting, as in `CompletionItem.values`."""
    members = get_args(setting.annotation)
    if setting.annotation is bool:
        return f"{NO_VALUE} true false"
    if bool in members:
        return "true false"
    values = " ".join(map(str, setting.choices))
    if not values and str in (setting.annotation, *members):
        return ANY_FILE
    return values


def _has_unique_name(setting: Setting, cls: type) -> bool:
    """Whether the last component of a setting's path names this setting only."""
    from heedful.errors import SettingError
    from heedful.runs.overrides import find_setting

    try:
        return find_setting(cls, setting.name) == setting.path
    except SettingError:
        return False


def _arguments(command: ClickCommand) -> list[CompletionItem]:
    """Return the arguments of a command whose values are known."""
    from heedful.runs import recipe_template as template
    from heedful.runs import recipes
    from heedful.study import STUDIES
    from heedful.tasks.specs import task_names

    known_values: dict[str, tuple[tuple[str, ...], ...]] = {  # for each command, the values of each argument
        "finetune": (task_names(),),
        "init": ((*template.template_names(), "serve"),),
        "recipe": (("ls", "cp"), tuple(offer.name for offer in recipes.list_assets())),
        "study": (tuple(STUDIES),),
        "completion": (SHELLS,),
        "kernels": (("show", "build"),),
    }
    arguments = enumerate(known_values.get(command.name, ()), start=1)
    return [CompletionItem(str(position), " ".join(values), "") for position, values in arguments]


def _known_values() -> dict[str, tuple[str, ...]]:
    """Return the values of options that accept one of a few texts, by option."""
    from heedful.cli.convert import DTYPES
    from heedful.cli.options import PRECISIONS
    from heedful.cli.predict_files import FORMATS
    from heedful.runs.distil.settings import CLASSIC_STUDENTS, LOSS_PRESETS, STATIC_STUDENT
    from heedful.runs.pretrain.settings import SIZES
    from heedful.runs.pretrain.specs import OBJECTIVES
    from heedful.runs.trackers import PACKAGES
    from heedful.tasks.specs import SPECS

    return {
        "--checkpoint": ("best", "last"),
        "--device": ("auto", "cpu", "cuda"),
        "--dtype": DTYPES,
        "--format": FORMATS,
        "--loss": tuple(LOSS_PRESETS),
        "--objective": tuple(OBJECTIVES),
        "--on-bad-row": ("raise", "skip"),
        "--precision": PRECISIONS,
        "--size": tuple(SIZES),
        "--split": ("train", "dev", "test"),
        "--student": (*SIZES, *CLASSIC_STUDENTS, STATIC_STUDENT, "layers=3"),
        "--suite": ("glue",),
        "--task": tuple(SPECS),
        "--track": tuple(PACKAGES),
    }
