"""Files with a label and a text on each line: TREC's questions, fastText's files, and other files refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heedful.data import (
    Dataset,
    DataSettings,
    LabelledExample,
    MultiLabelExample,
    ScoredExample,
    Skip,
    TextExample,
    dataset_for_task,
    read,
)
from heedful.errors import HeedfulError
from heedful.runs.overrides import override

QUESTIONS = (
    "DESC:manner How did the caf\u00e9 open ?\n"
    "NUM:count How many cups are there ?\n"
    "DESC:def What is a saucer ?\n"
    "HUM:ind Who washed up ?\n"
)
TAGGED_TEXTS = "__label__tea __label__milk Milk first ?\n__label__tea How hot ?\n__label__cake\tToo dry ?\n"


def read_train(path: Path, kind: Any = None, **settings: Any) -> Dataset[Any]:
    return read(path, kind, DataSettings(dev_fraction=0.0, **settings))


def test_trec_questions_in_latin_1(tmp_path: Path) -> None:
    path = tmp_path / "train_5500.label"
    path.write_bytes(QUESTIONS.encode("latin-1"))
    dataset = read_train(path, encoding="latin-1")
    assert next(dataset.examples("train")) == LabelledExample(label="DESC:manner", text="How did the caf\u00e9 open ?")
    assert dataset.labels == ("DESC:def", "DESC:manner", "HUM:ind", "NUM:count")
    assert "train_5500.label: each line has a label, then its text (format=label-text)" in dataset.stated
    assert any('label_until=":" makes "DESC:manner"' in note for note in dataset.stated)
    with pytest.raises(HeedfulError, match=r"train_5500\.label:1:.*byte 0xe9 .*--data.encoding=cp1252"):
        list(read_train(path).examples("train"))


@pytest.mark.parametrize("name", ["questions.txt", "questions"])
def test_coarse_labels_are_a_setting(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(QUESTIONS, encoding="utf-8")
    settings = override(DataSettings(dev_fraction=0.0), ["label_until=:"])
    dataset = dataset_for_task(LabelledExample, path, settings, Skip())
    assert dataset.labels == ("DESC", "HUM", "NUM")
    assert [example.label for example in dataset.examples("train")] == ["DESC", "NUM", "DESC", "HUM"]
    (tmp_path / "a.csv").write_text("text,score\na,1\n")
    with pytest.raises(HeedfulError, match="label_until=: would change nothing"):
        dataset_for_task(ScoredExample, tmp_path / "a.csv", settings, Skip())


def test_fasttext_labels(tmp_path: Path) -> None:
    path = tmp_path / "cooking.train"
    path.write_text(TAGGED_TEXTS)
    dataset = dataset_for_task(LabelledExample, path, DataSettings(dev_fraction=0.0), Skip())
    assert list(dataset.examples("train")) == [
        MultiLabelExample(labels=("tea", "milk"), text="Milk first ?"),
        MultiLabelExample(labels=("tea",), text="How hot ?"),
        MultiLabelExample(labels=("cake",), text="Too dry ?"),
    ]
    path.write_text(TAGGED_TEXTS.replace(" __label__milk", ""))
    dataset = dataset_for_task(LabelledExample, path, DataSettings(dev_fraction=0.0), Skip())
    assert [example.label for example in dataset.examples("train")] == ["tea", "tea", "cake"]
    dataset = dataset_for_task(
        LabelledExample, path, DataSettings(dev_fraction=0.0, columns={"labels": "labels"}), Skip()
    )
    assert dataset.kind is MultiLabelExample and dataset.labels == ("cake", "tea")


def test_several_labels_late_in_a_file_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("__label__tea How hot ?\n" * 9000 + TAGGED_TEXTS)
    assert read_train(path).kind is MultiLabelExample
    with pytest.raises(HeedfulError, match=r"a\.txt:9001: has 2 labels, expected one: --data.columns\.labels=labels"):
        list(read_train(path, LabelledExample).examples("train"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("__label__tea", "has labels and no text"),
        ("no label here", "has no label, expected one that begins with __label__"),
        ("__label__tea a\0b", "NUL"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("__label__tea How hot ?\n__label__cake Why ?\n\n" + line + "\n")
    with pytest.raises(HeedfulError, match=rf"a\.txt:4.*{reason}"):
        list(read_train(path, LabelledExample).examples("train"))
    (tmp_path / "b.label").write_text("tea\nmilk Is it fresh ?\n")
    with pytest.raises(HeedfulError, match=r"b\.label:1: has one word and no text"):
        list(read_train(tmp_path / "b.label").examples("train"))


def test_repeated_first_words_are_labels_when_the_task_needs_labels(tmp_path: Path) -> None:
    path = tmp_path / "polarity.txt"
    path.write_text("1 a fine day\n0 rain again\n1 sun at last\n0 mud\n")
    assert read_train(path).kind is TextExample, "it may be text"
    assert read_train(path, LabelledExample).labels == ("0", "1")
    assert read_train(path, format="label-text").kind is LabelledExample
    path.write_text("a fine day\nrain again\n")
    with pytest.raises(HeedfulError, match="holds plain text, but this task needs"):
        read_train(path, LabelledExample)
    (tmp_path / "empty.label").write_text("\n\n")
    with pytest.raises(HeedfulError, match=r"empty\.label: has no rows"):
        read_train(tmp_path / "empty.label")


def test_a_txt_file_with_tabs_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "SICK_train.txt"
    path.write_text("pair_ID\tsentence_A\tscore\n1\ta cup\t4.5\n")
    dataset = read_train(path, ScoredExample, columns={"text": "sentence_A"})
    assert next(dataset.examples("train")) == ScoredExample(text="a cup", score=4.5)
