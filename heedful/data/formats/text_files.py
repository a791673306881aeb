"""Text files as streams of lines: decompressed with a limit on the ratio, and decoded."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, BinaryIO, NoReturn

from heedful.data.bad_rows import BadRow, RowErrors, shown
from heedful.errors import DataError, HeedfulError

MAX_ROW_BYTES = 10_000_000  # default limit of bytes in one row
MOST_RATIO = 100  # decompressed bytes per compressed byte, at most
FREE = 10_000_000  # decompressed bytes that are always allowed
COMPRESSED = (".gz", ".xz", ".bz2", ".zip")
WORKBOOKS = (".xls", ".xlsx", ".ods")
CHUNK = 1 << 16
MARKS = (  # byte order marks, longest first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class NoRowsError(HeedfulError):
    """The file has no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file with its encoding."""

    path: Path
    encoding: str
    mark: int  # bytes of the byte order mark; 0: it has none
    longest: int = MAX_ROW_BYTES

    @property
    def display_name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def wide(self) -> bool:
        """Whether a line end has more than one byte (UTF-16, UTF-32)."""
        return self.encoding.startswith(("utf-16", "utf-32"))


def detect_encoding(
    path: Path, *, encoding: str | None = None, longest: int = MAX_ROW_BYTES
) -> tuple[TextFile, list[str]]:
    """Find a file's encoding: its byte order mark, the given encoding, else UTF-8.

    Returns:
        The file, and notes for the user.

    Raises:
        NoRowsError: If the file is empty.
        DataError: If it is missing, a workbook, or its bytes do not fit the encoding.
    """
    check_file(path)
    if path.suffix.lower() in WORKBOOKS:
        raise DataError(f"{path}: is a workbook: save the sheet as CSV")
    codec = None
    if encoding is not None:
        try:
            codec = codecs.lookup(encoding).name.removesuffix("-sig")
            "".encode(codec)  # some codecs do not encode text
        except LookupError:
            raise DataError(f"encoding {shown(encoding)} is not known; say utf-8, cp1252, latin-1, …") from None
    with _unpacked(path) as stream:
        head = stream.read(CHUNK)
    if not head:
        raise NoRowsError(f"{path}: is empty")
    notes = []
    mark, name = next(((mark, name) for mark, name in MARKS if head.startswith(mark)), (b"", codec or "utf-8"))
    if mark:
        if codec is not None and not name.startswith(codec):
            raise DataError(f"{path}: begins with the byte order mark of {name}, but encoding {codec} was given")
        notes = [f"{path.name}: begins with a byte order mark, which is left out; read as {name}"]
    if not mark and codec in ("utf-16", "utf-32"):
        raise DataError(f"{path}: has no byte order mark: say --data.encoding={codec}-le (or -be)")
    file = TextFile(path=path, encoding=name, mark=len(mark), longest=longest)
    if not mark and codec is None and head.count(0) > len(head) // 5:
        raise DataError(
            f"{path}: every few bytes are zero: if this is UTF-16, "
            "say --data.encoding=utf-16-le (or -be), or iconv -f utf-16le -t utf-8"
        )
    if not file.wide and b"\r" in head and b"\n" not in head:
        raise DataError(f"{path}: its lines end with a carriage return alone: convert it, tr '\\r' '\\n' <in >out")
    return file, notes


def check_file(path: Path) -> None:
    """Raise DataError unless the path is a readable regular file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        raise DataError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not S_ISREG(mode):
        raise DataError(f"{path}: is not a file")


# ---------------------------------------------------------------------------------------------------- bytes


ByteStream = IO[bytes] | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File


class _Capped(io.RawIOBase):
    """Decompressed bytes of a file; raises if the file is damaged or the ratio is too large."""

    def __init__(self, path: Path, packed: BinaryIO, stream: ByteStream, size: int | None) -> None:
        self._path, self._packed, self._stream, self._size = path, packed, stream, size
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
            raise DataError(f"{self._path}: cannot be unpacked after {self._unpacked:,} bytes: {error}") from None
        buffer[: len(data)] = data
        self._unpacked += len(data)
        used = self._packed.tell() if self._size is None else self._size
        if self._unpacked > FREE and self._unpacked > MOST_RATIO * used:
            raise DataError(
                f"{self._path}: unpacks to more than {MOST_RATIO} times its size, which text seldom does: "
                "if you trust it, unpack it and give the result"
            )
        return len(data)


