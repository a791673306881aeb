"""Pinning of models on the hub to commits, so that the settings of a run record which weights it started from.

`Run.resolve` calls `pin_models` before a run begins.
"""

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
SETTINGS = "settings.toml"  # file of a run folder with its settings
MODEL_SETTINGS = (  # paths of settings that name a model
    "init.model",
    "model.init_from",
    "objective.teacher",
    "teacher",
    "student.model",
)


def pin_models(settings: Settings, folder: Path) -> Settings:
    """Return settings in which each model on the hub that is named without a revision has a commit: NAME@COMMIT.

    A resumed run has the commits of its settings file. A new run has the newest commit of the branch `main`.

    Args:
        settings: Settings of a run.
        folder: The run folder, with or without a settings file.
    """
    saved_settings: dict[str, object] = {}
    with suppress(OSError, HeedfulError):
        saved_settings = dict(flatten_settings(load_mapping(folder / SETTINGS)))
    for path in MODEL_SETTINGS:
        name = setting_at(settings, path)
        if isinstance(name, str) and hub.unpinned(name):
            saved_name = saved_settings.get(path, "")
            is_same_model = isinstance(saved_name, str) and saved_name.startswith(f"{name}@")
            settings = replace_setting(settings, path, saved_name if is_same_model else hub.pinned(name))
    return settings
