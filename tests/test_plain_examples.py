"""Each example in bare PyTorch ends in a comparison with the library; running it is the test."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PLAIN = sorted((Path(__file__).parents[1] / "examples" / "plain").glob("*.py"))


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_bare_pytorch_equals_the_library(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "assert " in text and text.count("\n") < 75
    runpy.run_path(str(path))["main"]()


def test_scores_grow_with_the_width_unless_they_are_divided() -> None:
    table = runpy.run_path(str(PLAIN[0].with_name("why_sqrt_d.py")))["main"]()
    for width, (variance, gradient, scaled_variance, scaled_gradient) in table.items():
        assert variance == pytest.approx(width, rel=0.2) and scaled_variance == pytest.approx(1, rel=0.2)
        assert gradient <= scaled_gradient * 1.01
    assert table[1024][1] < 0.25 * table[1024][3]


def test_wordpiece_merges_the_most_frequent_pair_first() -> None:
    merges = runpy.run_path(str(PLAIN[0].with_name("wordpiece.py")))["main"]()
    assert merges[0] == ("##s", "##t")  # newest 6, widest 3
