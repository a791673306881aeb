"""What an option names is not set by an assignment too: of two values one would be passed over without a word."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from heedful.errors import HeedfulError
from heedful.runs.settings import flat


def once(assignments: Sequence[str], option: str, given: object, *settings: str) -> None:
    """Refuse assignments to the settings that an option says, where it is given, and to what lies below them.

    >>> once(["train.length.count=9"], "--for", "", "train.length")
    >>> once(["train.length.count=9"], "--for", "1h", "train.length")
    Traceback (most recent call last):
    heedful.errors.HeedfulError: --for 1h and --set train.length.count=9 were given: both say train.length; give one
    """
    for assignment in assignments if given else ():
        for name, setting in ((name, each) for name in _names(assignment) for each in settings):
            if f"{name}.".startswith(f"{setting}."):
                raise HeedfulError(f"{option} {given} and --set {assignment} were given: both say {setting}; give one")


def _names(assignment: str) -> list[str]:
    """What it sets; a table in one line several."""
    try:
        return [name for name, _ in flat(tomllib.loads(assignment))]
    except tomllib.TOMLDecodeError:  # a text without quotes
        return ["".join(assignment.partition("=")[0].split())]
