"""Write the toy data sets as files: translation/{train,dev,test}.tsv and order/{train,dev,test}.csv.

`heedful study --toy` calls `write_toy_files`.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.errors import DataError, HeedfulError
from heedful.study.toy.language import Translation, translations
from heedful.study.toy.order import OrderText, texts
from heedful.study.toy.split import Sizes

TRANSLATION, ORDER = "translation", "order"  # names of the data sets and of their folders
MIN_TRAIN = 80  # minimum number of training examples; dev has a tenth, and "order" needs 8 texts in each split


def write_toy_files(folder: Path, *, train: int = 20_000, seed: int = 0) -> list[Path]:
    """Write both data sets to a new folder, and return the paths of their files.

    The split of a text depends only on the text. So a test text of one call is never a training text of a call with
    another seed or size. After an error the folder is empty, so that the call can be repeated.

    Args:
        folder: A new or empty folder.
        train: Number of training examples of each data set. Dev and test have a tenth of this number each. In "order",
            the size of each split is rounded down to a multiple of eight.
        seed: Random seed.

    Raises:
        HeedfulError: If `train` is too small.
        DataError: If the folder is a file, is not empty, or cannot be written.
    """
    if train < MIN_TRAIN:
        raise HeedfulError(f"train is {train}; expected {MIN_TRAIN} examples or more")
    sizes = Sizes(train=train, dev=train // 10, test=train // 10)
    try:
        _require_empty(folder)
        return _write_splits(folder, translations(sizes, seed), texts(sizes, seed))
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}: give another folder") from None


def _require_empty(folder: Path) -> None:
    """Raise DataError unless the folder is empty or does not exist."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give another path")
    if any(folder.iterdir()):
        raise DataError(f"{folder} exists and is not empty: give another folder")


def _write_splits(
    folder: Path, pairs_by_split: dict[str, list[Translation]], texts_by_split: dict[str, list[OrderText]]
) -> list[Path]:
    """Write the files of both data sets, and return their paths. After an error, remove what was written."""
    files = []
    with ExitStack() as cleanup:
        for name in (TRANSLATION, ORDER):
            cleanup.callback(shutil.rmtree, folder / name, ignore_errors=True)
            make_folder(folder / name)
        for split, pairs in pairs_by_split.items():
            files.append(_write_table(folder / TRANSLATION / f"{split}.tsv", Translation._fields, pairs, "\t"))
        for split, order_texts in texts_by_split.items():
            files.append(_write_table(folder / ORDER / f"{split}.csv", OrderText._fields, order_texts, ","))
        cleanup.pop_all()  # all files are written: keep them
    return files


def _write_table(path: Path, names: Sequence[str], rows: Iterable[Sequence[str]], delimiter: str) -> Path:
    """Write rows of cells with a header line, and return the path."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    with atomic_path(path) as temporary:
        write_synced(temporary, [text.getvalue().encode()])
    return path
