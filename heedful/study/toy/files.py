"""The toy world as ordinary files: translation/{train,dev,test}.tsv and order/{train,dev,test}.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from heedful.atomic_io import put, put_folder, whole
from heedful.errors import HeedfulError
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.order import Text, texts
from heedful.study.toy.split import Sizes

TRANSLATION, ORDER = "translation", "order"
MIN_TRAIN = 80  # training examples


def write_toy_files(folder: Path, *, train: int = 20_000, seed: int = 0) -> list[Path]:
    """Write both sets, each with so many training examples and a tenth as many in dev and in test, those of
    order in groups of eight; a new folder.

    What is train, dev or test depends on a text alone: sets of other seeds or sizes do not leak into each other.
    """
    if train < MIN_TRAIN:
        raise HeedfulError(f"train is {train}; expected {MIN_TRAIN} examples or more")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeedfulError(f"{folder} exists and is not empty: give another folder")
    sizes = Sizes(train=train, dev=train // 10, test=train // 10)
    pairs, labelled = translations(sizes, seed), texts(sizes, seed)
    found = []
    try:
        for name in (TRANSLATION, ORDER):
            put_folder(folder / name)
        for split in pairs:
            path = folder / TRANSLATION / f"{split}.tsv"
            found.append(_table(path, Translation._fields, pairs[split], "\t"))
        for split in labelled:
            found.append(_table(folder / ORDER / f"{split}.csv", Text._fields, labelled[split], ","))
    except OSError as error:
        raise HeedfulError(f"{folder} cannot be written: {error.strerror}: give another folder") from None
    return found


def _table(path: Path, names: Sequence[str], rows: Iterable[Sequence[str]], delimiter: str) -> Path:
    out = io.StringIO()
    table = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    table.writerow(names)
    table.writerows(rows)
    with whole(path) as part:
        put(part, [out.getvalue().encode()])
    return path
