"""F4: hostile tokenizer files, loaded in a child with 2 GB of memory: a tokenizer or a HeedfulError, never its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_tokenizer import ANGLED, pieces, write_bytes, write_pieces
from test_tokenizer_pieces import trained

from heedful.tokenizer import Tokenizer

CHILD = """
import pathlib, random, resource, sys, warnings
warnings.simplefilter("ignore")
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
refused = loaded = 0
for path in sorted(folder.glob("*/*.*")):
    whole, draw = path.read_bytes(), random.Random(path.name)
    for number in range(count):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            place = draw.randrange(len(data))
            match draw.randrange(5):
                case 0: data[place] = draw.randrange(256)
                case 1: data[place] ^= 1 << draw.randrange(8)
                case 2: del data[place : place + draw.choice([1, 4, 1000])]
                case 3: data[place:place] = draw.choice([b"9" * 30, b"\\xff" * 9, b'"', b"[" * 500, b"2000000000"])
                case 4: data = data[: place + 1]
            if not data: data = bytearray(b"0")
        path.write_bytes(data)
        try:
            Tokenizer.load(path.parent).encode("a small text, <s> and more")
            loaded += 1
        except HeedfulError:
            refused += 1
    path.write_bytes(whole)
print(refused, loaded)
"""


def run(folder: Path, count: int) -> None:
    Tokenizer.load(write_pieces(folder / "a", pieces())).save(folder / "words")
    Tokenizer.load(write_bytes(folder / "b", ANGLED)).save(folder / "bytes")
    kept = folder / "kept"
    for name in ("words", "bytes"):
        (kept / name).mkdir(parents=True)
        (folder / name / "tokenizer.json").rename(kept / name / "tokenizer.json")
    (kept / "pieces").mkdir()
    (kept / "pieces" / "spiece.model").write_bytes(trained())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(kept), str(count)], capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, loaded = map(int, done.stdout.split())
    assert refused + loaded == 3 * count and refused > count


def test_f4_a_few(tmp_path: Path) -> None:
    run(tmp_path, 150)


@pytest.mark.slow
def test_f4_ten_thousand(tmp_path: Path) -> None:
    run(tmp_path, 3_500)
