"""Readers of static word vectors: text files of GloVe (Pennington et al. 2014), text and binary files of word2vec.

Classic models, which are recurrent or bags of words, can initialise their embeddings from such vectors.
"""

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

MAX_WORD_BYTES = 10_000  # maximum bytes of a word in a binary file
ReadVector = Callable[[], Float32[np.ndarray, " dimension"]]  # parses the vector of one word when called


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WordVectors:
    """Words in the order of the file (by frequency in published files), and their vectors."""

    words: tuple[str, ...]
    vectors: Float32[np.ndarray, "words dimension"]


def read_vectors(
    path: str | Path,
    *,
    wanted: Collection[str] = (),
    max_other_words: int | None = None,
    normalise: Callable[[str], str | None] = lambda word: word,
) -> WordVectors:
    """Read word vectors from a file of GloVe or word2vec, which may be compressed (.gz, .xz, .bz2).

    A file with the suffix .bin is in word2vec's binary format. Any other file is text, with a word and the numbers of
    its vector on each line, separated by spaces. The first line of word2vec's text files has the number of words and
    the dimension instead. A word that occurs twice gets its first vector, or the first one whose spelling in the file
    is the normalised word itself.

    Args:
        path: the file.
        wanted: normalised words that are returned if the file has them.
        max_other_words: maximum other words that are returned, to bound memory. If None, all words are returned.
        normalise: maps a word of the file to a normalised word, such as its lower case, or to None to skip the word.

    Raises:
        DataError: If the file cannot be read or is damaged, or has no word to return.
    """
    path = Path(path)
    wanted_words = frozenset(wanted)
    num_other_words = 0
    vector_by_word: dict[str, np.ndarray] = {}
    exact: set[str] = set()  # words whose vector is the one of their exact spelling
    entries = _read_binary(path) if ".bin" in path.suffixes else _read_text(path, wanted_words)
    for spelling, read_vector in entries:
        word = normalise(spelling)
        if word is None:
            continue
        is_known = word in vector_by_word
        if word in exact or (is_known and word != spelling):
            continue
        if not is_known and word not in wanted_words:
            if max_other_words is not None and num_other_words >= max_other_words:
                continue
            num_other_words += 1
        vector_by_word[word] = read_vector()
        if word == spelling:
            exact.add(word)
    if not vector_by_word:
        raise DataError(f"{path} has no vector of a wanted word: is it for another language, or in capitals?")
    return WordVectors(words=tuple(vector_by_word), vectors=np.stack(list(vector_by_word.values())))


def _read_text(path: Path, wanted_words: frozenset[str]) -> Iterator[tuple[str, ReadVector]]:
    """Yield each word of a text file with a function that parses its vector."""
    dimension = 0  # 0: unknown before the first line
    count: int | None = None  # words in the file, by word2vec's first line
    line_number = 0
    for line_number, line in enumerate(read_lines([path]), 1):
        cells = line.rstrip(" ").split(" ")
        if line_number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            count, dimension = int(cells[0]), int(cells[1])
            continue
        dimension = dimension or len(cells) - 1
        position = f"{path}, line {line_number}"
        word = " ".join(cells[: len(cells) - dimension])  # some published words contain spaces
        if len(cells) > dimension + 1:
            # either a word with spaces, or a wanted word with too many numbers
            first_is_the_word = cells[0] in wanted_words and word not in wanted_words
            if first_is_the_word and _is_number(cells[-dimension - 1]):
                raise DataError(f"{position} has {len(cells) - 1} numbers; expected {dimension} as in other lines")
        if dimension < 1 or not word:
            expected = f"a word and {dimension or 'its'} numbers"
            raise DataError(f"{position} has {len(cells)} parts; expected {expected}")
        yield word, partial(_to_vector, cells[len(cells) - dimension :], position)
    if count is not None and line_number - 1 != count:
        raise DataError(
            f"{path}: its first line says {count:,} words, and {line_number - 1:,} lines follow: it is cut off or "
            "damaged; if the lines are complete, correct the first one"
        )


def _read_binary(path: Path) -> Iterator[tuple[str, ReadVector]]:
    """Yield each word of a binary file of word2vec with a function that parses its vector.

    The first line has the number of words and the dimension. For each word follow the word in UTF-8, a space, the
    vector in little-endian float32, and in some files a line end.
    """
    index = 0  # words begun so far
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as opened:
            file = BufferedReader(opened)
            header = file.readline(64).split()
            if len(header) != 2 or not all(part.isdigit() for part in header) or not int(header[1]):
                raise DataError(
                    f"{path} does not begin with the number of words and the dimension, as binary files of word2vec "
                    "do: if it is text, rename it without .bin"
                )
            count, dimension = int(header[0]), int(header[1])
            for index in range(1, count + 1):
                word = bytearray()
                while len(word) < MAX_WORD_BYTES and (byte := file.read(1)) not in (b" ", b""):
                    word += byte
                data = file.read(4 * dimension)
                if len(data) < 4 * dimension:
                    raise DataError(f"{path} says {count:,} words and ends within word {index:,}: it is cut off")
                yield word.lstrip(b"\n").decode(), partial(_to_vector, data, f"{path}, word {index}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, word {index} is not UTF-8 ({error.reason}): save the words as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read after word {index}: {error}; check the file") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _to_vector(numbers: list[str] | bytes, position: str) -> Float32[np.ndarray, " dimension"]:
    """Parse the vector of one word; `position` is the position in the file, for messages."""
    try:
        with np.errstate(over="ignore"):  # infinite numbers are reported below
            vector = np.frombuffer(numbers, "<f4") if isinstance(numbers, bytes) else np.array(numbers, np.float32)
    except ValueError as error:
        raise DataError(f"{position}: {error}; expected a word and {len(numbers)} numbers") from None
    if not np.isfinite(vector).all():
        raise DataError(f"{position} holds NaN or infinite numbers: the file is damaged")
    return vector
