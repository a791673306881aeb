"""The data that ship with the package: they read without a complaint, are what they say, and nothing leaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from heedful.data import Example, LabelledExample, QuestionExample, TaggedExample, check, read
from heedful.data.examples import normalise_text

ASSETS = Path(str(files("heedful") / "assets"))
KINDS: dict[str, type[Example]] = {"intents": LabelledExample, "tags": TaggedExample, "questions": QuestionExample}
SIZES = {
    "intents": {"train": 420, "dev": 90, "test": 90},
    "tags": {"train": 110, "dev": 20, "test": 20},
    "questions": {"train": 84, "dev": 18, "test": 18},
}
INTENTS = ["borrow", "donate", "extend", "membership", "opening_hours", "report_damage", "return", "workshop_signup"]
TYPES = ("PER", "PLACE", "THING")


def splits(name: str) -> dict[str, list[Any]]:
    source = read(ASSETS / name, KINDS[name])
    return {split: list(source.examples(split)) for split in source.splits}


@pytest.mark.parametrize("name", KINDS)
def test_nothing_to_complain_of(name: str) -> None:
    for kind in (KINDS[name], None):  # given, and found out
        report = check(read(ASSETS / name, kind))
        assert {split: each.examples for split, each in report.splits.items()} == SIZES[name]
        assert not report.leaks
        assert not report.bad
        assert not report.mended, "answers stand exactly where they are said to"
        for each in report.splits.values():
            assert (each.alike, each.contradicting, each.empty, each.too_long, dict(each.odd)) == (0, 0, 0, 0, {})
            assert not each.places


@pytest.mark.parametrize("name", KINDS)
def test_files(name: str) -> None:
    found = [path for path in (ASSETS / name).iterdir() if path.is_file()]
    assert sorted(path.stem for path in found) == ["dev", "test", "train"]
    assert sum(path.stat().st_size for path in found) < 80_000
    for path in found:
        text = path.read_bytes().decode("utf-8")
        assert "\r" not in text
        assert text.endswith("\n")
        assert not re.search(r"[ \t]$", text, re.MULTILINE)
        assert "\ufeff" not in text


def test_intents() -> None:
    found = splits("intents")
    for examples in found.values():
        counts = Counter(each.label for each in examples)
        assert sorted(counts) == INTENTS
        assert max(counts.values()) - min(counts.values()) <= 1, "each label has its share of each split"
        assert all(2 <= len(each.text.split()) <= 35 for each in examples)
    texts = [each.text for examples in found.values() for each in examples]
    assert all(any(sign in text for text in texts) for sign in "0123456789,?!'\":🎉")
    bags = [frozenset(normalise_text(text).split()) for text in texts]
    near = [(a, b) for a, b in combinations(bags, 2) if len(a & b) > 0.7 * len(a | b)]
    assert not near, "no text is nearly another one"


def test_tags() -> None:
    source = read(ASSETS / "tags", TaggedExample)
    assert source.labels == ("O", *(f"{mark}-{kind}" for kind in TYPES for mark in "BI"))
    assert "tags are IOB2" in source.stated, "as they stand, with nothing to convert"
    for split, examples in splits("tags").items():
        assert {tag for each in examples for tag in each.tags} == set(source.labels), split
        assert all(5 <= len(each.words) <= 25 for each in examples)
        for each in examples:
            joined = [pair for pair in pairwise(("O", *each.tags)) if pair[1][0] == "I"]
            assert all(before[1:] == tag[1:] for before, tag in joined), each.words
        assert any(set(each.tags) == {"O"} for each in examples), "some sentences name nothing"


def test_questions() -> None:
    found = splits("questions")
    names = [each.id for examples in found.values() for each in examples]
    assert len(set(names)) == len(names)
    contexts = {split: {each.context for each in examples} for split, examples in found.items()}
    assert [len(each) for each in contexts.values()] == [28, 6, 6]
    for first, second in combinations(contexts.values(), 2):
        assert not {normalise_text(each) for each in first} & {normalise_text(each) for each in second}
    for split, examples in found.items():
        impossible = sum(each.impossible for each in examples)
        assert impossible * 6 == len(examples), "one in six, in each split"
        assert all(60 <= len(each.context.split()) <= 140 for each in examples)
        assert any(len(each.answers) > 1 for each in examples) == (split != "train")
        for each in examples:
            assert each.question.endswith("?")
            assert each.impossible == (not each.answers)
            assert len(set(each.answers)) == len(each.answers) <= 3
            for text, start in each.answers:
                around = each.context[max(start - 1, 0) : start + len(text) + 1]
                assert re.fullmatch(r"\W?" + re.escape(text) + r"\W?", around), "whole words"


def test_question_offsets() -> None:
    for split in ("train", "dev", "test"):  # the files themselves: the reader would mend a start that is wrong
        data = json.loads((ASSETS / "questions" / f"{split}.json").read_text(encoding="utf-8"))
        assert data["version"] == "v2.0"
        paragraphs = [each for article in data["data"] for each in article["paragraphs"]]
        assert all(len(each["qas"]) == 3 for each in paragraphs)
        for paragraph in paragraphs:
            for answer in (answer for each in paragraph["qas"] for answer in each["answers"]):
                start, text = answer["answer_start"], answer["text"]
                assert paragraph["context"][start : start + len(text)] == text
