"""Figures in the README and the docs equal those of the records in benchmarks/results (scripts/claims.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_the_figures_of_the_records(claims: ModuleType) -> None:
    assert not list(claims.differences()), "scripts/claims.py --update writes them"


def test_every_ratio_comes_from_a_record(claims: ModuleType) -> None:
    assert not list(claims.unbound_ratios())


def test_cited_records_name_their_commit(claims: ModuleType) -> None:
    records, _ = claims.read_claims()
    assert [short for short, name in records.items() if not claims.read_record(name)["machine"].get("commit")] == []


def test_another_figure_is_reported_and_updated(
    claims: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is 9.99×\n(9.00–9.99) as fast, and −0.1 better; 7 % of 2.5× is not covered.\n")
    claim = claims.Claim(
        pages=(page,),
        text="{:.2f}× ({:.2f}–{:.2f}) as fast, and {:+.1f} better",
        values=("a/0/rows/ours/ratio", "a/0/rows/ours/ratio/low", "a/0/rows/ours/ratio/high", "a/0/rows/ours/gain"),
    )
    row = {"name": "ours", "ratio": {"median": 1.754, "low": 1.5, "high": 2.0}, "gain": -0.25}
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "read_record", lambda name: {"tables": [{"rows": [row]}]})
    monkeypatch.setattr(claims, "read_claims", lambda: ({"a": "record"}, [claim]))
    (tmp_path / "README.md").write_text("It is 1.1× as fast.\n")
    (sentence,) = claims.differences()
    assert "9.99" in sentence and "1.75× (1.50–2.00) as fast, and −0.2 better" in sentence
    claims.update()
    assert page.read_text() == "It is 1.75×\n(1.50–2.00) as fast, and −0.2 better; 7 % of 2.5× is not covered.\n"
    assert not list(claims.differences())
    assert list(claims.unbound_ratios()) == ["README.md:1: It is 1.1× as fast."]


def test_a_value_that_a_record_lacks_is_named(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "read_record", lambda name: {"tables": [{"rows": []}]})
    with pytest.raises(KeyError, match="0/rows/ours"):
        claims.value_of("a/0/rows/ours/seconds", {"a": "record"})