@contextmanager
def _unpacked(path: Path) -> Iterator[io.BufferedReader]:
    with ExitStack() as stack:
        try:
            packed = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        size = None
        stream: ByteStream
        match path.suffix:
            case ".gz":
                stream = stack.enter_context(gzip.GzipFile(fileobj=packed))
            case ".xz":
                stream = stack.enter_context(lzma.LZMAFile(packed))
            case ".bz2":
                stream = stack.enter_context(bz2.BZ2File(packed))
            case ".zip":
                stream, size = _only_member(path, packed, stack)
            case _:
                yield packed
                return
        yield io.BufferedReader(_Capped(path, packed, stream, size), CHUNK)


def _only_member(path: Path, packed: BinaryIO, stack: ExitStack) -> tuple[IO[bytes], int]:
    try:
        archive = stack.enter_context(zipfile.ZipFile(packed))
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise DataError(f"{path}: holds {len(members)} files, expected one: unpack it and give the folder")
        return stack.enter_context(archive.open(members[0])), members[0].compress_size
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None


# ---------------------------------------------------------------------------------------------------- lines

Line = tuple[int, str, BadRow | None]  # number from 1, text with its line end, error


def all_lines(file: TextFile) -> Iterator[Line]:
    """Yield all lines, unusable ones with their error: with a NUL, undecodable, or too long (then without text)."""
    with _unpacked(file.path) as stream:
        stream.read(file.mark)
        if file.wide:
            yield from _wide_lines(file, stream)
            return
        number = 0
        while data := stream.readline(file.longest + 1):
            number += 1
            if len(data) > file.longest and not data.endswith(b"\n"):
                while (rest := stream.readline(CHUNK)) and not rest.endswith(b"\n"):
                    pass
                yield number, "", _too_long(file, number, data[:200].decode(file.encoding, "replace"))
                continue
            try:
                text = data.decode(file.encoding)
            except UnicodeDecodeError as error:
                yield number, data.decode(file.encoding, "replace"), _undecodable(file, number, data, error)
                continue
            yield number, text, _zero(file, number, text) if "\0" in text else None


def _wide_lines(file: TextFile, stream: io.BufferedReader) -> Iterator[Line]:
    number = 0
    with io.TextIOWrapper(stream, encoding=file.encoding, newline="\n") as wide:
        try:
            while text := wide.readline(file.longest + 1):
                number += 1
                if len(text) > file.longest and not text.endswith("\n"):
                    while (rest := wide.readline(CHUNK)) and not rest.endswith("\n"):
                        pass
                    yield number, "", _too_long(file, number, text)
                else:
                    yield number, text, _zero(file, number, text) if "\0" in text else None
        except UnicodeDecodeError as error:
            raise DataError(f"{file.display_name}:{number + 1}: is no longer {file.encoding}: {error.reason}") from None


def read_text_lines(file: TextFile, row_errors: RowErrors) -> Iterator[tuple[int, str]]:
    """Yield the usable lines with their numbers, without line ends; report the others as bad rows."""
    for number, text, bad in all_lines(file):
        if bad is None:
            yield number, text.rstrip("\r\n")
        else:
            row_errors.reject(bad)


def _too_long(file: TextFile, number: int, text: str) -> BadRow:
    reason = f"is longer than {file.longest:,} bytes, the most that a row may have"
    return BadRow(file=file.display_name, line=number, column="", reason=reason, text=text[:200])


def _zero(file: TextFile, number: int, text: str) -> BadRow:
    reason = "holds a NUL character: the file is damaged or no text"
    return BadRow(file=file.display_name, line=number, column=str(text.index("\0") + 1), reason=reason, text=text[:200])


def _undecodable(file: TextFile, number: int, data: bytes, error: UnicodeDecodeError) -> BadRow:
    column = len(data[: error.start].decode(file.encoding, "replace")) + 1
    reason = f"byte 0x{data[error.start]:02x} is no {file.encoding}: {error.reason}"
    if file.encoding == "utf-8":
        reason += "; if the file is Latin-1 or Windows-1252, say --data.encoding=cp1252, or iconv -f cp1252 -t utf-8"
    text = data[:400].decode(file.encoding, "replace")[:200]
    return BadRow(file=file.display_name, line=number, column=str(column), reason=reason, text=text)


