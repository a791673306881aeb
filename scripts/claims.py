#!/usr/bin/env python3
"""Compare the measured figures in the README and the docs with the records of the benchmarks.

usage: scripts/claims.py [--update]

docs/claims.toml names, for each passage with measured figures, the records that they come from. Without an argument the
passages that differ are listed, and the exit status is 1 if there are any. `--update` writes the figures of the records
into the pages.

A value is RECORD/STEP/STEP/...: the short name of a record, then keys of its "tables". In a list, a step is an index or
one of the values under NAMES of an element; of a list of numbers, the step "median" takes their median. The value of a
spread is its median. In a text such as "89.83 ± 0.52", the steps "mean" and "deviation" take the two numbers. " * 100"
at the end makes per cent. The steps "by rounds/float32" are the ratio of Heedful's speed in float32 to that of the
fastest peer in float32, as the median over the rounds.
"""

from __future__ import annotations

import json
import re
import string
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = ROOT / "docs" / "claims.toml"
NAMES = ("name", "title", "tokens", "arm", "record")  # keys whose value names an element of a list
RATIO = re.compile(r"\d×")  # a ratio such as 1.75×


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A passage of one or more pages whose figures come from records."""

    pages: tuple[Path, ...]
    text: str  # with a replacement field of str.format for each value
    values: tuple[str, ...]

    def filled(self, records: dict[str, str]) -> str:
        """Return the passage with the figures of the records."""
        values = iter(self.values)
        passage = ""
        for literal, _, spec, _ in string.Formatter().parse(self.text):
            passage += literal
            if spec is not None:
                passage += format(value_of(next(values), records), spec).replace("-", "−")
        return passage

    def pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches the passage with any figures and any line breaks."""
        parts = (
            _spaced(literal) + ("" if field is None else r"[+−-]?[\d.,]+")
            for literal, field, _, _ in string.Formatter().parse(self.text)
        )
        return re.compile("".join(parts))


def read_claims() -> tuple[dict[str, str], list[Claim]]:
    """Return the files of the records by their short names, and the claims."""
    values = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    claims = [
        Claim(pages=tuple(ROOT / page for page in claim["pages"]), text=claim["text"], values=tuple(claim["values"]))
        for claim in values["claim"]
    ]
    return values["records"], claims


@cache
def read_record(name: str) -> dict[str, object]:
    """Return the JSON of a record in benchmarks/results."""
    record: dict[str, object] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def value_of(value: str, records: dict[str, str]) -> float:
    """Return the number that a value names.

    Raises:
        KeyError: If the record has no such entry, or the entry is no number.
    """
    path, _, factor = value.partition(" * ")
    short, *steps = path.split("/")
    entry: object = read_record(records[short])["tables"]
    for index, step in enumerate(steps):
        entry = _step(entry, step)
        if entry is None:
            raise KeyError(f"{value}: {records[short]} has no {'/'.join(steps[: index + 1])}")
    if isinstance(entry, dict) and "median" in entry:
        entry = entry["median"]
    if not isinstance(entry, int | float):
        raise KeyError(f"{value}: {records[short]} has {entry!r:.80} there, which is no number")
    return entry * float(factor or 1)


def _step(entry: object, step: str) -> object:
    """Return what one step of a value takes from an entry, or None if the entry lacks it."""
    if isinstance(entry, dict):
        return _ratios_by_precision(entry) if step == "by rounds" else entry.get(step)
    if isinstance(entry, list):
        if step == "median":
            return median(entry)
        if step.isdecimal() and int(step) < len(entry):
            return entry[int(step)]
        return next((element for element in entry if isinstance(element, dict) and step in _names(element)), None)
    if isinstance(entry, str):
        numbers = re.findall(r"[\d.]+", entry)
        return float(numbers[("mean", "deviation").index(step)])
    return None


def _ratios_by_precision(table: dict[str, Any]) -> dict[str, float]:
    """Return the median over the rounds of the fastest peer's time over Heedful's, for each precision."""
    ratios = {}
    for precision in ("float32", "bfloat16", "int8"):
        rows = [row for row in table["rows"] if precision in row["name"]]
        own_times = next(row["seconds"] for row in rows if row["ours"])
        peers = [row["seconds"] for row in rows if not row["ours"] and row["aside"] != "not stock"]
        ratios[precision] = median(min(times) / own for own, *times in zip(own_times, *peers, strict=True))
    return ratios


def _names(element: dict[str, object]) -> set[str]:
    """Return the names of an element of a list."""
    return {str(element[key]) for key in NAMES if key in element}


def _spaced(text: str) -> str:
    """Return a pattern that matches the text with any white space between its words."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def differences() -> Iterator[str]:
    """Yield a sentence for each passage that a page lacks or whose figures differ from the records."""
    records, claims = read_claims()
    for claim in claims:
        expected = claim.filled(records)
        for page in claim.pages:
            text = page.read_text(encoding="utf-8")
            matches = [match.group() for match in claim.pattern().finditer(text)]
            if not matches:
                yield f'{page.relative_to(ROOT)} lacks "{claim.text}"'
            for match in matches:
                if " ".join(match.split()) != " ".join(expected.split()):
                    yield f'{page.relative_to(ROOT)} has "{match}"; the records say "{expected}"'


def update() -> None:
    """Write the figures of the records into the pages."""
    records, claims = read_claims()
    for claim in claims:
        expected = claim.filled(records).split()
        for page in claim.pages:
            text = page.read_text(encoding="utf-8")

            def rewrite(match: re.Match[str], words: list[str] = expected) -> str:
                spaces = [*re.findall(r"\s+", match.group()), ""]
                return "".join(word + space for word, space in zip(words, spaces, strict=True))

            page.write_text(claim.pattern().sub(rewrite, text), encoding="utf-8")


def unbound_ratios() -> Iterator[str]:
    """Yield each line of the README and the docs with a ratio such as 1.75× that no claim covers."""
    _, claims = read_claims()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for claim in claims:
            if page in claim.pages:
                text = claim.pattern().sub(lambda match: "\n" * match.group().count("\n"), text)
        for line_number, line in enumerate(text.splitlines(), 1):
            if RATIO.search(line):
                yield f"{page.relative_to(ROOT)}:{line_number}: {line.strip()}"


def main(arguments: list[str]) -> int:
    """Update the pages, or print the differences; return the exit status."""
    if arguments == ["--update"]:
        update()
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    lines = [*differences(), *(f"no claim covers {line}" for line in unbound_ratios())]
    print("\n".join(lines) or "all figures are those of the records")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
