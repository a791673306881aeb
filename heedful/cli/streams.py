"""Standard streams of the command: `open_streams` handles closed ones, and `Stdout` a full disk."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from heedful.errors import HeedfulError

RAISING_HANDLERS = ("strict", "surrogateescape")  # error handlers that raise for characters that cannot be encoded


class Stdout(TextIOWrapper):
    """Stdout that raises a HeedfulError if it cannot be written, or a BrokenPipeError if its reader has closed it."""

    def write(self, text: str, /) -> int:
        """Write a text.

        Raises:
            HeedfulError: If stdout cannot be written.
        """
        if text == "":  # click writes it to find the type of a stream, and would hide the error of a full device
            return 0
        try:
            return super().write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Flush the buffer.

        Raises:
            HeedfulError: If stdout cannot be written.
        """
        try:
            super().flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        """Raise a BrokenPipeError unchanged, and a HeedfulError for any other error of writing."""
        if isinstance(error, BrokenPipeError):
            raise error
        drop_stdout()
        raise HeedfulError(
            f"standard output cannot be written: {error.strerror or error}: send it to a file or a pipe that has room"
        ) from None


def open_streams() -> None:
    """Prepare the standard streams.

    A closed stdin or stderr is replaced by the null device. Stdout escapes characters that it cannot encode.

    Raises:
        HeedfulError: If stdout is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # stays open until the process ends
    if sys.stderr is None:  # with None as its file, print() would write notes to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    stdout = sys.stdout
    if stdout is None:
        raise HeedfulError("standard output is closed: leave it open, or send it to a file or to /dev/null")
    if not isinstance(stdout, TextIOWrapper):
        return
    if stdout.errors in RAISING_HANDLERS:
        stdout.reconfigure(errors="backslashreplace")
    if stdout is sys.__stdout__ and not isinstance(stdout, Stdout):
        sys.stdout = Stdout(
            stdout.buffer,
            encoding=stdout.encoding,
            errors=stdout.errors,
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )


def drop_stdout() -> None:
    """Discard the rest of stdout's buffer, so that the interpreter does not fail when it flushes stdout at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
