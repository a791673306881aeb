"""The registry of tasks, in which the command line, runs and the server look tasks up. `register` adds a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import TaskSpec
from heedful.tasks.specs.classify import CLASSIFY, MULTI_LABEL
from heedful.tasks.specs.embed import EMBED
from heedful.tasks.specs.multiple_choice import MULTIPLE_CHOICE
from heedful.tasks.specs.qa import QA
from heedful.tasks.specs.rank import RANK
from heedful.tasks.specs.regress import REGRESS
from heedful.tasks.specs.seq2seq import SEQ2SEQ
from heedful.tasks.specs.tag import TAG

if TYPE_CHECKING:
    from heedful.model.config import Head

SPECS: dict[str, TaskSpec] = {}  # the registered tasks by name


def register(spec: TaskSpec) -> None:
    """Register a task.

    Raises:
        HeedfulError: If a task with this name is registered already.
    """
    from heedful.settings import clear_type_caches

    if spec.name in SPECS:
        raise HeedfulError(f'a task named "{spec.name}" is registered already: choose another name')
    _add(spec)
    clear_type_caches()


def unregister(name: str) -> None:
    """Remove a registered task."""
    from heedful.settings import clear_type_caches

    TaskSettings.MEMBERS.remove(SPECS.pop(name).settings)
    clear_type_caches()


def _add(spec: TaskSpec) -> None:
    """Register a task that has a new name."""
    SPECS[spec.name] = spec
    TaskSettings.MEMBERS.append(spec.settings)


for _spec in (CLASSIFY, MULTI_LABEL, RANK, REGRESS, TAG, QA, MULTIPLE_CHOICE, EMBED, SEQ2SEQ):
    _add(_spec)


def task_names() -> tuple[str, ...]:
    """Return the names of tasks for users, in the order of registration."""
    return tuple(dict.fromkeys(spec.public_name for spec in SPECS.values()))


def specs_of_head(head: Head | None) -> tuple[TaskSpec, ...]:
    """Return the tasks that a model with this head can do. Specific tasks are registered before general ones."""
    return () if head is None else tuple(spec for spec in SPECS.values() if spec.recognizes(head))


def spec_of_head(head: Head | None) -> TaskSpec | None:
    """Return the first task that a model with this head can do, or None if no task can be fine-tuned with it."""
    return next(iter(specs_of_head(head)), None)


def specs_named(name: str) -> tuple[TaskSpec, ...]:
    """Return the tasks that share this name for users. The data decides which task is meant."""
    return tuple(spec for spec in SPECS.values() if spec.public_name == name)
