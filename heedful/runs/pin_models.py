"""Pin models that settings name on the hub without a revision, so that a run records the commit it started from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from heedful.checkpoint import hub
from heedful.errors import HeedfulError
from heedful.runs.overrides import flatten_settings, replace_setting, setting_at
from heedful.settings import load_mapping

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
SETTINGS = "settings.toml"  # of a run's folder
MODELS = (
    "init.model",
    "model.init_from",
    "objective.teacher",
    "teacher",
    "student.model",
)  # settings that name a model


def pin_models(settings: Settings, folder: Path) -> Settings:
    """Return settings in which names on the hub have a commit: that of the run in `folder`, else that of `main`."""
    known: dict[str, object] = {}
    with suppress(OSError, HeedfulError):
        known = dict(flatten_settings(load_mapping(folder / SETTINGS)))
    for path in MODELS:
        value = setting_at(settings, path)
        if isinstance(value, str) and hub.unpinned(value):
            before = known.get(path, "")
            pinned = before if isinstance(before, str) and before.startswith(f"{value}@") else hub.pinned(value)
            settings = replace_setting(settings, path, pinned)
    return settings
