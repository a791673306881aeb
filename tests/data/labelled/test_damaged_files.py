"""Files with random damage give examples, bad rows or a HeedfulError that names the file."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pytest

from heedful.data import DataSettings, Skip, check, read
from heedful.errors import HeedfulError


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "label": [0, 1, 0]}), out)
    return out.getvalue()


INTACT_FILES = {
    "a.csv": b'text,label\n"a ""b""",1\n"c\nd",0\n\xc3\xa9,1\n',
    "a.tsv": b"sentence\tlabel\na\t1\nb\t0\n",
    "a.jsonl": b'{"text": "a", "label": 1}\n{"text": "\\u00e9", "label": "x"}\n',
    "a.json": b'[{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}]',
    "b.json": b'{"prompt": "p", "choices": ["a", "b"], "answer": 1}\n'
    b'{"prompt": "p", "choices": ["a", "b"], "answer": "a"}\n',
    "c.json": b'{"data": [{"title": "t", "paragraphs": [{"context": "Ada met Bob", "qas": '
    b'[{"id": "1", "question": "Who?", "is_impossible": false, '
    b'"answers": [{"text": "Bob", "answer_start": 8}]}]}]}], "version": "2"}',
    "a.conll": b"-DOCSTART- O\n\nAda B-PER\nmet O\nBob S-PER\n\nx I-LOC\n",
    "a.txt": "one\ntwo\n".encode("utf-16"),
    "a.csv.gz": gzip.compress(b"text,label\na,1\nb,0\n" * 20, mtime=0),
    "a.parquet": parquet(),
}
INSERTIONS = [
    b"\0",
    b"\n",
    b"\r",
    b'"',
    b"\\",
    b"\\ud800",
    b"[",
    b"{",
    b"}",
    b",",
    b"\t",
    b"\xff",
    b"-1",
    b"NaN",
    b"null",
    b"9" * 400,
]


def damage(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        position, length = rng.randrange(len(data) + 1), rng.choice([0, 0, 1, 1, 3, 20])
        inserted = rng.choice([b"", rng.choice(INSERTIONS), rng.randbytes(1)])
        data = data[:position] + inserted + data[position + length :]
    return data


@pytest.mark.parametrize("name", INTACT_FILES)
@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage(tmp_path: Path, name: str, rounds: int) -> None:
    rng, messages = random.Random(f"{name} {rounds}"), []
    for _ in range(rounds):
        (tmp_path / name).write_bytes(damage(INTACT_FILES[name], rng))
        try:
            check(read(tmp_path / name, settings=DataSettings(dev_fraction=0.2), on_bad_row=Skip())).lines()
        except HeedfulError as error:
            messages.append(str(error))
    assert all(str(tmp_path / name) in message for message in messages)
