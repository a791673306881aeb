"""The verb that prints completion scripts for shells: completion.

A script holds tables made from the commands, so that a shell completes without starting Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import unwrap
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import typer

SHELLS = ("bash", "zsh", "fish")
ANY = "*"  # files and folders
SWITCH = "-"  # no value, or one after "=" only
HOLDER = "@TABLES@\n"  # what tables replace in a template


class Candidate(NamedTuple):
    """Candidates for completion.

    Args:
        word: A verb, an option, or the number of an argument from 1. "?" in front of an option: only offered when
            some of it has been typed. "=" in front of a setting: only offered as NAME=VALUE. Of a command with such
            rows, settings with a dot and those with "?" are offered as PATH=VALUE too.
        values: Its values, separated by spaces; ANY, or SWITCH in front.
        help: One line.
    """

    word: str
    values: str
    help: str

    def __str__(self) -> str:
        """The columns, separated by "|"."""
        return "|".join(column.replace("|", "/").replace("\n", " ") for column in self)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a completion script for bash, zsh or fish.

    It completes verbs, flags, settings (--PATH VALUE and PATH=VALUE), tasks and recipes. Write it to the file that the
    shell reads, as in heedful completion bash > FILE, or write in ~/.bashrc: source <(heedful completion bash)

    bash-completion: ~/.local/share/bash-completion/completions/heedful

    zsh: _heedful in a folder of $fpath

    fish: ~/.config/fish/completions/heedful.fish
    """
    print(script(shell), end="")


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    from importlib.resources import files

    from heedful import __version__
    from heedful.cli.commands import VERB_ALIASES

    found = tables()
    branches = []
    for verb, rows in found.items():
        names = [verb, *(other for other, meant in VERB_ALIASES.items() if meant == verb)]
        text = "\n".join(map(str, rows))
        if shell == "fish":
            quoted = text.replace("\\", "\\\\").replace("'", "\\'")
            pattern = " ".join(names) if verb else "''"
            branches.append(f"        case {pattern}\n            string split \\n -- '{quoted}'\n")
        else:
            quoted = text.replace("'", "'\\''")
            pattern = "|".join(names) if verb else "''"
            branches.append(f"        {pattern}) table='\n{quoted}\n' ;;\n")
    template = (files("heedful") / "assets" / "completion" / f"heedful.{shell}").read_text(encoding="utf-8")
    return template.replace("@VERSION@", __version__).replace(HOLDER, "".join(branches))


@cache
def tables() -> dict[str, list[Candidate]]:
    """Return the candidates that follow each verb; the key "" holds the verbs."""
    from heedful.cli import app
    from heedful.cli.commands import SECTIONS, SettingsCommand

    group: Any = typer.main.get_command(app)
    verbs = [verb for names in SECTIONS.values() for verb in names]
    commands = {verb: group.commands[verb] for verb in verbs}
    found = {"": [Candidate(verb, SWITCH, commands[verb].get_short_help_str(70)) for verb in verbs]}
    found[""] += [Candidate("--help", SWITCH, "Show the verbs."), Candidate("--version", SWITCH, "Print the version.")]
    for verb, command in commands.items():
        rows = list(_options(command))
        rows += _settings(command, {row.word for row in rows}) if isinstance(command, SettingsCommand) else ()
        found[verb] = [*_arguments(command), *rows]
    return found


def _options(command: Any) -> Iterator[Candidate]:
    """Options of a command, and its flags of settings."""
    from heedful.runs.overrides import find_setting
    from heedful.runs.settings_schema import describe_settings

    known, hints = _known_values(), get_type_hints(unwrap(command.callback))
    for param in command.params:
        if not hasattr(param, "is_flag"):
            continue
        values = SWITCH if param.is_flag else " ".join(known.get(param.opts[0], ()))
        if not values and not {int, float} & {hints[param.name], *get_args(hints[param.name])}:
            values = ANY
        yield from (Candidate(option, values, param.help or "") for option in param.opts)
    flags = getattr(command, "short", ())
    cls: Any = command.classes()[0] if flags else None
    settings = {setting.path: setting for setting in describe_settings(cls)} if flags else {}
    for flag in flags:
        path = find_setting(cls, flag.assignment.partition("=")[0])
        choices = settings[path].choices if path in settings else ()
        yield Candidate(flag.name, " ".join(map(str, choices)), flag.help)
    yield Candidate("--help", SWITCH, "Show the options.")


