"""Templates of recipes for `heedful init`: TOML text with all settings of a kind of run, each one commented out.

A line of a template is "#NAME = DEFAULT  # MEANING".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from heedful.runs.aliases import canonical_task
from heedful.runs.overrides import setting_at
from heedful.runs.settings_schema import Setting, describe_settings
from heedful.settings import to_mapping
from heedful.tasks.specs import task_names
from heedful.toml_json import toml_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from heedful.runs.distil.settings import DistilSettings
    from heedful.runs.finetune.settings import FinetuneSettings
    from heedful.runs.pretrain.settings import PretrainSettings

EXAMPLES = 1_000  # assumed training examples, for defaults that depend on the size of the data
OTHER_TEMPLATES = ("pretrain", "distil")  # templates that are not for a task of finetune


def template_names() -> list[str]:
    """Return the names of all templates: the tasks of finetune, "pretrain" and "distil"."""
    return [*task_names(), *OTHER_TEMPLATES]


def template_settings(name: str) -> FinetuneSettings | PretrainSettings | DistilSettings:
    """Return the default settings that a template shows.

    Args:
        name: A task of finetune or one of its aliases, "pretrain" or "distil".

    Raises:
        HeedfulError: If `name` is not the name of a template.
    """
    from heedful.runs.distil import settings as distil_settings
    from heedful.runs.finetune import settings
    from heedful.runs.pretrain import settings as pretrain_settings

    if name == "pretrain":
        return pretrain_settings.pretrain_defaults("mlm", 256, continued=False)
    if name != "distil":
        return settings.finetune_defaults(canonical_task(name), EXAMPLES, random_init=False)[0]
    defaults = settings.finetune_defaults(task_names()[0], EXAMPLES, random_init=False)[0]
    return distil_settings.DistilSettings(task=defaults.task, teacher="TEACHER", train=defaults.train, fit=defaults.fit)


def recipe_template(name: str) -> str:
    """Return the text of a recipe in which each setting is commented out, as "#seeds = 1".

    Raises:
        HeedfulError: If there is no such template.
    """
    command = name if name in OTHER_TEMPLATES else f"finetune {name}"
    head = [
        f"# Settings of heedful {command}, each with its default. To change one, remove the # in front of it.",
        "# Give this file to the command with --recipe FILE.",
    ]
    if name != "pretrain":
        head.append(f"# Defaults of train and fit follow from the data; those below are for {EXAMPLES:,} examples.")
    return comment_out(template_settings(name), head)


def comment_out(settings: DataclassInstance, head: Sequence[str]) -> str:
    """Return the text of a TOML file: the lines `head`, then all settings, each commented out.

    A table with several kinds has the settings of its default kind. Comments name the settings of the other kinds.
    """
    setting_by_path: dict[str, Setting] = {}
    for setting in describe_settings(settings):
        if _is_of_default_kinds(setting, settings):
            setting_by_path.setdefault(setting.path, setting)
    lines = list(head)
    table = ""  # path of the table of the current line; "": the root
    for line in "\n".join(toml_lines(to_mapping(settings), ())).split("\n"):
        if line.startswith("["):
            table = line.strip("[]")
            lines += [line, *(_other_kinds(settings, table) if table != "task" else ())]
        elif not line:
            lines.append("")
        else:
            path = ".".join(filter(None, (table, line.partition(" = ")[0])))
            lines.append(f"#{line}{_comment(setting_by_path.get(path))}")
    return "\n".join(lines) + "\n"


def _comment(setting: Setting | None) -> str:
    """Return the comment after a setting, with its meaning and choices, or "" for a key that is not a setting."""
    if setting is None:
        return ""
    choices = f" ({', '.join(map(str, setting.choices))})" if setting.choices else ""
    return f"  # {setting.doc}{choices}"


def _is_of_default_kinds(setting: Setting, settings: DataclassInstance) -> bool:
    """Whether the default settings have a setting: whether all its conditions on kinds of tables hold for them."""
    for condition in setting.when:  # such as 'train.schedule.kind = "cosine"'
        path, required_kind = condition.split(" = ")
        if f'"{setting_at(settings, path)}"' != required_kind:
            return False
    return True


def _other_kinds(settings: DataclassInstance, table: str) -> Iterator[str]:
    """Yield a comment for each kind of a table except the default kind, with the names of the kind's settings.

    Args:
        settings: The default settings.
        table: Path of the table.
    """
    names_by_condition: dict[str, list[str]] = {}  # names of settings in the table, by 'kind = "cosine"'
    for setting in describe_settings(settings):
        is_in_table = bool(setting.when) and setting.when[-1].startswith(f"{table}.kind = ")
        if is_in_table and not _is_of_default_kinds(setting, settings):
            condition = setting.when[-1].removeprefix(f"{table}.")
            names_by_condition.setdefault(condition, []).append(setting.path.removeprefix(f"{table}."))
    for condition, names in names_by_condition.items():
        yield f"# with {condition}: {', '.join(dict.fromkeys(names))}"
