"""`model_title`: the name of a model comes from its run, its folder, its card, its config.json or the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.look.model_title import model_title


def make_folder(path: Path, **files: str) -> str:
    """Make a folder with files, and return its path; the first "_" of a keyword is the "." of the file's name."""
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name.replace('_', '.', 1)}").write_text(content)
    return str(path)


def test_a_model_has_the_name_of_its_folder_or_on_the_hub(tmp_path: Path) -> None:
    assert model_title(make_folder(tmp_path / "my-model", README_md="# other\n")) == "my-model"
    assert model_title("org/name@main") == "name" and model_title("name") == "name"


def test_models_and_checkpoints_of_a_run_have_the_name_of_the_run(tmp_path: Path) -> None:
    make_folder(tmp_path / "tickets", journal_jsonl="")
    assert model_title(make_folder(tmp_path / "tickets" / "model")) == "tickets"
    assert model_title(make_folder(tmp_path / "tickets" / "state" / "step-00000400")) == "tickets step-00000400"


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
def test_a_folder_with_a_generic_name_is_named_by_its_card_or_config(
    tmp_path: Path, card: str, config: dict[str, object], expected: str
) -> None:
    model = make_folder(tmp_path / "model", README_md=card, config_json=json.dumps(config))
    assert model_title(model) == expected


def test_a_damaged_config_is_ignored(tmp_path: Path) -> None:
    assert model_title(make_folder(tmp_path / "model", config_json="[")) == "model"
