"""Standard streams of the command: closed ones, and what happens when stdout cannot be written."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from heedful.errors import HeedfulError

LOSSY = ("strict", "surrogateescape")  # error handlers with which a character that stdout cannot encode raises


class Stdout(TextIOWrapper):
    """Stdout whose write errors are HeedfulErrors; a reader that went away still raises BrokenPipeError."""

    def write(self, text: str, /) -> int:
        """Write, or say why stdout cannot be written."""
        if text == "":  # a probe for the kind of stream; on a full device it would fail, and be passed over
            return 0
        try:
            return super().write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Flush, or say why stdout cannot be written."""
        try:
            super().flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        if isinstance(error, BrokenPipeError):
            raise error
        drop_stdout()
        raise HeedfulError(
            f"standard output cannot be written: {error.strerror or error}: send it to a file or a pipe that has room"
        ) from None


def open_streams() -> None:
    """Refuse a closed stdout, replace a closed stdin or stderr, and let stdout escape what it cannot encode."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # open as long as the process runs
    if sys.stderr is None:  # print() would send notes to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    stdout = sys.stdout
    if stdout is None:
        raise HeedfulError("standard output is closed: leave it open, or send it to a file or to /dev/null")
    if not isinstance(stdout, TextIOWrapper):
        return
    if stdout.errors in LOSSY:
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
    """Send what is left in the buffer of stdout nowhere, so that the interpreter does not fail at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
