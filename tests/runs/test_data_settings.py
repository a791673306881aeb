"""The data settings of a run, for other data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.data import DataSettings, LabelledExample, read
from heedful.data.inputs.inherited_settings import columns_by_name
from heedful.runs.data_settings import data_settings_for, run_settings_and_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that read a file by numbers of columns."""
    (tmp_path / "settings.toml").write_text(
        "long_inputs = 'truncate'\n[data]\ndev_fraction = 0.2\ncolumns = {text = 2, label = 1}\n"
    )
    return tmp_path


def known(run: Path, columns: dict[str, list[str]] | None) -> None:
    (run / "data.json").write_text(json.dumps({"files": {"a.csv": ""}} | ({"columns": columns} if columns else {})))


def test_numbers_become_names_where_the_runs_files_had_a_header(run: Path) -> None:
    known(run, {"text": ["phrase"], "label": ["kind"]})
    settings, names = run_settings_and_files(run)
    assert settings == DataSettings(dev_fraction=0.0, columns={"text": "phrase", "label": "kind"}) and names == (
        "a.csv",
    )
    for columns in (None, {"text": ["2"], "label": ["1"]}):
        known(run, columns)
        assert run_settings_and_files(run)[0].columns == {"text": 2, "label": 1}


def test_what_holds_for_other_data(run: Path) -> None:
    known(run, {"text": ["2"], "label": ["1"]})
    (run / "same.csv").write_text("x,Who wrote it?\n")
    (run / "named.csv").write_text("label,id,text\nx,7,Who wrote it?\n")
    assert data_settings_for(run, run / "same.csv") == (
        DataSettings(dev_fraction=0.0, columns={"text": 2, "label": 1}),
        "truncate",
    )
    assert data_settings_for(run, [run / "named.csv"]) == (DataSettings(dev_fraction=0.0), "truncate")
    assert data_settings_for(run, run / "named.csv", DataSettings(header=False))[0].columns == {"text": 2, "label": 1}
    assert data_settings_for(run / "none", run / "same.csv") == (DataSettings(dev_fraction=0.0), "stride")


def test_a_source_knows_the_columns_of_its_roles(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("kind,phrase\nx,Rain again\n")
    (tmp_path / "b.csv").write_text("x,Rain again\n")
    settings = DataSettings(columns={"text": 2, "label": 1}, dev_fraction=0.0)
    named = read(
        tmp_path / "a.csv",
        LabelledExample,
        DataSettings(**{"columns": settings.columns, "header": True, "dev_fraction": 0.0}),
    )
    assert columns_by_name(settings, named.columns).columns == {"text": "phrase", "label": "kind"}
    assert columns_by_name(settings, read(tmp_path / "b.csv", LabelledExample, settings).columns) == settings
