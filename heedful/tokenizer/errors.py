"""The one way into the `tokenizers` library: whatever goes wrong inside comes out as a HeedfulError."""

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
def translate_errors(doing: str, remedy: str) -> Iterator[None]:
    """Turn the library's exceptions and its PanicException (a BaseException) into a HeedfulError.

    KeyboardInterrupt, SystemExit and MemoryError pass through.
    """
    try:
        yield
    except (HeedfulError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"{doing}: {reason[:500]}; {remedy}") from error


_redirecting = threading.Lock()


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Context that keeps the library's message about a panic off standard error; for calls that read a file.

    The library writes to descriptor 2, which is redirected for all threads meanwhile. Output of others is passed on, up
    to a panic.
    """
    with _redirecting, ExitStack() as stack:
        with suppress(OSError):  # without standard error, or room for a file, nothing is redirected
            output = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore, os.dup(2), output)
            os.dup2(output.fileno(), 2)
        yield


def _restore(original: int, output: BinaryIO) -> None:
    os.dup2(original, 2)
    with suppress(OSError), open(original, "wb", buffering=0) as file:
        output.seek(0)
        file.write(re.split(rb"\n?thread '[^\n]*' [^\n]*panicked at ", output.read(), maxsplit=1)[0])
