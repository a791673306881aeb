"""A label and a text on each line: TREC's questions, fastText's files, and what is told of others."""

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


def opened(path: Path, kind: Any = None, **settings: Any) -> Dataset[Any]:
    return read(path, kind, DataSettings(dev_fraction=0.0, **settings))


def test_trec_questions_in_latin_1(tmp_path: Path) -> None:
    path = tmp_path / "train_5500.label"
    path.write_bytes(QUESTIONS.encode("latin-1"))
    source = opened(path, encoding="latin-1")
    assert next(source.examples("train")) == LabelledExample(label="DESC:manner", text="How did the caf\u00e9 open ?")
    assert source.labels == ("DESC:def", "DESC:manner", "HUM:ind", "NUM:count")
    message = "train_5500.label: each line has a label, then its text (format=label-text)"
    assert message in source.stated and any('label_until=":" makes "DESC:manner"' in each for each in source.stated)
    with pytest.raises(HeedfulError, match=r"train_5500\.label:1:.*byte 0xe9 .*--data.encoding=cp1252"):
        list(opened(path).examples("train"))


@pytest.mark.parametrize("name", ["questions.txt", "questions"])
def test_coarse_labels_are_a_setting(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(QUESTIONS, encoding="utf-8")
    settings = override(DataSettings(dev_fraction=0.0), ["label_until=:"])
    source = dataset_for_task(LabelledExample, path, settings, Skip())
    assert source.labels == ("DESC", "HUM", "NUM")
    assert [each.label for each in source.examples("train")] == ["DESC", "NUM", "DESC", "HUM"]
    (tmp_path / "a.csv").write_text("text,score\na,1\n")
    with pytest.raises(HeedfulError, match="label_until=: would change nothing"):
        dataset_for_task(ScoredExample, tmp_path / "a.csv", settings, Skip())


def test_fasttext_labels(tmp_path: Path) -> None:
    path = tmp_path / "cooking.train"
    path.write_text(TAGGED_TEXTS)
    source = dataset_for_task(LabelledExample, path, DataSettings(dev_fraction=0.0), Skip())
    assert list(source.examples("train")) == [
        MultiLabelExample(labels=("tea", "milk"), text="Milk first ?"),
        MultiLabelExample(labels=("tea",), text="How hot ?"),
        MultiLabelExample(labels=("cake",), text="Too dry ?"),
    ]
    path.write_text(TAGGED_TEXTS.replace(" __label__milk", ""))
    source = dataset_for_task(LabelledExample, path, DataSettings(dev_fraction=0.0), Skip())
    assert [each.label for each in source.examples("train")] == ["tea", "tea", "cake"]
    source = dataset_for_task(
        LabelledExample, path, DataSettings(dev_fraction=0.0, columns={"labels": "labels"}), Skip()
    )
    assert source.kind is MultiLabelExample and source.labels == ("cake", "tea")


def test_several_labels_late_in_a_file_count(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("__label__tea How hot ?\n" * 9000 + TAGGED_TEXTS)
    assert opened(path).kind is MultiLabelExample
    with pytest.raises(HeedfulError, match=r"a\.txt:9001: has 2 labels, expected one: --data.columns\.labels=labels"):
        list(opened(path, LabelledExample).examples("train"))


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
        list(opened(path, LabelledExample).examples("train"))
    (tmp_path / "b.label").write_text("tea\nmilk Is it fresh ?\n")
    with pytest.raises(HeedfulError, match=r"b\.label:1: has one word and no text"):
        list(opened(tmp_path / "b.label").examples("train"))


def test_first_words_that_all_come_again_are_labels_where_labels_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "polarity.txt"
    path.write_text("1 a fine day\n0 rain again\n1 sun at last\n0 mud\n")
    assert opened(path).kind is TextExample, "it may be text"
    assert opened(path, LabelledExample).labels == ("0", "1")
    assert opened(path, format="label-text").kind is LabelledExample
    path.write_text("a fine day\nrain again\n")
    with pytest.raises(HeedfulError, match="holds plain text, but this task needs"):
        opened(path, LabelledExample)
    (tmp_path / "empty.label").write_text("\n\n")
    with pytest.raises(HeedfulError, match=r"empty\.label: has no rows"):
        opened(tmp_path / "empty.label")


def test_columns_between_tabs_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "SICK_train.txt"
    path.write_text("pair_ID\tsentence_A\tscore\n1\ta cup\t4.5\n")
    source = opened(path, ScoredExample, columns={"text": "sentence_A"})
    assert next(source.examples("train")) == ScoredExample(text="a cup", score=4.5)