def _settings(command: Any, taken: set[str]) -> Iterator[Candidate]:
    """Yield settings of a command by path, by the end of the path where it is unique, and as NAME=VALUE."""
    from heedful.data.labelled.columns import NAMES
    from heedful.errors import SettingError
    from heedful.runs.overrides import find_setting
    from heedful.runs.settings_schema import describe_settings

    rows: dict[str, Candidate] = {}
    ends: dict[str, Candidate] = {}
    words: dict[str, Candidate] = {}
    for cls in command.classes():
        for setting in describe_settings(cls):
            path, members = setting.path, get_args(setting.type)
            if path == "data.columns":
                rows |= {f"{path}.{role}": Candidate(f"--{path}.{role}", "", setting.doc) for role in NAMES}
            if path == "data.columns" or (setting.table and not setting.choices):
                continue
            values = " ".join(map(str, setting.choices))
            if setting.type is bool:
                values = f"{SWITCH} true false"
            elif bool in members:
                values = "true false"
            elif not values and str in (setting.type, *members):
                values = ANY
            before = rows.setdefault(path, Candidate(f"--{path}", values, setting.doc))
            if before.values != values:  # settings of this path in other kinds
                both = dict.fromkeys([*before.values.split(), *values.split()])
                rows[path] = before._replace(values=" ".join(both))
            try:
                unique = find_setting(cls, setting.name) == path
            except SettingError:
                continue
            name, is_flag = setting.name, f"--{setting.name.replace('_', '-')}" in taken
            if unique and "." in path and not is_flag:
                ends.setdefault(name, Candidate(f"?--{name}", rows[path].values, f"{path}: {setting.doc}"))
            if unique and command.words and ("." not in path or is_flag):
                words.setdefault(name, Candidate(f"={name}", rows[path].values, f"{path}: {setting.doc}"))
    yield from (*rows.values(), *ends.values(), *words.values())


def _arguments(command: Any) -> list[Candidate]:
    """Arguments whose values are known."""
    from heedful.runs import recipe_template as template
    from heedful.runs import recipes
    from heedful.study import STUDIES
    from heedful.tasks.specs import task_names

    known: dict[str, tuple[tuple[str, ...], ...]] = {
        "finetune": (task_names(),),
        "init": ((*template.template_names(), "serve"),),
        "recipe": (("ls", "cp"), tuple(offer.name for offer in recipes.list_assets())),
        "study": (tuple(STUDIES),),
        "completion": (SHELLS,),
        "kernels": (("show", "build"),),
    }
    return [Candidate(str(at), " ".join(values), "") for at, values in enumerate(known.get(command.name, ()), start=1)]


def _known_values() -> dict[str, tuple[str, ...]]:
    """Values of options whose type is text."""
    from heedful.cli import DTYPES
    from heedful.cli.predict_files import FORMATS
    from heedful.cli.train import PRECISIONS
    from heedful.runs.distil.settings import CLASSIC, LOSS_PRESETS
    from heedful.runs.pretrain.settings import OBJECTIVES, SIZES
    from heedful.runs.trackers import PACKAGES
    from heedful.tasks.specs import SPECS

    return {
        "--checkpoint": ("best", "last"),
        "--device": ("cpu", "cuda"),
        "--dtype": DTYPES,
        "--format": FORMATS,
        "--loss": tuple(LOSS_PRESETS),
        "--objective": tuple(OBJECTIVES),
        "--on-bad-row": ("raise", "skip"),
        "--precision": PRECISIONS,
        "--size": tuple(SIZES),
        "--split": ("train", "dev", "test"),
        "--student": (*SIZES, *CLASSIC, "layers=3"),
        "--suite": ("glue",),
        "--task": tuple(SPECS),
        "--track": tuple(PACKAGES),
    }
