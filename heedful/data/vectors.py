"""Static word vectors from a file: the text formats of GloVe (Pennington et al. 2014) and word2vec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from heedful.errors import HeedfulError
from heedful.tokenizer.training import lines


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WordVectors:
    """Words in the order of the file, which is that of frequency in published ones, and a row for each."""

    words: tuple[str, ...]
    rows: Float32[np.ndarray, "words width"]


def read_vectors(path: str | Path, *, wanted: Collection[str] = (), others: int | None = None) -> WordVectors:
    """Read a word and its numbers from each line, all divided by spaces; .gz, .xz and .bz2 too.

    A first line of two whole numbers, how many words and how wide, is word2vec's. Of words that are not wanted only the
    first so many are kept (None: all), so that memory does not grow with the file. Of a word that stands there twice
    the first line counts.
    """
    found: dict[str, np.ndarray] = {}
    width, kept, asked, said, number = 0, 0, frozenset(wanted), None, 0
    for number, line in enumerate(lines([Path(path)]), 1):
        parts = line.rstrip(" ").split(" ")
        if number == 1 and len(parts) == 2 and all(part.isdecimal() for part in parts):
            said, width = int(parts[0]), int(parts[1])
            continue
        width = width or len(parts) - 1
        word = " ".join(parts[: len(parts) - width])  # some published words have spaces in them
        if parts[0] in asked and len(parts) > width + 1 and word not in asked and _is_number(parts[-width - 1]):
            raise HeedfulError(f"{path}, line {number} has {len(parts) - 1} numbers; expected {width} as before")
        if width < 1 or not word:
            form = f"a word and {width or 'its'} numbers"
            raise HeedfulError(f"{path}, line {number} has {len(parts)} parts; expected {form}")
        if word in found or (word not in asked and others is not None and kept >= others):
            continue
        found[word] = _numbers(parts[len(parts) - width :], path, number)
        kept += word not in asked
    if said is not None and number - 1 != said:
        raise HeedfulError(
            f"{path}: its first line says {said:,} words, and {number - 1:,} lines follow: it is cut off or damaged; "
            "mend that line if it is meant so"
        )
    if not found:
        raise HeedfulError(f"{path} has no vector of a word that is wanted: is it of another language, or in capitals?")
    return WordVectors(words=tuple(found), rows=np.stack(list(found.values())))


def _is_number(part: str) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


def _numbers(parts: list[str], path: str | Path, number: int) -> Float32[np.ndarray, " width"]:
    try:
        with np.errstate(over="ignore"):  # told below
            row = np.array(parts, dtype=np.float32)
    except ValueError as error:
        raise HeedfulError(f"{path}, line {number}: {error}; expected a word and {len(parts)} numbers") from None
    if not np.isfinite(row).all():
        raise HeedfulError(f"{path}, line {number} holds NaN or infinite numbers: the file is damaged")
    return row
