"""benchmarks/scale.py, which computes how training on 64 GPUs scales: docs/scale.md shows its tables; known cases."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scale")


def test_the_page_shows_what_the_script_prints(scale: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scale.main()
    printed, page = capsys.readouterr().out, (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for title, make in scale.TABLES.items():
        assert f"## {title}\n\n{make()}" in printed
        assert f"## {title}\n\n{make()}" in page, "write the table anew: python benchmarks/scale.py"
    for share in (scale.kept(), scale.rest(), scale.kept() / scale.rest()):
        assert f"{share:.1%}" in page


def test_operations_and_parameters_of_known_shapes(scale: Any) -> None:
    assert round(scale.BASE.flop(128) / 1e6) == 545
    assert scale.LARGE.flop(128) == pytest.approx(1879e6, rel=1e-3)
    assert scale.BASE.parameters == 109_514_298  # transformers' BertForMaskedLM of that shape


def test_waiting_time_in_extreme_cases(scale: Any) -> None:
    infinitely_fast = scale.Network(name="infinitely fast", rate=1e18)
    step = scale.step(scale.BASE, infinitely_fast, 4096)
    # only the gradients that are ready last are waited for: those of the first block and of the embedding
    assert step.waiting == pytest.approx(2 * scale.LATENCY, rel=0.01)
    slow = scale.NETWORKS[1]
    all_gradients = slow.reduce(scale.BASE.parameters) + scale.BASE.layers * scale.LATENCY
    step = scale.step(scale.BASE, slow, 1e-6)  # almost no computation, with which transfers could overlap
    assert step.waiting == pytest.approx(all_gradients, rel=1e-6)
    embedding = slow.reduce(scale.BASE.parameters - 12 * scale.BASE.block)
    step = scale.step(scale.BASE, slow, 1e7)  # all transfers but the last two overlap with computation
    assert step.waiting == pytest.approx(embedding + slow.reduce(scale.BASE.block), rel=1e-6)
    waits = [scale.step(scale.LARGE, slow, tokens).waiting for tokens in scale.STEPS]
    assert waits == sorted(waits, reverse=True)


def test_tokens_that_are_needed(scale: Any) -> None:
    for efficiency in (0.5, 0.9):
        tokens = scale.needed(scale.BASE, scale.NETWORKS[1], efficiency)
        assert scale.step(scale.BASE, scale.NETWORKS[1], tokens).efficiency >= efficiency
        assert scale.step(scale.BASE, scale.NETWORKS[1], tokens - 1000).efficiency < efficiency
    wider = replace(scale.NETWORKS[0], rate=4 * scale.NETWORKS[0].rate)
    assert scale.needed(scale.BASE, wider, 0.95) < scale.needed(scale.BASE, scale.NETWORKS[0], 0.95)


def test_estimates_equal_published_numbers(scale: Any) -> None:
    eight, single = scale.LOGS[2], scale.LOGS[1]
    assert eight.batch_of_gpu == 72 and single.batch_of_gpu == pytest.approx(96, abs=0.1)
    assert scale.kept() == pytest.approx((53_541 + 53_185) / 64 / ((7_760 + 7_760) / 8), rel=1e-4)
