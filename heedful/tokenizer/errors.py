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
    """Keep what the library writes about a panic away from standard error; for calls that read a file.

    The library writes to descriptor 2 itself, which is exchanged meanwhile for all threads. What others wrote is
    passed on, up to a panic.
    """
    with _redirecting, ExitStack() as stack:
        with suppress(OSError):  # where there is no standard error or no room for a file, nothing is exchanged
            kept = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore, os.dup(2), kept)
            os.dup2(kept.fileno(), 2)
        yield


def _restore(original: int, kept: BinaryIO) -> None:
    os.dup2(original, 2)
    with suppress(OSError), open(original, "wb", buffering=0) as file:
        kept.seek(0)
        file.write(re.split(rb"\n?thread '[^\n]*' [^\n]*panicked at ", kept.read(), maxsplit=1)[0])
