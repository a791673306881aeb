"""Context managers for calls of the `tokenizers` library: errors become HeedfulErrors, and panics print nothing."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO

from heedful.errors import HeedfulError, TokenizerError


@contextmanager
def translate_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn the library's exceptions and its PanicException (a BaseException) into a TokenizerError.

    KeyboardInterrupt, SystemExit, MemoryError and HeedfulErrors pass through.

    Args:
        problem: What is wrong, as a clause.
        remedy: What the user can do, as a clause.
    """
    try:
        yield
    except (HeedfulError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"{problem}: {reason[:500]}; {remedy}") from error


_stderr_lock = threading.Lock()


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Keep the library's message about a panic off standard error, in calls that may panic.

    The library writes to file descriptor 2, which is redirected to a temporary file for all threads. Afterwards, text
    that was written before a panic is passed on to standard error.
    """
    with _stderr_lock, ExitStack() as stack:
        with suppress(OSError):  # without standard error, or space for a file, nothing is redirected
            output = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore_stderr, os.dup(2), output)
            os.dup2(output.fileno(), 2)
        yield


def _restore_stderr(original: int, output: BinaryIO) -> None:
    """Restore standard error from a duplicate, and write the redirected text to it, up to a panic's message."""
    os.dup2(original, 2)
    with suppress(OSError), open(original, "wb", buffering=0) as file:
        output.seek(0)
        file.write(re.split(rb"\n?thread '[^\n]*' [^\n]*panicked at ", output.read(), maxsplit=1)[0])
