"""The paper simulation of 64 GPUs: the page shows what the script prints, and the formula is right where one knows."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script."""
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


def test_shapes(scale: Any) -> None:
    assert round(scale.BASE.flop(128) / 1e6) == 545
    assert scale.LARGE.flop(128) == pytest.approx(1879e6, rel=1e-3)
    assert scale.BASE.parameters == 109_514_298  # transformers' BertForMaskedLM of that shape


def test_steps(scale: Any) -> None:
    endless = scale.Network(name="endless", rate=1e18)
    single = scale.step(scale.BASE, endless, 4096)
    assert single.waiting == pytest.approx(2 * scale.LATENCY, rel=0.01)  # the first block's, and what is ready last
    slow = scale.NETWORKS[1]
    whole = slow.reduce(scale.BASE.parameters) + scale.BASE.layers * scale.LATENCY
    nothing = scale.step(scale.BASE, slow, 1e-6)  # nothing to hide behind: all of it is waited for
    assert nothing.waiting == pytest.approx(whole, rel=1e-6)
    embedding = slow.reduce(scale.BASE.parameters - 12 * scale.BASE.block)
    long = scale.step(scale.BASE, slow, 1e7)  # all is hidden but the first block's and what is ready last
    assert long.waiting == pytest.approx(embedding + slow.reduce(scale.BASE.block), rel=1e-6)
    waits = [scale.step(scale.LARGE, slow, tokens).waiting for tokens in scale.STEPS]
    assert waits == sorted(waits, reverse=True)


def test_tokens_that_are_needed(scale: Any) -> None:
    for least in (0.5, 0.9):
        devices = scale.needed(scale.BASE, scale.NETWORKS[1], least)
        assert scale.step(scale.BASE, scale.NETWORKS[1], devices).efficiency >= least
        assert scale.step(scale.BASE, scale.NETWORKS[1], devices - 1000).efficiency < least
    wider = replace(scale.NETWORKS[0], rate=4 * scale.NETWORKS[0].rate)
    assert scale.needed(scale.BASE, wider, 0.95) < scale.needed(scale.BASE, scale.NETWORKS[0], 0.95)


def test_estimates_equal_published_numbers(scale: Any) -> None:
    eight, single = scale.LOGS[2], scale.LOGS[1]
    assert eight.batch_of_gpu == 72 and single.batch_of_gpu == pytest.approx(96, abs=0.1)
    assert scale.kept() == pytest.approx((53_541 + 53_185) / 64 / ((7_760 + 7_760) / 8), rel=1e-4)
