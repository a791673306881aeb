"""parse_split_name: the split that a file name contains as a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.data import DataSettings, TaggedExample, read
from heedful.data.labelled.split_files import parse_split_name


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("wnut17train.conll", "train"),
        ("emerging.dev.conll", "dev"),
        ("emerging.test.annotated", "test"),
        ("train2.csv", "train"),
        ("myTrainSet.csv", "train"),
        ("TRAIN.csv", "train"),
        ("eng.testA", "dev"),
        ("eng.testb", "test"),
        ("20news-bydate-train", "train"),
        ("train_5500.label", "train"),
        ("SICK_test_annotated.txt", "test"),
        ("constraint.csv", ""),
        ("latest.csv", ""),
        ("pretrain.csv", ""),
        ("trains.csv", ""),
        ("préval.csv", ""),
        ("train-and-test.csv", ""),
        ("TREC_10.label", ""),
    ],
)
def test_split_names_are_words_of_the_file_name(name: str, split: str) -> None:
    assert parse_split_name(Path(name))[0] == split


def test_wnut_as_published(tmp_path: Path) -> None:
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        (tmp_path / name).write_text("Ada\tB-person\nhere\tO\n\n")
    dataset = read(tmp_path, TaggedExample, DataSettings(dev_fraction=0.0))
    assert dataset.splits == ("train", "dev", "test")
    assert [len(list(dataset.examples(split))) for split in dataset.splits] == [1, 1, 1]
