"""Names of models: of runs, folders, cards, configs and the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.look.model_title import model_title


def folder(path: Path, **files: str) -> str:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name.replace('_', '.', 1)}").write_text(content)
    return str(path)


def test_the_folder_names_a_model(tmp_path: Path) -> None:
    assert model_title(folder(tmp_path / "my-model", README_md="# other\n")) == "my-model"
    assert model_title("org/name@main") == "name" and model_title("name") == "name"


def test_a_run_names_its_model_and_its_checkpoints(tmp_path: Path) -> None:
    folder(tmp_path / "tickets", journal_jsonl="")
    assert model_title(folder(tmp_path / "tickets" / "model")) == "tickets"
    assert model_title(folder(tmp_path / "tickets" / "state" / "step-00000400")) == "tickets step-00000400"


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        ("---\nx: y\n---\n# all-MiniLM-L6-v2\n", {"_name_or_path": "org/base"}, "all-MiniLM-L6-v2"),
        ("# A sentence is no name\n", {"_name_or_path": "org/base"}, "base"),
        ("", {"_name_or_path": "/opt/models/model"}, "model"),
        ("", {"_name_or_path": 3}, "model"),
        ("# " + "a" * 100, {}, "a" * 59 + "…"),
    ],
)
def test_a_folder_without_a_name(tmp_path: Path, card: str, config: dict[str, object], expected: str) -> None:
    place = folder(tmp_path / "model", README_md=card, config_json=json.dumps(config))
    assert model_title(place) == expected
    (tmp_path / "model" / "config.json").write_text("[")
    assert model_title(place)