# ---------------------------------------------------------------------------------------------------- JSON


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object; raise ValueError for a repeated key, since one of its values would be lost."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f'an object has the key "{twice[:80]}" twice')
    return members


class JsonStream:
    """Streaming reader of a JSON file: `keys` and `elements` iterate over a container, `value` reads the next value."""

    def __init__(self, file: TextFile, stream: io.BufferedReader) -> None:
        self.file = file
        self._stream = stream
        self._decode = codecs.getincrementaldecoder(file.encoding)()
        self._text, self._at, self._ended = "", 0, False
        self._line, self._counted = 1, 0  # line number of a position in the buffer, and that position
        self._before = 0  # characters of the first line before the buffer
        self._parse = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode

    @property
    def line(self) -> int:
        """Line of the next value, from 1."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def peek(self) -> str:
        """Return the next character that is not white space, '' at the end, without consuming it."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_more()

    def keys(self) -> Iterator[str]:
        """Yield the keys of the next object; the caller must read each value."""
        for _ in self._members("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                self._fail("expected a key in quotes")
            self._take(":")
            yield key

    def elements(self) -> Iterator[int]:
        """Yield the indices of the next list's elements; the caller must read each element."""
        yield from self._members("[", "]")

    def end(self) -> None:
        """Raise DataError unless the file ends here."""
        if self.peek():
            self._fail("expected the end of the file")

    def value(self) -> object:
        """Read the next value completely."""
        self.peek()
        while True:
            try:
                value, end = self._parse(self._text, self._at)
                number = isinstance(value, int | float) and self._text[end : end + 1] not in " \t\r\n,]}"
                if self._ended or end + 3 * number < len(self._text):  # "1.5" or "1e+5" may be cut anywhere
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                inside = error.pos < len(self._text) - 16 and not error.msg.startswith("Unterminated")
                if self._ended or inside:
                    self._at = error.pos
                    self._fail(error.msg)
            except (RecursionError, ValueError) as error:
                self._fail(str(error))
            if len(self._text) - self._at > self.file.longest:
                self._fail(f"a value is longer than {self.file.longest:,} characters, the most that is read")
            self._read_more()

    def _members(self, first: str, last: str) -> Iterator[int]:
        self._take(first)
        number = 0
        while self.peek() != last:
            if number:
                self._take(",")
            yield number
            number += 1
        self._take(last)

    def _take(self, mark: str) -> None:
        if self.peek() != mark:
            self._fail(f"expected {mark}")
        self._at += 1

    def _read_more(self) -> None:
        line = self.line
        newline = self._text.rfind("\n", 0, self._at)
        self._before = self._at - newline - 1 + (self._before if newline < 0 else 0)
        rest = self._text[self._at :]
        data = self._stream.read(max(CHUNK, len(rest)))
        try:
            more = self._decode.decode(data, not data)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.file.display_name}:{line}: a byte after this line is no {self.file.encoding}: {error.reason}"
            ) from None
        self._text, self._at, self._counted, self._ended = rest + more, 0, 0, not data

    def _fail(self, reason: str) -> NoReturn:
        newline = self._text.rfind("\n", 0, self._at)
        column = self._at - newline + (self._before if newline < 0 else 0)
        what = f"found {shown(self._text[self._at])}" if self._at < len(self._text) else "the file ends"
        raise DataError(f"{self.file.display_name}:{self.line}:{column}: is not valid JSON: {reason}, {what}")


@contextmanager
def open_json(file: TextFile) -> Iterator[JsonStream]:
    """Open a JSON file for streaming."""
    with _unpacked(file.path) as stream:
        stream.read(file.mark)
        yield JsonStream(file, stream)


def read_head(file: TextFile) -> str:
    """Decode the first 64 kB of a file."""
    with _unpacked(file.path) as stream:
        stream.read(file.mark)
        return codecs.getincrementaldecoder(file.encoding)("replace").decode(stream.read(CHUNK))
