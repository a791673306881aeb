"""The data settings of a run, for other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heedful.data import DataSettings
from heedful.data.inputs.inherited_settings import by_names, carried, files_of
from heedful.runs.finetune.settings import LongInputs, run_data_settings


def run_settings_and_files(run: str | Path) -> tuple[DataSettings, tuple[str, ...]]:
    """Return a run's data settings, with names of columns where its files have a header, and its files' names.

    Defaults and () where `run` is no run folder.
    """
    settings = run_data_settings(run)[0]
    try:
        about = json.loads((Path(run) / "data.json").read_text(encoding="utf-8"))
        return by_names(settings, about.get("columns", {})), tuple(about["files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return settings, ()


def data_settings_for(
    run: str | Path, data: Any, chosen: DataSettings | None = None
) -> tuple[DataSettings, LongInputs]:
    """Return the run's data settings that hold for `data`, and how it treats long texts; see `as_trained`.

    `chosen` are settings given by hand, which go over them.
    """
    settings, names = run_settings_and_files(run)
    return carried(settings, names, files_of(data), chosen or DataSettings()), run_data_settings(run)[1]
