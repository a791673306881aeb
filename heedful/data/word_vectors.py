"""Static word vectors: text files of GloVe (Pennington et al. 2014) and word2vec, and word2vec's binary files."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from heedful.errors import DataError
from heedful.tokenizer.training import OPENERS, read_lines

LONGEST_WORD = 10_000  # bytes
Row = Callable[[], Float32[np.ndarray, " width"]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WordVectors:
    """Words in the order of the file (by frequency in published files), and their vectors."""

    words: tuple[str, ...]
    rows: Float32[np.ndarray, "words width"]


def read_vectors(
    path: str | Path,
    *,
    wanted: Collection[str] = (),
    others: int | None = None,
    form: Callable[[str], str | None] = lambda written: written,
) -> WordVectors:
    """Read a word and its numbers from each line, all divided by spaces, or what word2vec itself writes, from a name
    with .bin; .gz, .xz and .bz2 too.

    A first line of two whole numbers, the count of words and their width, is word2vec's. A word that occurs twice keeps
    its first vector, or the first one whose spelling equals its form.

    Args:
        wanted: Words that are kept.
        others: Maximum number of other words to keep, so that memory does not grow with the file; None: all.
        form: Maps a word of the file to the form that is looked up, such as its lower case; None leaves it out.
    """
    path, asked, other_words = Path(path), frozenset(wanted), 0
    rows_by_word: dict[str, np.ndarray] = {}
    exact: set[str] = set()
    for written, row in _binary(path) if ".bin" in path.suffixes else _text(path, asked):
        word = form(written)
        if word is None or word in exact or (word in rows_by_word and word != written):
            continue
        if word not in rows_by_word:
            if word not in asked and others is not None and other_words >= others:
                continue
            other_words += word not in asked
        rows_by_word[word] = row()
        if word == written:
            exact.add(word)
    if not rows_by_word:
        raise DataError(f"{path} has no vector of a word that is wanted: is it of another language, or in capitals?")
    return WordVectors(words=tuple(rows_by_word), rows=np.stack(list(rows_by_word.values())))


def _text(path: Path, asked: frozenset[str]) -> Iterator[tuple[str, Row]]:
    width, count, number = 0, None, 0
    for number, line in enumerate(read_lines([path]), 1):
        parts = line.rstrip(" ").split(" ")
        if number == 1 and len(parts) == 2 and all(part.isdecimal() for part in parts):
            count, width = int(parts[0]), int(parts[1])
            continue
        width = width or len(parts) - 1
        word = " ".join(parts[: len(parts) - width])  # some published words have spaces in them
        if parts[0] in asked and len(parts) > width + 1 and word not in asked and _is_number(parts[-width - 1]):
            raise DataError(f"{path}, line {number} has {len(parts) - 1} numbers; expected {width} as before")
        if width < 1 or not word:
            form = f"a word and {width or 'its'} numbers"
            raise DataError(f"{path}, line {number} has {len(parts)} parts; expected {form}")
        yield word, partial(_numbers, parts[len(parts) - width :], f"{path}, line {number}")
    if count is not None and number - 1 != count:
        raise DataError(
            f"{path}: its first line says {count:,} words, and {number - 1:,} lines follow: it is cut off or damaged; "
            "correct that line if it is meant so"
        )


def _binary(path: Path) -> Iterator[tuple[str, Row]]:
    """How many words and how wide on a line; then each word, a space, its numbers in 4 bytes each, or a line's end."""
    number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as opened:
            file = BufferedReader(opened)
            head = file.readline(64).split()
            if len(head) != 2 or not all(part.isdigit() for part in head) or not int(head[1]):
                raise DataError(
                    f"{path} does not begin with how many words it has and how wide they are, as word2vec's own files "
                    "do: give a text file a name without .bin"
                )
            count, width = int(head[0]), int(head[1])
            for number in range(1, count + 1):
                word = bytearray()
                while len(word) < LONGEST_WORD and (byte := file.read(1)) not in (b" ", b""):
                    word += byte
                row = file.read(4 * width)
                if len(row) < 4 * width:
                    raise DataError(f"{path} says {count:,} words and ends within number {number:,}: it is cut off")
                yield word.lstrip(b"\n").decode(), partial(_numbers, row, f"{path}, word {number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, word {number} is not UTF-8 ({error.reason}): save the words as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read after word {number}: {error}; check the file") from error


def _is_number(part: str) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


def _numbers(parts: list[str] | bytes, where: str) -> Float32[np.ndarray, " width"]:
    try:
        with np.errstate(over="ignore"):  # told below
            row = np.frombuffer(parts, "<f4") if isinstance(parts, bytes) else np.array(parts, dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{where}: {error}; expected a word and {len(parts)} numbers") from None
    if not np.isfinite(row).all():
        raise DataError(f"{where} holds NaN or infinite numbers: the file is damaged")
    return row
