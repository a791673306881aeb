"""Text files as streams of lines and of JSON values: detection of the encoding, safe decompression, decoding.

Every reader of text goes through this module, which guards against decompression bombs and huge rows.
"""

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

MAX_ROW_BYTES = 10_000_000  # default maximum bytes in a row
MAX_COMPRESSION_RATIO = 100  # maximum decompressed bytes per compressed byte
UNCHECKED_BYTES = 10_000_000  # decompressed bytes up to which the ratio is not checked
COMPRESSED = (".gz", ".xz", ".bz2", ".zip")  # suffixes of compressed files
WORKBOOKS = (".xls", ".xlsx", ".ods")  # suffixes of spreadsheets, which are refused
CHUNK_BYTES = 1 << 16  # bytes per read
BYTE_ORDER_MARKS = (  # UTF-32 first, since its mark begins with the mark of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class NoRowsError(HeedfulError):
    """Raised for a file without rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A text file, its encoding, and the limit on its rows."""

    path: Path
    encoding: str
    bom_bytes: int  # bytes of the byte order mark; 0: no mark
    max_row_bytes: int = MAX_ROW_BYTES

    @property
    def display_name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def is_wide(self) -> bool:
        """Whether a line end has more than one byte (UTF-16, UTF-32)."""
        return self.encoding.startswith(("utf-16", "utf-32"))


def detect_encoding(
    path: Path, *, encoding: str | None = None, max_row_bytes: int = MAX_ROW_BYTES
) -> tuple[TextFile, list[str]]:
    """Detect the encoding of a file, by its byte order mark, else `encoding`, else UTF-8.

    Args:
        path: the file.
        encoding: name of a Python codec, or None.
        max_row_bytes: maximum bytes in a row.

    Returns:
        The file with its encoding, and notes for the user.

    Raises:
        NoRowsError: If the file is empty.
        DataError: If the file is missing or a workbook, or if its bytes do not fit the encoding.
    """
    check_file(path)
    if path.suffix.lower() in WORKBOOKS:
        raise DataError(f"{path}: is a workbook: save the sheet as CSV")
    codec = None if encoding is None else _codec_name(encoding)
    with _open_bytes(path) as stream:
        head = stream.read(CHUNK_BYTES)
    if not head:
        raise NoRowsError(f"{path}: is empty")
    notes = []
    mark = b""
    name = codec or "utf-8"
    for known_mark, encoding_of_mark in BYTE_ORDER_MARKS:
        if head.startswith(known_mark):
            mark, name = known_mark, encoding_of_mark
            break
    if mark:
        if codec is not None and not name.startswith(codec):
            raise DataError(f"{path}: begins with the byte order mark of {name}, but encoding {codec} was given")
        notes = [f"{path.name}: begins with a byte order mark, which is left out; read as {name}"]
    if not mark and codec in ("utf-16", "utf-32"):
        raise DataError(f"{path}: has no byte order mark: say --data.encoding={codec}-le (or -be)")
    file = TextFile(path=path, encoding=name, bom_bytes=len(mark), max_row_bytes=max_row_bytes)
    if not mark and codec is None and head.count(0) > len(head) // 5:
        raise DataError(
            f"{path}: every few bytes are zero: if this is UTF-16, "
            "say --data.encoding=utf-16-le (or -be), or iconv -f utf-16le -t utf-8"
        )
    if not file.is_wide and b"\r" in head and b"\n" not in head:
        raise DataError(f"{path}: its lines end with a carriage return alone: convert it, tr '\\r' '\\n' <in >out")
    return file, notes


def _codec_name(encoding: str) -> str:
    """Return the name of an encoding's codec; raise DataError if it is unknown or does not encode text."""
    try:
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        "".encode(name)  # codecs such as base64 do not encode text
    except LookupError:
        raise DataError(f"encoding {shown(encoding)} is not known; say utf-8, cp1252, latin-1, …") from None
    return name


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


class _LimitedStream(io.RawIOBase):
    """Decompressed bytes of a file. Reading raises DataError if the file is damaged or unpacks to too many bytes.

    Args:
        path: the file, for messages.
        compressed: stream of the compressed bytes.
        stream: stream of the decompressed bytes.
        size: size of the compressed data in bytes. If None, the position in `compressed` is used.
    """

    def __init__(self, path: Path, compressed: BinaryIO, stream: ByteStream, size: int | None) -> None:
        self._path, self._compressed, self._stream, self._size = path, compressed, stream, size
        self._num_bytes = 0  # decompressed bytes so far

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
            raise DataError(f"{self._path}: cannot be unpacked after {self._num_bytes:,} bytes: {error}") from None
        buffer[: len(data)] = data
        self._num_bytes += len(data)
        compressed_bytes = self._compressed.tell() if self._size is None else self._size
        if self._num_bytes > UNCHECKED_BYTES and self._num_bytes > MAX_COMPRESSION_RATIO * compressed_bytes:
            raise DataError(
                f"{self._path}: unpacks to more than {MAX_COMPRESSION_RATIO} times its size, which text seldom does: "
                "if you trust it, unpack it and give the result"
            )
        return len(data)


@contextmanager
def _open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, which may be compressed, as a stream of decompressed bytes."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        size = None
        stream: ByteStream
        match path.suffix:
            case ".gz":
                stream = stack.enter_context(gzip.GzipFile(fileobj=file))
            case ".xz":
                stream = stack.enter_context(lzma.LZMAFile(file))
            case ".bz2":
                stream = stack.enter_context(bz2.BZ2File(file))
            case ".zip":
                stream, size = _only_member(path, file, stack)
            case _:
                yield file
                return
        yield io.BufferedReader(_LimitedStream(path, file, stream, size), CHUNK_BYTES)


def _only_member(path: Path, file: BinaryIO, stack: ExitStack) -> tuple[IO[bytes], int]:
    """Open the only file in a ZIP archive. Return the open file and its compressed size in bytes."""
    try:
        archive = stack.enter_context(zipfile.ZipFile(file))
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise DataError(f"{path}: holds {len(members)} files, expected one: unpack it and give the folder")
        return stack.enter_context(archive.open(members[0])), members[0].compress_size
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None


# ---------------------------------------------------------------------------------------------------- lines

Line = tuple[int, str, BadRow | None]  # (line number from 1, text with its line end, bad row if it is unusable)


def all_lines(file: TextFile) -> Iterator[Line]:
    """Yield all lines of a file. A line that has a NUL, is undecodable or is too long comes with a bad row.

    The text of a line that is too long is "".
    """
    with _open_bytes(file.path) as stream:
        stream.read(file.bom_bytes)
        if file.is_wide:
            yield from _wide_lines(file, stream)
            return
        number = 0
        while data := stream.readline(file.max_row_bytes + 1):
            number += 1
            if len(data) > file.max_row_bytes and not data.endswith(b"\n"):
                while (rest := stream.readline(CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, "", _too_long_row(file, number, data[:200].decode(file.encoding, "replace"))
                continue
            try:
                text = data.decode(file.encoding)
            except UnicodeDecodeError as error:
                yield number, data.decode(file.encoding, "replace"), _undecodable_row(file, number, data, error)
                continue
            yield number, text, _nul_row(file, number, text) if "\0" in text else None


def _wide_lines(file: TextFile, stream: io.BufferedReader) -> Iterator[Line]:
    """Yield all lines of UTF-16 or UTF-32. An undecodable byte raises DataError, since line ends are then unknown."""
    number = 0
    with io.TextIOWrapper(stream, encoding=file.encoding, newline="\n") as wide:
        try:
            while text := wide.readline(file.max_row_bytes + 1):
                number += 1
                if len(text) > file.max_row_bytes and not text.endswith("\n"):
                    while (rest := wide.readline(CHUNK_BYTES)) and not rest.endswith("\n"):
                        pass
                    yield number, "", _too_long_row(file, number, text)
                else:
                    yield number, text, _nul_row(file, number, text) if "\0" in text else None
        except UnicodeDecodeError as error:
            raise DataError(f"{file.display_name}:{number + 1}: is not valid {file.encoding}: {error.reason}") from None


def read_text_lines(file: TextFile, row_errors: RowErrors) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without line end) for each usable line. Reject other lines as bad rows."""
    for number, text, bad in all_lines(file):
        if bad is None:
            yield number, text.rstrip("\r\n")
        else:
            row_errors.reject(bad)


def _too_long_row(file: TextFile, number: int, text: str) -> BadRow:
    reason = f"is longer than {file.max_row_bytes:,} bytes, the most that a row may have"
    return BadRow(file=file.display_name, line=number, column="", reason=reason, text=text[:200])


def _nul_row(file: TextFile, number: int, text: str) -> BadRow:
    reason = "holds a NUL character: the file is damaged or no text"
    return BadRow(file=file.display_name, line=number, column=str(text.index("\0") + 1), reason=reason, text=text[:200])


def _undecodable_row(file: TextFile, number: int, data: bytes, error: UnicodeDecodeError) -> BadRow:
    column = len(data[: error.start].decode(file.encoding, "replace")) + 1
    reason = f"byte 0x{data[error.start]:02x} is not valid {file.encoding}: {error.reason}"
    if file.encoding == "utf-8":
        reason += "; if the file is Latin-1 or Windows-1252, say --data.encoding=cp1252, or iconv -f cp1252 -t utf-8"
    text = data[:400].decode(file.encoding, "replace")[:200]
    return BadRow(file=file.display_name, line=number, column=str(column), reason=reason, text=text)


# ---------------------------------------------------------------------------------------------------- JSON


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build the dict of a JSON object. A repeated key raises ValueError, since one of its values would be lost."""
    members = dict(pairs)
    if len(members) < len(pairs):
        repeated = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f'an object has the key "{repeated[:80]}" twice')
    return members


class JsonStream:
    """Streaming reader of a JSON file: `keys` and `elements` iterate over a container, `value` reads the next value."""

    def __init__(self, file: TextFile, stream: io.BufferedReader) -> None:
        self.file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(file.encoding)()
        self._text = ""  # buffer of decoded characters
        self._position = 0  # position of the next character in the buffer
        self._at_end = False  # whether the end of the buffer is the end of the file
        self._line = 1  # line number at `_line_position`
        self._line_position = 0  # position in the buffer up to which line ends were counted
        self._column_offset = 0  # characters of the buffer's first line that precede the buffer
        self._parse = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode

    @property
    def line(self) -> int:
        """The line of the next value, from 1."""
        self._line += self._text.count("\n", self._line_position, self._position)
        self._line_position = self._position
        return self._line

    def peek(self) -> str:
        """Return the next character that is not white space, without consuming it, or "" at the end of the file."""
        while True:
            while self._position < len(self._text) and self._text[self._position] in " \t\r\n":
                self._position += 1
            if self._position < len(self._text):
                return self._text[self._position]
            if self._at_end:
                return ""
            self._read_more()

    def keys(self) -> Iterator[str]:
        """Yield the keys of the next object. The caller must read the value of each key before the next key."""
        for _ in self._members("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                self._fail("expected a key in quotes")
            self._expect(":")
            yield key

    def elements(self) -> Iterator[int]:
        """Yield the indices of the elements of the next list. The caller must read each element before the next one."""
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
                value, end = self._parse(self._text, self._position)
                # a number such as "1e+5" may be cut after "1"; a delimiter or 3 more characters show that it is whole
                may_be_cut = isinstance(value, int | float) and self._text[end : end + 1] not in " \t\r\n,]}"
                if self._at_end or end + (3 if may_be_cut else 0) < len(self._text):
                    self._position = end
                    return value
            except json.JSONDecodeError as error:
                # an error near the end of the buffer may be due to a value that is cut there
                is_certain = error.pos < len(self._text) - 16 and not error.msg.startswith("Unterminated")
                if self._at_end or is_certain:
                    self._position = error.pos
                    self._fail(error.msg)
            except (RecursionError, ValueError) as error:
                self._fail(str(error))
            if len(self._text) - self._position > self.file.max_row_bytes:
                self._fail(f"a value is longer than {self.file.max_row_bytes:,} characters, the most that is read")
            self._read_more()

    def _members(self, opening: str, closing: str) -> Iterator[int]:
        """Yield the indices of the members of a container between two brackets."""
        self._expect(opening)
        index = 0
        while self.peek() != closing:
            if index:
                self._expect(",")
            yield index
            index += 1
        self._expect(closing)

    def _expect(self, mark: str) -> None:
        """Consume the next character, or raise DataError if it is not `mark`."""
        if self.peek() != mark:
            self._fail(f"expected {mark}")
        self._position += 1

    def _read_more(self) -> None:
        """Remove the consumed characters from the buffer, and append at least a chunk, or as much as the rest."""
        line = self.line
        newline = self._text.rfind("\n", 0, self._position)
        self._column_offset = self._position - newline - 1 + (self._column_offset if newline < 0 else 0)
        rest = self._text[self._position :]
        data = self._stream.read(max(CHUNK_BYTES, len(rest)))
        try:
            more = self._decoder.decode(data, not data)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.file.display_name}:{line}: a byte after this line is not valid {self.file.encoding}: "
                f"{error.reason}"
            ) from None
        self._text = rest + more
        self._position = self._line_position = 0
        self._at_end = not data

    def _fail(self, reason: str) -> NoReturn:
        """Raise DataError with the position of the next character."""
        newline = self._text.rfind("\n", 0, self._position)
        column = self._position - newline + (self._column_offset if newline < 0 else 0)
        at_end = self._position >= len(self._text)
        next_character = "the file ends" if at_end else f"found {shown(self._text[self._position])}"
        raise DataError(f"{self.file.display_name}:{self.line}:{column}: is not valid JSON: {reason}, {next_character}")


@contextmanager
def open_json(file: TextFile) -> Iterator[JsonStream]:
    """Open a JSON file for streaming."""
    with _open_bytes(file.path) as stream:
        stream.read(file.bom_bytes)
        yield JsonStream(file, stream)


def read_head(file: TextFile) -> str:
    """Decode the first 64 KiB of a file. Undecodable bytes become U+FFFD."""
    with _open_bytes(file.path) as stream:
        stream.read(file.bom_bytes)
        return codecs.getincrementaldecoder(file.encoding)("replace").decode(stream.read(CHUNK_BYTES))
