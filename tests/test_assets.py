"""The data sets that ship with the package are read without a warning, and no split contains texts of another."""

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
    """Return the examples of each split of a data set."""
    source = read(ASSETS / name, KINDS[name])
    return {split: list(source.examples(split)) for split in source.splits}


@pytest.mark.parametrize("name", KINDS)
def test_bundled_data_pass_the_check(name: str) -> None:
    for kind in (KINDS[name], None):  # None: the kind is detected
        report = check(read(ASSETS / name, kind))
        assert {split: split_report.examples for split, split_report in report.splits.items()} == SIZES[name]
        assert not report.leaks
        assert not report.bad
        assert not report.repairs, "answers are not exactly at their offsets"
        for split_report in report.splits.values():
            assert split_report.alike == split_report.contradicting == split_report.empty == split_report.too_long == 0
            assert not split_report.odd and not split_report.places


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
        assert max(counts.values()) - min(counts.values()) <= 1, "the labels are not equally frequent"
        assert all(2 <= len(example.text.split()) <= 35 for example in examples)
    texts = [example.text for examples in intents.values() for example in examples]
    assert all(any(sign in text for text in texts) for sign in "0123456789,?!'\":🎉")
    word_sets = [frozenset(normalise_text(text).split()) for text in texts]
    near_duplicates = [(a, b) for a, b in combinations(word_sets, 2) if len(a & b) > 0.7 * len(a | b)]
    assert not near_duplicates


def test_tags() -> None:
    source = read(ASSETS / "tags", TaggedExample)
    assert source.labels == ("O", *(f"{mark}-{kind}" for kind in TYPES for mark in "BI"))
    assert "tags are IOB2" in source.stated  # so no tag was converted
    for split, examples in splits("tags").items():
        assert {tag for example in examples for tag in example.tags} == set(source.labels), split
        assert all(5 <= len(example.words) <= 25 for example in examples)
        for example in examples:
            for before, tag in pairwise(("O", *example.tags)):
                assert tag[0] != "I" or before[1:] == tag[1:], example.words  # I-PER follows B-PER or I-PER
        assert any(set(example.tags) == {"O"} for example in examples), "every sentence has an entity"


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
        assert impossible * 6 == len(examples)
        assert all(60 <= len(example.context.split()) <= 140 for example in examples)
        assert any(len(example.answers) > 1 for example in examples) == (split != "train")
        for example in examples:
            assert example.question.endswith("?")
            assert example.impossible == (not example.answers)
            assert len(set(example.answers)) == len(example.answers) <= 3
            for text, start in example.answers:
                around = example.context[max(start - 1, 0) : start + len(text) + 1]
                assert re.fullmatch(r"\W?" + re.escape(text) + r"\W?", around), "the answer cuts a word"


def test_question_offsets() -> None:
    for split in ("train", "dev", "test"):  # without `read`, which repairs wrong starts
        data = json.loads((ASSETS / "questions" / f"{split}.json").read_text(encoding="utf-8"))
        assert data["version"] == "v2.0"
        paragraphs = [paragraph for article in data["data"] for paragraph in article["paragraphs"]]
        assert all(len(paragraph["qas"]) == 3 for paragraph in paragraphs)
        for paragraph in paragraphs:
            for answer in (answer for entry in paragraph["qas"] for answer in entry["answers"]):
                start, text = answer["answer_start"], answer["text"]
                assert paragraph["context"][start : start + len(text)] == text
