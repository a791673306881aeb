"""Data settings of a run that apply to other data: column names instead of numbers, and only what fits the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.data import DataSettings, LabelledExample, read
from heedful.data.inputs.inherited_settings import columns_by_name
from heedful.runs.data_settings import data_settings_for, run_settings_and_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose settings name columns by their numbers."""
    (tmp_path / "settings.toml").write_text(
        "long_inputs = 'truncate'\n[data]\ndev_fraction = 0.2\ncolumns = {text = 2, label = 1}\n"
    )
    return tmp_path


def write_data_facts(run: Path, columns: dict[str, list[str]] | None) -> None:
    """Write data.json of the run, with the columns that it read by role."""
    data_facts: dict[str, object] = {"files": {"a.csv": ""}}
    if columns is not None:
        data_facts["columns"] = columns
    (run / "data.json").write_text(json.dumps(data_facts))


def test_column_numbers_become_names_if_the_files_of_the_run_had_a_header(run: Path) -> None:
    write_data_facts(run, {"text": ["phrase"], "label": ["kind"]})
    settings, file_names = run_settings_and_files(run)
    assert settings == DataSettings(dev_fraction=0.0, columns={"text": "phrase", "label": "kind"})
    assert file_names == ("a.csv",)
    for columns in (None, {"text": ["2"], "label": ["1"]}):
        write_data_facts(run, columns)
        settings, _ = run_settings_and_files(run)
        assert settings.columns == {"text": 2, "label": 1}


def test_settings_of_a_run_apply_only_to_data_of_the_same_form(run: Path) -> None:
    write_data_facts(run, {"text": ["2"], "label": ["1"]})
    without_header, with_header = run / "same.csv", run / "named.csv"
    without_header.write_text("x,Who wrote it?\n")
    with_header.write_text("label,id,text\nx,7,Who wrote it?\n")
    no_settings, by_number = (
        DataSettings(dev_fraction=0.0),
        DataSettings(dev_fraction=0.0, columns={"text": 2, "label": 1}),
    )
    assert data_settings_for(run, without_header) == (by_number, "truncate")
    assert data_settings_for(run, [with_header]) == (no_settings, "truncate")
    settings, _ = data_settings_for(run, with_header, DataSettings(header=False))
    assert settings.columns == {"text": 2, "label": 1}
    assert data_settings_for(run / "none", without_header) == (no_settings, "stride"), "not a run"


def test_a_dataset_has_the_names_of_its_columns_by_role(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("kind,phrase\nx,Rain again\n")
    (tmp_path / "b.csv").write_text("x,Rain again\n")
    settings = DataSettings(columns={"text": 2, "label": 1}, dev_fraction=0.0)
    with_header = read(tmp_path / "a.csv", LabelledExample, replace(settings, header=True))
    without_header = read(tmp_path / "b.csv", LabelledExample, settings)
    assert columns_by_name(settings, with_header.columns).columns == {"text": "phrase", "label": "kind"}
    assert columns_by_name(settings, without_header.columns) == settings
