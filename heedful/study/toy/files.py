"""`write_toy_files`: the toy data as translation/{train,dev,test}.tsv and order/{train,dev,test}.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.errors import DataError, HeedfulError
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.order import OrderText, texts
from heedful.study.toy.split import Sizes

TRANSLATION, ORDER = "translation", "order"
MIN_TRAIN = 80  # minimum number of training examples


def write_toy_files(folder: Path, *, train: int = 20_000, seed: int = 0) -> list[Path]:
    """Write both data sets to a new folder, and return the paths of their files.

    The split of a text depends only on the text. A test text of one seed or size is therefore never a training text of
    another.

    Args:
        folder: A new or empty folder.
        train: Number of training examples. The number of dev and of test examples is a tenth of it. In "order", numbers
            are rounded down to a multiple of eight.
        seed: Random seed.

    Raises:
        HeedfulError: If `train` is too small.
        DataError: If the folder is not empty, or cannot be written.
    """
    if train < MIN_TRAIN:
        raise HeedfulError(f"train is {train}; expected {MIN_TRAIN} examples or more")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty: give another folder")
    sizes = Sizes(train=train, dev=train // 10, test=train // 10)
    pairs_by_split = translations(sizes, seed)
    texts_by_split = texts(sizes, seed)
    files = []
    try:
        for name in (TRANSLATION, ORDER):
            make_folder(folder / name)
        for split, pairs in pairs_by_split.items():
            files.append(_write_table(folder / TRANSLATION / f"{split}.tsv", Translation._fields, pairs, "\t"))
        for split, labelled in texts_by_split.items():
            files.append(_write_table(folder / ORDER / f"{split}.csv", OrderText._fields, labelled, ","))
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}: give another folder") from None
    return files


def _write_table(path: Path, names: Sequence[str], rows: Iterable[Sequence[str]], delimiter: str) -> Path:
    """Write a table with a header as CSV, and return its path."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    with atomic_path(path) as part:
        write_synced(part, [text.getvalue().encode()])
    return path
