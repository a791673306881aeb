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
def test_bundled_data_pass_the_check(name: str) -> None:
    for kind in (KINDS[name], None):  # given, and found out
        report = check(read(ASSETS / name, kind))
        assert {split: split_report.examples for split, split_report in report.splits.items()} == SIZES[name]
        assert not report.leaks
        assert not report.bad
        assert not report.repairs, "answers are exactly at their offsets"
        for split_report in report.splits.values():
            assert (
                split_report.alike,
                split_report.contradicting,
                split_report.empty,
                split_report.too_long,
                dict(split_report.odd),
            ) == (0, 0, 0, 0, {})
            assert not split_report.places


@pytest.mark.parametrize("name", KINDS)
def test_files(name: str) -> None:
    paths = [path for path in (ASSETS / name).iterdir() if path.is_file()]
    assert sorted(path.stem for path in paths) == ["dev", "test", "train"]
    assert sum(path.stat().st_size for path in paths) < 80_000
    for path in paths:
        text = path.read_bytes().decode("utf-8")
        assert "\r" not in text
        assert text.endswith("\n")
        assert not re.search(r"[ \t]$", text, re.MULTILINE)
        assert "\ufeff" not in text


def test_intents() -> None:
    intents = splits("intents")
    for examples in intents.values():
        counts = Counter(example.label for example in examples)
        assert sorted(counts) == INTENTS
        assert max(counts.values()) - min(counts.values()) <= 1, "each label has its share of each split"
        assert all(2 <= len(example.text.split()) <= 35 for example in examples)
    texts = [example.text for examples in intents.values() for example in examples]
    assert all(any(sign in text for text in texts) for sign in "0123456789,?!'\":🎉")
    bags = [frozenset(normalise_text(text).split()) for text in texts]
    near = [(a, b) for a, b in combinations(bags, 2) if len(a & b) > 0.7 * len(a | b)]
    assert not near, "no text is nearly another one"


def test_tags() -> None:
    source = read(ASSETS / "tags", TaggedExample)
    assert source.labels == ("O", *(f"{mark}-{kind}" for kind in TYPES for mark in "BI"))
    assert "tags are IOB2" in source.stated, "with nothing to convert"
    for split, examples in splits("tags").items():
        assert {tag for example in examples for tag in example.tags} == set(source.labels), split
        assert all(5 <= len(example.words) <= 25 for example in examples)
        for example in examples:
            joined = [pair for pair in pairwise(("O", *example.tags)) if pair[1][0] == "I"]
            assert all(before[1:] == tag[1:] for before, tag in joined), example.words
        assert any(set(example.tags) == {"O"} for example in examples), "some sentences name nothing"


def test_questions() -> None:
    questions = splits("questions")
    names = [example.id for examples in questions.values() for example in examples]
    assert len(set(names)) == len(names)
    contexts = {split: {example.context for example in examples} for split, examples in questions.items()}
    assert [len(texts) for texts in contexts.values()] == [28, 6, 6]
    for first, second in combinations(contexts.values(), 2):
        assert not {normalise_text(text) for text in first} & {normalise_text(text) for text in second}
    for split, examples in questions.items():
        impossible = sum(example.impossible for example in examples)
        assert impossible * 6 == len(examples), "one in six, in each split"
        assert all(60 <= len(example.context.split()) <= 140 for example in examples)
        assert any(len(example.answers) > 1 for example in examples) == (split != "train")
        for example in examples:
            assert example.question.endswith("?")
            assert example.impossible == (not example.answers)
            assert len(set(example.answers)) == len(example.answers) <= 3
            for text, start in example.answers:
                around = example.context[max(start - 1, 0) : start + len(text) + 1]
                assert re.fullmatch(r"\W?" + re.escape(text) + r"\W?", around), "whole words"


def test_question_offsets() -> None:
    for split in ("train", "dev", "test"):  # the files themselves: the reader would mend a start that is wrong
        data = json.loads((ASSETS / "questions" / f"{split}.json").read_text(encoding="utf-8"))
        assert data["version"] == "v2.0"
        paragraphs = [paragraph for article in data["data"] for paragraph in article["paragraphs"]]
        assert all(len(paragraph["qas"]) == 3 for paragraph in paragraphs)
        for paragraph in paragraphs:
            for answer in (answer for entry in paragraph["qas"] for answer in entry["answers"]):
                start, text = answer["answer_start"], answer["text"]
                assert paragraph["context"][start : start + len(text)] == text
