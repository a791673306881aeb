"""scripts/compare/trees.py, which compares the settings of two checkouts: renamed keys and values, differences."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

TREES = Path(__file__).parent.parent / "scripts" / "compare" / "trees.py"
TABLE = """
[keys]
"train/rate" = "train/optimizer/lr"
"journal/*/rate" = "log/*/lr"
"training:rate" = "training:speed"
[values]
"task/kind" = { extract = "qa" }
[removed]
"train/gone" = "merged into another setting"
[added]
"train/fresh" = "new"
"""


@pytest.fixture
def trees(tmp_path: Path) -> dict[str, Any]:
    """The script's names, with a table of this test."""
    tree_functions = runpy.run_path(str(TREES))
    (tmp_path / "key_map.toml").write_text(TABLE)
    read = tree_functions["KeyMap"].read
    tree_functions["KeyMap"].read = lambda section: read(section, tmp_path / "key_map.toml")
    return tree_functions


def test_old_names_and_values_are_looked_up(trees: dict[str, Any]) -> None:
    before = {"train": {"rate": 1.5, "gone": 3}, "task": {"kind": "extract"}, "journal": [{"rate": 2, "loss": 0.1}]}
    now = {"train": {"optimizer": {"lr": 1.5}, "fresh": 0}, "task": {"kind": "qa"}, "log": [{"lr": 2}]}
    lines = trees["differences"]("defaults", before, now)
    assert len(lines) == 1 and lines[0].startswith("journal/0/loss") and "(nothing)" in lines[0]


def test_a_rule_of_a_section_holds_there_alone(trees: dict[str, Any]) -> None:
    assert not trees["differences"]("training", {"rate": 1}, {"speed": 1})
    assert len(trees["differences"]("defaults", {"rate": 1}, {"speed": 1})) == 2


@pytest.mark.parametrize(
    ("before", "now"), [(1, 1.0), (0.1, 0.1 + 2**-56), ([], {}), ("a", "b"), ([1], [1, 2]), (None, 0)]
)
def test_any_unequal_value_is_a_difference(trees: dict[str, Any], before: Any, now: Any) -> None:
    assert trees["differences"]("training", {"x": before}, {"x": now})
    assert not trees["differences"]("training", {"x": float("nan"), "y": before}, {"x": float("nan"), "y": before})


def test_two_old_values_cannot_have_one_new_name(trees: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="two values of the old tree"):
        trees["differences"]("training", {"rate": 1, "speed": 2}, {"speed": 1})
