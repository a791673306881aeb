"""Data settings of a run, for reading other data as it read its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from heedful.data import DataSettings
from heedful.data.inputs.inherited_settings import columns_by_name, inherit_settings, list_data_files
from heedful.data.inputs.input_files import settings_for_inputs
from heedful.runs.finetune.settings import LongInputs, run_data_settings


def run_settings_and_files(run: str | Path) -> tuple[DataSettings, tuple[str, ...]]:
    """A run's data settings, with names of columns if its files have a header, and the names of its files.

    Defaults and () if `run` is not a run folder.
    """
    settings = run_data_settings(run)[0]
    try:
        about = json.loads((Path(run) / "data.json").read_text(encoding="utf-8"))
        return columns_by_name(settings, about.get("columns", {})), tuple(about["files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return settings, ()


def input_settings_for(
    run: str | Path, kind: str, files: Sequence[Path], chosen: DataSettings, *, exclude: Path | None = None
) -> DataSettings:
    """The run's data settings that apply to files of unlabelled inputs; see `settings_for_inputs`."""
    from heedful.runs.run_folder import label_layout  # it imports torch

    trained, names = run_settings_and_files(run)
    trained = replace(trained, format=trained.format or label_layout(run))
    return settings_for_inputs(trained, kind, files, chosen, exclude=exclude, names=names)


def data_settings_for(
    run: str | Path, data: object, chosen: DataSettings | None = None
) -> tuple[DataSettings, LongInputs]:
    """The run's data settings that apply to `data`, and how it treats long texts; see `run_data_settings`.

    `chosen` are settings given by hand, which override them.
    """
    settings, names = run_settings_and_files(run)
    return inherit_settings(settings, names, list_data_files(data), chosen or DataSettings()), run_data_settings(run)[1]
