"""Pages of the docs name code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["correctness.md", "reliability.md"])
def test_pages_name_tests_that_exist(page: str) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, function in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, (path, function)


def test_the_glossary_names_code_that_exists() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "heedful").rglob("*.py"))
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 60
    assert [row[0].strip().lower() for row in rows] == sorted(row[0].strip().lower() for row in rows)
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[3]):
            if name.endswith(".py") or name.endswith("/"):
                assert (ROOT / "heedful" / name).exists(), name
            elif re.fullmatch(r"[A-Za-z_]+", name):
                assert re.search(rf"\b{name}\b", source), name
