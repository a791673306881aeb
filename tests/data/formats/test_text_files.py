"""Reading files as text: compression, encodings, lines that cannot be used, and JSON read piece by piece."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings, Raise, Skip, read
from heedful.data.bad_rows import RowErrors
from heedful.data.formats.text_files import all_lines, detect_encoding, open_json, read_text_lines
from heedful.errors import HeedfulError

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read_lines(path: Path, **options: Any) -> tuple[list[tuple[int, str]], list[str]]:
    """The usable lines of a file with their numbers, and the errors of the other lines."""
    row_errors = RowErrors(Skip())
    lines = list(read_text_lines(detect_encoding(path, **options)[0], row_errors))
    return lines, [str(bad_row).removeprefix(f"{path}:") for bad_row in row_errors.first]


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress), ("a.txt.bz2", bz2.compress)],
)
def test_compressed_files(tmp_path: Path, name: str, compress: Any) -> None:
    assert read_lines(write_file(tmp_path / name, compress(b"one\r\ntwo\n\nfour")))[0] == [
        (1, "one"),
        (2, "two"),
        (3, ""),
        (4, "four"),
    ]


def test_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "w") as archive:
        archive.writestr("a.txt", "one\ntwo")
    assert read_lines(tmp_path / "a.txt.zip")[0] == [(1, "one"), (2, "two")]
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("b.txt", "one")
    with pytest.raises(HeedfulError, match=r"b\.zip: holds 2 files, expected one: unpack it and give the folder"):
        detect_encoding(tmp_path / "b.zip")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zip"])
def test_a_decompression_bomb_is_refused(tmp_path: Path, suffix: str) -> None:
    data, path = b"a" * 12_000_000, tmp_path / f"a.txt{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", data)
    else:
        path.write_bytes(COMPRESS[suffix](data))
    with pytest.raises(HeedfulError, match="unpacks to more than 100 times its size"):
        for _ in all_lines(detect_encoding(path)[0]):
            pass


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zip"])
def test_damaged(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(HeedfulError, match=r"cannot be unpacked"):
        detect_encoding(write_file(tmp_path / f"a.txt{suffix}", b"no such thing"))
    if suffix != ".zip":
        data = COMPRESS[suffix](b"some lines\n" * 100)
        with pytest.raises(HeedfulError, match=r"cannot be unpacked after \d+ bytes"):
            read_lines(write_file(tmp_path / f"b.txt{suffix}", data[:-9]))


@pytest.mark.parametrize("suffix", [".xls", ".XLSX", ".ods"])
def test_workbooks_are_refused(tmp_path: Path, suffix: str) -> None:
    path = write_file(tmp_path / f"a{suffix}", b"PK\x03\x04")
    for settings in (DataSettings(), DataSettings(format="csv")):
        with pytest.raises(HeedfulError, match=r"is a workbook: save the sheet as CSV$"):
            read(path, None, settings)


@pytest.mark.parametrize("name", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_byte_order_marks(tmp_path: Path, name: str) -> None:
    mark = "\ufeff" if name in ("utf-16-le", "utf-16-be") else ""
    file, note = detect_encoding(write_file(tmp_path / "a.txt", f"{mark}öne\r\ntwo 😀\n".encode(name)))
    assert list(read_text_lines(file, RowErrors(Raise()))) == [(1, "öne"), (2, "two 😀")]
    assert note == [f"a.txt: begins with a byte order mark, which is left out; read as {file.encoding}"]


def test_encodings(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.txt", "café\nb\n".encode("latin-1"))
    assert read_lines(path, encoding="cp1252") == ([(1, "café"), (2, "b")], [])
    assert read_lines(path) == (
        [(2, "b")],
        [
            "1:4: byte 0xe9 is not valid utf-8: invalid continuation byte; if the file is Latin-1 or Windows-1252, "
            "say --data.encoding=cp1252, or iconv -f cp1252 -t utf-8"
        ],
    )
    with pytest.raises(HeedfulError, match=r'encoding "klingon" is not known; say utf-8, cp1252'):
        detect_encoding(path, encoding="klingon")
    with pytest.raises(HeedfulError, match="is not known"):
        detect_encoding(path, encoding="base64")
    with pytest.raises(HeedfulError, match="begins with the byte order mark of utf-8, but encoding cp1252 was given"):
        detect_encoding(write_file(path, b"\xef\xbb\xbfa"), encoding="cp1252")
    with pytest.raises(HeedfulError, match=r"every few bytes are zero: .* --data\.encoding=utf-16-le"):
        detect_encoding(write_file(path, "some text".encode("utf-16-le")))
    assert read_lines(path, encoding="utf-16-le") == ([(1, "some text")], [])
    with pytest.raises(HeedfulError, match=r"a\.txt:2: is not valid utf-16-le: truncated data"):
        read_lines(write_file(path, b"\xff\xfe" + "a\nb".encode("utf-16-le") + b"x"))


def test_surrogates_in_utf_8_are_bad_bytes(tmp_path: Path) -> None:
    _, errors = read_lines(write_file(tmp_path / "a.txt", b"ok\nhalf \xed\xa0\xbd\n"))
    assert errors[0].startswith("2:6: byte 0xed is not valid utf-8")


def test_unusable_lines(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.txt", b"one\na\0b\n" + b"x" * 40 + b"\n" + b"y" * 20 + b"\nlast")
    lines, errors = read_lines(path, max_row_bytes=20)
    assert lines == [(1, "one"), (4, "y" * 20), (5, "last")]
    assert errors == [
        "2:2: holds a NUL character: the file is damaged or no text",
        "3: is longer than 20 bytes, the most that a row may have",
    ]
    data = ("one\n" + "x" * 40 + "\nend\0\n" + "y" * 20 + "\n").encode("utf-16")
    lines, errors = read_lines(write_file(tmp_path / "b.txt", data), max_row_bytes=20)
    assert (lines, len(errors)) == ([(1, "one"), (4, "y" * 20)], 2)


def test_no_file(tmp_path: Path) -> None:
    for path, reason in [
        (tmp_path / "none", "there is no such file"),
        (tmp_path, "is not a file"),
        (write_file(tmp_path / "a", b""), "is empty"),
        (write_file(tmp_path / "b", b"one\rtwo\r"), "its lines end with a carriage return alone"),
    ]:
        with pytest.raises(HeedfulError, match=reason):
            detect_encoding(path)


# ---------------------------------------------------------------------------------------------------- JSON


def list_elements(path: Path, max_row_bytes: int = 1000) -> list[Any]:
    """The elements of the JSON list in a file, each with its line number."""
    with open_json(detect_encoding(path, max_row_bytes=max_row_bytes)[0]) as text:
        result = []
        for _ in text.elements():
            text.peek()
            result.append((text.line, text.value()))
        return result


def test_json_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1, 1234567, 1.5e10, 'a\n"b" ü 😀', {"x": [None, True, {"y": ""}]}, [], "z" * 300, -0.5]
    path = write_file(tmp_path / "a.json", json.dumps(values, indent=1, ensure_ascii=False).encode())
    for chunk in (1, 3, 7, 1 << 16):
        monkeypatch.setattr("heedful.data.formats.text_files.CHUNK_BYTES", chunk)
        assert [value for _, value in list_elements(path)] == values
    assert [line for line, _ in list_elements(path)][:4] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[1, 2", "1:6: is not valid JSON: expected ,, the file ends"),
        (b"[1,\n 2 3]", '2:4: is not valid JSON: expected ,, found "3"'),
        (b'[1,\n "ab', "2:2: is not valid JSON: Unterminated string starting at"),
        (b"[" * 10, "1:11: is not valid JSON: Expecting value, the file ends"),
        (b"{}", r'1:1: is not valid JSON: expected \[, found "{"'),
        (b'["' + b"x" * 2000 + b'"]', "a value is longer than 1,000 characters"),
        (b'[1, "\xff"]', "1: a byte after this line is not valid utf-8"),
        (b"[" + b"[" * 900_000, "is not valid JSON"),
    ],
)
def test_json_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr("heedful.data.formats.text_files.CHUNK_BYTES", 100)
    with pytest.raises(HeedfulError, match=message):
        list_elements(write_file(tmp_path / "a.json", data))
