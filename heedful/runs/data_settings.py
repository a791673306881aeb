"""Data settings of a finished run, reused for other files.

Evaluation, prediction and text selection read their files with them: as the run read its training data.
"""

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
    """Return a run's data settings and the names of its files.

    Columns are set by name if the files have a header. If `run` is not a run folder, the settings are the defaults, and
    there are no file names.
    """
    settings = run_data_settings(run)[0]
    try:
        data_facts = json.loads((Path(run) / "data.json").read_text(encoding="utf-8"))
        return columns_by_name(settings, data_facts.get("columns", {})), tuple(data_facts["files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return settings, ()


def input_settings_for(
    run: str | Path, kind: str, files: Sequence[Path], chosen: DataSettings, *, exclude: Path | None = None
) -> DataSettings:
    """Return the run's data settings that apply to files of unlabelled inputs.

    Args:
        run: A run folder. For any other model, the settings are the defaults.
        kind: Kind of the model's head.
        files: The input files.
        chosen: Settings that the user sets for the input files. Columns of the run that cannot be combined with the
            chosen columns are left out.
        exclude: A folder whose files are not read. If None, all files are read.
    """
    from heedful.runs.run_folder import label_layout  # imports torch

    run_settings, file_names = run_settings_and_files(run)
    run_settings = replace(run_settings, format=run_settings.format or label_layout(run))
    return settings_for_inputs(run_settings, kind, files, chosen, exclude=exclude, names=file_names)


def data_settings_for(
    run: str | Path, data: object, chosen: DataSettings | None = None
) -> tuple[DataSettings, LongInputs]:
    """Return the run's data settings that apply to `data`, and how the run treats long texts.

    Args:
        run: A run folder. For any other model, the settings are the defaults.
        data: The data to read.
        chosen: Settings that the user sets for `data`, such as its format. They decide which of the run's settings
            apply, and are not merged into the result.
    """
    run_settings, file_names = run_settings_and_files(run)
    settings = inherit_settings(run_settings, file_names, list_data_files(data), chosen or DataSettings())
    _, long_inputs = run_data_settings(run)
    return settings, long_inputs
