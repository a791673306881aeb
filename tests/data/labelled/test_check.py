"""The problems that `check` reports, in small data sets with known problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heedful.data import (
    ChoiceExample,
    DataReport,
    DataSettings,
    MultiLabelExample,
    Seq2SeqExample,
    Skip,
    TaggedExample,
    check,
    read,
)

TRAIN = [
    ("a fine day", "pos"),
    ("a fine day", "pos"),  # an exact repeat
    ("A  fine day!", "neg"),  # equal but for case and punctuation, with another label
    ("rain again", "neg"),
    ("  ", "neg"),
    ("caf\u00c3\u00a9 by the sea", "pos"),
    ("it\u2019s &amp; <br /> over", "pos"),
    ("bad \ufffd byte", "pos"),
    ("\ufeffmark and bell \x07", "pos"),
    ("curly \x93quotes\x94", "pos"),
    ("word " * 500, "pos"),
    *((f"text number {n}", "pos") for n in range(100)),
]
DEV = [("rain again", "neg"), ("RAIN AGAIN.", "neg"), ("a fine day", "pos"), ("something else", "neg")]


def check_files(path: Path, **files: list[tuple[str, str]]) -> DataReport:
    for name, rows in files.items():
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (path / f"{name}.jsonl").write_text("\n".join(lines))
    return check(read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip()))


def test_findings(tmp_path: Path) -> None:
    report = check_files(tmp_path, train=TRAIN, dev=DEV)
    train = report.splits["train"]
    assert (train.examples, train.labels) == (111, {"neg": 3, "pos": 108})
    assert (train.repeated, train.alike, train.contradicting, train.empty, train.too_long) == (1, 2, 1, 1, 1)
    assert train.lengths == (3, 3, 5, 500)
    assert train.places == {
        "empty": ("train.jsonl:5",),
        "text that was decoded twice, like Ã© or â€™": ("train.jsonl:6",),
        "markup like <br /> or &amp;": ("train.jsonl:7",),
        "replacement characters (U+FFFD)": ("train.jsonl:8",),
        "control characters": ("train.jsonl:9",),
        "byte order marks inside": ("train.jsonl:9",),
        "Windows-1252 read as Latin-1 (U+0080 to U+009F)": ("train.jsonl:10",),
        "too long": ("train.jsonl:11",),
        "contradicting": ("train.jsonl:1",),
        "alike": ("train.jsonl:2", "train.jsonl:3"),
    }
    (leak,) = report.leaks
    assert (leak.splits, leak.texts, leak.alike, leak.groups) == (("train", "dev"), 2, 2, 0)
    assert leak.places == (("train.jsonl:1", "dev.jsonl:3"), ("train.jsonl:4", "dev.jsonl:1"))


def test_lines(tmp_path: Path) -> None:
    assert check_files(tmp_path, train=TRAIN, dev=DEV).lines() == [
        "! leaks: train and dev share 2 texts but for case and punctuation (2 exactly): "
        "train.jsonl:1 = dev.jsonl:3, train.jsonl:4 = dev.jsonl:1",
        "! contradiction: train: 1 text with different targets: train.jsonl:1",
        "! repeats: train: 2 repeat earlier ones but for case and punctuation (1 exactly): "
        "train.jsonl:2, train.jsonl:3",
        "! repeat: dev: 1 repeat earlier ones but for case and punctuation (0 exactly): dev.jsonl:2",
        "! empty: train: 1 with an empty text: train.jsonl:5",
        "! long: train: 1 longer than 384 words: train.jsonl:11",
        "! odd text: train: 1 with text that was decoded twice, like Ã© or â€™: train.jsonl:6",
        "! odd text: train: 1 with markup like <br /> or &amp;: train.jsonl:7",
        "! odd text: train: 1 with replacement characters (U+FFFD): train.jsonl:8",
        "! odd text: train: 1 with control characters: train.jsonl:9",
        "! odd text: train: 1 with byte order marks inside: train.jsonl:9",
        "! odd text: train: 1 with Windows-1252 read as Latin-1 (U+0080 to U+009F): train.jsonl:10",
        "",
        "                           train         dev",
        "examples                     111           4",
        "words: half up to              3           2",
        "words: 90 % up to              3           3",
        "words: 99 % up to              5           3",
        "words: the longest           500           3",
        'label "neg"            3 (2.7 %)  3 (75.0 %)',
        'label "pos"         108 (97.3 %)  1 (25.0 %)',
        "",
        "each example is a text, or two, with one label",
        "train: train.jsonl",
        "dev: dev.jsonl",
        'columns: text="text", label="label"',
        'labels in order: "neg", "pos"',
        "train: the most frequent label is 36 times as frequent as the rarest",
        "",
        "6 problems: 2 leaks, 1 contradiction, 3 repeats, 1 empty, 1 long, 6 odd texts",
    ]


def test_bad_rows_and_labels_without_examples(tmp_path: Path) -> None:
    report = check_files(tmp_path, train=TRAIN[:4], dev=[("x", "new"), ("y", "neg")])
    file = str(tmp_path / "dev.jsonl")
    assert report.bad == {file: 1}
    assert report.lines()[:2] == [
        f'! bad row: {file}: 1 left out, like {file}:1: the label "new" is not in train, which has "neg", "pos"',
        '! label without examples: dev: no example of "pos"',
    ]
    assert report.verdict() == "4 problems: 1 bad row, 1 label without examples, 1 contradiction, 2 repeats"


def test_clean_data_has_no_problems(tmp_path: Path) -> None:
    report = check_files(tmp_path, train=[("a cat", "x"), ("a dog", "y")], dev=[("a cow", "x"), ("a hen", "y")])
    assert report.problems == ()
    assert report.lines()[-1] == report.verdict() == "no problems found"
    assert not [line for line in report.lines() if line.startswith("!")]


def test_questions_of_one_passage(tmp_path: Path) -> None:
    rows = [{"article": "A passage.", "question": f"{n}?", "options": ["a", "b"], "answer": n % 2} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    (tmp_path / "dev.jsonl").write_text(json.dumps(rows[2] | {"article": "a passage"}))
    report = check(read(tmp_path, ChoiceExample))
    assert report.splits["train"].labels == {"candidate 0": 1, "candidate 1": 1}
    assert [(leak.alike, leak.groups) for leak in report.leaks] == [(0, 1)]
    assert report.lines()[0].startswith("! leak: train and dev share 1 contexts, prompts or sources")


def test_another_unit_of_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc\nabcdef\n")

    def characters(example: Any) -> int:
        return len(example.text)

    report = check(
        read(tmp_path / "a.txt", settings=DataSettings(dev_fraction=0.0)), limit=4, length=characters, unit="characters"
    )
    assert "! long: train: 1 longer than 4 characters: a.txt:2" in report.lines()


def test_repeated_sources_of_seq2seq_examples(tmp_path: Path) -> None:
    """A source with two targets is a contradiction inside a split, and a leak between splits."""
    pairs = {"train": [("One way.", "a"), ("two", "b"), ("one way", "c")], "dev": [("two!", "d"), ("three", "e")]}
    for name, rows in pairs.items():
        lines = [json.dumps({"source": source, "target": target}) for source, target in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    report = check(read(tmp_path, Seq2SeqExample))
    assert report.splits["train"].contradicting == 1
    assert report.splits["dev"].contradicting == 0
    assert report.splits["train"].places["contradicting"] == ("train.jsonl:1",)
    assert [(leak.alike, leak.groups) for leak in report.leaks] == [(0, 1)]


def test_labels_that_look_like_ids_are_reported(tmp_path: Path) -> None:
    report = check_files(tmp_path, train=[(f"the cat {index}", f"id-{index}") for index in range(120)])
    assert "120 different labels for 120 examples" in report.doubt
    assert "--data.columns.label=NAME" in report.doubt
    assert f"! doubtful label column: {report.doubt}" in report.lines()
    one_shot = [(f"the cat {index}", f"label {index}") for index in range(30)]
    repeated = [(f"the dog {index}", f"label {index % 30}") for index in range(60)]
    assert not check_files(tmp_path, train=one_shot, dev=repeated).doubt, "labels that occur again are not ids"
    assert not check_files(tmp_path, train=TRAIN, dev=DEV).doubt


def test_a_single_label_and_spellings_of_a_label_are_reported(tmp_path: Path) -> None:
    report = check_files(tmp_path, train=[("a cat", "x"), ("a dog", "x")])
    assert report.verdict() == "1 problem: 1 single label"
    message = 'all examples of train have the label "x": there is nothing to distinguish'
    assert report.lines()[0] == f"! single label: {message}"
    rows = [("a cat", "Bug"), ("a dog", "bug"), ("a cow", "how to"), ("a hen", "How  To"), ("a fox", "praise")]
    report = check_files(tmp_path, train=rows)
    assert report.verdict() == "1 problem: 2 labels in several spellings"
    spellings = '"Bug", "bug"; "How  To", "how to"'
    message = f"{spellings} differ only in case or white space, and count as different labels"
    assert report.lines()[0] == f"! labels in several spellings: {message}"


def test_shares_of_labels_are_those_of_examples_and_for_tags_of_all_entities() -> None:
    settings = DataSettings(dev_fraction=0.0)
    texts = [{"text": "one", "labels": ["a", "b"]}, {"text": "two", "labels": ["a"]}, {"text": "three", "labels": []}]
    several = check(read({"train": texts}, MultiLabelExample, settings)).splits["train"]
    assert several.label_shares == {"a": 2 / 3, "b": 1 / 3}
    sentence = {"words": ["Ada", "saw", "Rome", "and", "Eve"], "tags": ["B-PER", "O", "B-PLACE", "O", "B-PER"]}
    tagged = check(read({"train": [sentence]}, TaggedExample, settings)).splits["train"]
    assert tagged.label_shares == {"PER": 2 / 3, "PLACE": 1 / 3}
