"""The tasks, registered by name; another one is added with `register`."""

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

SPECS: dict[str, TaskSpec] = {}  # by name


def register(spec: TaskSpec) -> None:
    """Add a task.

    Raises:
        HeedfulError: If another task has its name.
    """
    from heedful.settings import clear_type_caches

    if spec.name in SPECS:
        raise HeedfulError(f'a task named "{spec.name}" is registered already: choose another name')
    _add(spec)
    clear_type_caches()


def unregister(name: str) -> None:
    """Remove a task that was registered."""
    from heedful.settings import clear_type_caches

    TaskSettings.MEMBERS.remove(SPECS.pop(name).settings)
    clear_type_caches()


def _add(spec: TaskSpec) -> None:
    SPECS[spec.name] = spec
    TaskSettings.MEMBERS.append(spec.settings)


for _spec in (CLASSIFY, MULTI_LABEL, RANK, REGRESS, TAG, QA, MULTIPLE_CHOICE, EMBED, SEQ2SEQ):
    _add(_spec)


def task_names() -> tuple[str, ...]:
    """Return the names that users give, in order."""
    return tuple(dict.fromkeys(spec.public_name for spec in SPECS.values()))


def specs_of_head(head: Head | None) -> tuple[TaskSpec, ...]:
    """Return the tasks that a model with this head may do, the most special one first."""
    return () if head is None else tuple(spec for spec in SPECS.values() if spec.recognizes(head))


def spec_of_head(head: Head | None) -> TaskSpec | None:
    """Return the task that a model with this head does; None: no task that is fine-tuned."""
    return next(iter(specs_of_head(head)), None)


def specs_named(name: str) -> tuple[TaskSpec, ...]:
    """Return the tasks that users give one name: which one is meant follows from the data."""
    return tuple(spec for spec in SPECS.values() if spec.public_name == name)
