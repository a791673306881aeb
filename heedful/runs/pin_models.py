"""Pinning of models on the hub to commits, so that the settings of a run record which weights it started from."""

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
SETTINGS = "settings.toml"  # file of a run folder
MODEL_SETTINGS = (  # paths of settings that name a model
    "init.model",
    "model.init_from",
    "objective.teacher",
    "teacher",
    "student.model",
)


def pin_models(settings: Settings, folder: Path) -> Settings:
    """Add a commit to each name on the hub in settings: the commit in the run's settings, else the newest of `main`."""
    run_settings: dict[str, object] = {}
    with suppress(OSError, HeedfulError):
        run_settings = dict(flatten_settings(load_mapping(folder / SETTINGS)))
    for path in MODEL_SETTINGS:
        name = setting_at(settings, path)
        if isinstance(name, str) and hub.unpinned(name):
            run_name = run_settings.get(path, "")
            is_pinned = isinstance(run_name, str) and run_name.startswith(f"{name}@")
            settings = replace_setting(settings, path, run_name if is_pinned else hub.pinned(name))
    return settings
