"""Static word vectors: text files of GloVe (Pennington et al. 2014), text and binary files of word2vec."""

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

MAX_WORD_BYTES = 10_000  # bytes of a word in a binary file
ReadVector = Callable[[], Float32[np.ndarray, " width"]]  # parses the numbers of one word when it is called


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WordVectors:
    """Words in the order of the file (by frequency in published files), and their vectors."""

    words: tuple[str, ...]
    vectors: Float32[np.ndarray, "words width"]


def read_vectors(
    path: str | Path,
    *,
    wanted: Collection[str] = (),
    max_other_words: int | None = None,
    normalise: Callable[[str], str | None] = lambda written: written,
) -> WordVectors:
    """Read word vectors from a file of GloVe or word2vec, which may be compressed (.gz, .xz, .bz2).

    A file whose name has the suffix .bin is word2vec's binary format. Any other file is text: each line has a word and
    its numbers, separated by spaces; word2vec's first line has the number of words and their width instead. A word that
    occurs twice keeps its first vector, or the first one whose spelling in the file is the normalised word itself.

    Args:
        path: the file.
        wanted: normalised words that are kept.
        max_other_words: maximum number of other words that are kept, to bound memory; None: all.
        normalise: maps a word of the file to the word that is looked up, such as its lower case; None leaves it out.

    Raises:
        DataError: If the file cannot be read or is damaged, or no word is kept.
    """
    path, wanted_words, other_words = Path(path), frozenset(wanted), 0
    vector_by_word: dict[str, np.ndarray] = {}
    exact: set[str] = set()  # words with a vector of their exact spelling
    for written, read_vector in _read_binary(path) if ".bin" in path.suffixes else _read_text(path, wanted_words):
        word = normalise(written)
        if word is None or word in exact or (word in vector_by_word and word != written):
            continue
        if word not in vector_by_word:
            if word not in wanted_words and max_other_words is not None and other_words >= max_other_words:
                continue
            other_words += word not in wanted_words
        vector_by_word[word] = read_vector()
        if word == written:
            exact.add(word)
    if not vector_by_word:
        raise DataError(f"{path} has no vector of a wanted word: is it for another language, or in capitals?")
    return WordVectors(words=tuple(vector_by_word), vectors=np.stack(list(vector_by_word.values())))


def _read_text(path: Path, wanted_words: frozenset[str]) -> Iterator[tuple[str, ReadVector]]:
    """Yield the words of a text file, and how to read their vectors."""
    width, count, number = 0, None, 0  # count: the number of words in word2vec's first line
    for number, line in enumerate(read_lines([path]), 1):
        parts = line.rstrip(" ").split(" ")
        if number == 1 and len(parts) == 2 and all(part.isdecimal() for part in parts):
            count, width = int(parts[0]), int(parts[1])
            continue
        width = width or len(parts) - 1
        word = " ".join(parts[: len(parts) - width])  # some published words have spaces in them
        if (
            parts[0] in wanted_words
            and len(parts) > width + 1
            and word not in wanted_words
            and _is_number(parts[-width - 1])
        ):
            raise DataError(f"{path}, line {number} has {len(parts) - 1} numbers; expected {width} as in other lines")
        if width < 1 or not word:
            expected = f"a word and {width or 'its'} numbers"
            raise DataError(f"{path}, line {number} has {len(parts)} parts; expected {expected}")
        yield word, partial(_to_vector, parts[len(parts) - width :], f"{path}, line {number}")
    if count is not None and number - 1 != count:
        raise DataError(
            f"{path}: its first line says {count:,} words, and {number - 1:,} lines follow: it is cut off or damaged; "
            "if the lines are complete, correct the first one"
        )


def _read_binary(path: Path) -> Iterator[tuple[str, ReadVector]]:
    """Yield the words of word2vec's binary file, and how to read their vectors.

    Its first line has the number of words and their width. For each word follow its UTF-8 text, a space, its numbers
    as little-endian float32, and in some files a line end.
    """
    number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as opened:
            file = BufferedReader(opened)
            header = file.readline(64).split()
            if len(header) != 2 or not all(part.isdigit() for part in header) or not int(header[1]):
                raise DataError(
                    f"{path} does not begin with the number of words and their width, as binary files of word2vec do: "
                    "if it is text, rename it without .bin"
                )
            count, width = int(header[0]), int(header[1])
            for number in range(1, count + 1):
                word = bytearray()
                while len(word) < MAX_WORD_BYTES and (byte := file.read(1)) not in (b" ", b""):
                    word += byte
                data = file.read(4 * width)
                if len(data) < 4 * width:
                    raise DataError(f"{path} says {count:,} words and ends within word {number:,}: it is cut off")
                yield word.lstrip(b"\n").decode(), partial(_to_vector, data, f"{path}, word {number}")
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


def _to_vector(numbers: list[str] | bytes, position: str) -> Float32[np.ndarray, " width"]:
    """Parse the numbers of one word; `position` is its place in the file, for messages."""
    try:
        with np.errstate(over="ignore"):  # infinite numbers are reported below
            vector = np.frombuffer(numbers, "<f4") if isinstance(numbers, bytes) else np.array(numbers, np.float32)
    except ValueError as error:
        raise DataError(f"{position}: {error}; expected a word and {len(numbers)} numbers") from None
    if not np.isfinite(vector).all():
        raise DataError(f"{position} holds NaN or infinite numbers: the file is damaged")
    return vector
