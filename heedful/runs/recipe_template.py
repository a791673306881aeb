"""Templates of recipes for `heedful init`: all settings of a kind of run, commented out, with default and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from heedful.runs.aliases import canonical_task
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
RUNS = ("pretrain", "distil")  # templates other than those for tasks of finetune


def template_names() -> list[str]:
    """Return the names of all templates: the tasks of finetune, "pretrain" and "distil"."""
    return [*task_names(), *RUNS]


def template_settings(name: str) -> FinetuneSettings | PretrainSettings | DistilSettings:
    """Return the default settings of a task of finetune, of pretrain, or of distil.

    Raises:
        HeedfulError: If `name` is not the name of a template.
    """
    from heedful.runs.distil import settings as distil_settings
    from heedful.runs.finetune import settings
    from heedful.runs.pretrain import settings as pretrain_settings

    if name == "pretrain":
        return pretrain_settings.pretrain_defaults("mlm", 256, continued=False)
    task = canonical_task(task_names()[0] if name == "distil" else name)
    defaults = settings.finetune_defaults(task, EXAMPLES, random_init=False)[0]
    if name != "distil":
        return defaults
    return distil_settings.DistilSettings(task=defaults.task, teacher="TEACHER", train=defaults.train, fit=defaults.fit)


def recipe_template(name: str) -> str:
    """Return the text of a recipe in which each setting is commented out, as "#seeds = 1".

    Raises:
        HeedfulError: If there is no such template.
    """
    command = name if name in RUNS else f"finetune {name}"
    head = [
        f"# Settings of heedful {command}, each with its default. To change one, remove the # in front of it.",
        "# Give this file to the command with --recipe FILE.",
    ]
    if name != "pretrain":
        head.append(f"# Defaults of train and fit follow from the data; those below are for {EXAMPLES:,} examples.")
    return comment_out(template_settings(name), head)


def comment_out(settings: DataclassInstance, head: Sequence[str]) -> str:
    """Return the text of a TOML file: the lines `head`, then all settings, each commented out."""
    # reversed, so that the first one of several settings with the same path is used
    setting_by_path = {
        setting.path: setting for setting in reversed(describe_settings(settings)) if _is_chosen(setting, settings)
    }
    lines, table = list(head), ""
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


def _is_chosen(setting: Setting, settings: DataclassInstance) -> bool:
    """Whether a setting belongs to the kinds of tables that the defaults have."""
    for condition in setting.when:
        path, kind = condition.split(" = ")
        value: object = settings
        for part in path.split("."):
            value = getattr(value, part, None)
        if f'"{value}"' != kind:
            return False
    return True


def _other_kinds(settings: DataclassInstance, table: str) -> Iterator[str]:
    """Yield a comment for each kind of a table except the default kind, with the names of the kind's settings."""
    by_kind: dict[str, list[str]] = {}
    for setting in describe_settings(settings):
        if setting.when and setting.when[-1].startswith(f"{table}.kind = ") and not _is_chosen(setting, settings):
            by_kind.setdefault(setting.when[-1].removeprefix(f"{table}."), []).append(setting.path[len(table) + 1 :])
    for kind, paths in by_kind.items():
        yield f"# with {kind}: {', '.join(dict.fromkeys(paths))}"
