"""read_vectors: word vectors in text and binary files, the choice of words, and errors of damaged files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from heedful.data.word_vectors import read_vectors
from heedful.errors import HeedfulError

GLOVE = "the 0.5 -1e-2 3\n, 1 2 3\n. . 4 5 6\ncafé 7 8 9\nthe 0 0 0\n"


def test_glove_and_word2vec_text_files(tmp_path: Path) -> None:
    (tmp_path / "glove.txt").write_text(GLOVE, encoding="utf-8")
    with gzip.open(tmp_path / "word2vec.txt.gz", "wt", encoding="utf-8", newline="\r\n") as file:
        file.write("5 3\n" + GLOVE.replace("\n", " \n"))  # word2vec ends its lines with a space
    for name in ("glove.txt", "word2vec.txt.gz"):
        word_vectors = read_vectors(tmp_path / name)
        assert word_vectors.words == ("the", ",", ". .", "café"), "the second vector of a word is ignored"
        assert word_vectors.vectors.tolist() == [[0.5, pytest.approx(-0.01), 3], [1, 2, 3], [4, 5, 6], [7, 8, 9]]
        selected = read_vectors(tmp_path / name, wanted=["café", "tea"], max_other_words=1)
        assert selected.words == ("the", "café") and selected.vectors.shape == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\nof 1\n", "line 2 has 2 parts; expected a word and 2 numbers"),
        ("2 3\nthe 1 2\n", "line 2 has 3 parts; expected a word and 3 numbers"),
        ("the\n", "line 1 has 1 parts; expected a word and its numbers"),
        ("the 1 x\n", "line 1: could not convert string to float: .*; expected a word and 2 numbers"),
        ("the 1 nan\n", "line 1 holds NaN or infinite numbers"),
        ("the 1 1e39\n", "line 1 holds NaN or infinite numbers"),
        ("", "has no vector of a wanted word"),
        ("400 2\nthe 1 2\n", "its first line says 400 words, and 1 lines follow: it is cut off or damaged"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "vectors.txt").write_text(text)
    with pytest.raises(HeedfulError, match=message):
        read_vectors(tmp_path / "vectors.txt")


def test_a_wanted_word_with_an_extra_number_is_refused(tmp_path: Path) -> None:
    """Elsewhere such a line is a word with a space; here the wanted word would be left without a vector."""
    (tmp_path / "vectors.txt").write_text("good 1 2\nbad 4 5 6\n")
    with pytest.raises(HeedfulError, match="line 2 has 3 numbers; expected 2 as in other lines"):
        read_vectors(tmp_path / "vectors.txt", wanted=["bad"])
    assert read_vectors(tmp_path / "vectors.txt").words == ("good", "bad 4")


WORDS = {"the": [0.5, -0.01, 3], ",": [1, 2, 3], "café": [7, 8, 9]}


def _binary(entries: dict[str, list[float]], head: str = "3 3\n", end: bytes = b"\n") -> bytes:
    """A file as word2vec writes it with -binary 1; other programs leave out the line break after each vector."""
    rows = (word.encode() + b" " + np.array(row, "<f4").tobytes() + end for word, row in entries.items())
    return head.encode() + b"".join(rows)


@pytest.mark.parametrize("end", [b"\n", b""])
def test_binary_word2vec_files(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "news.bin").write_bytes(_binary(WORDS, end=end))
    (tmp_path / "news.bin.gz").write_bytes(gzip.compress(_binary(WORDS, end=end)))
    for name in ("news.bin", "news.bin.gz"):
        word_vectors = read_vectors(tmp_path / name)
        assert word_vectors.words == tuple(WORDS)
        assert np.array_equal(word_vectors.vectors, np.array(list(WORDS.values()), "float32"))
        assert read_vectors(tmp_path / name, wanted=["café"], max_other_words=0).words == ("café",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_binary(WORDS)[:-6], "says 3 words and ends within word 3: it is cut off"),
        (_binary(WORDS, "4 3\n"), "says 4 words and ends within word 4"),
        (GLOVE.encode(), "does not begin with the number of words and the dimension"),
        (b"3 0\nthe \n", "does not begin with the number of words"),
        (b"1 1\n\xff\xfe \0\0\0\0", "word 1 is not UTF-8"),
        (_binary({"the": [1, float("nan"), 2]}, "1 3\n"), "word 1 holds NaN or infinite numbers"),
    ],
)
def test_a_bad_binary_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "vectors.bin").write_bytes(content)
    with pytest.raises(HeedfulError, match=message):
        read_vectors(tmp_path / "vectors.bin")
    with pytest.raises(HeedfulError, match="cannot be read"):
        read_vectors(tmp_path / "none.bin")
