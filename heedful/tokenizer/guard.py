"""The one way into the `tokenizers` library: whatever goes wrong inside comes out as a HeedfulError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from heedful.errors import HeedfulError


@contextmanager
def guarded(doing: str, remedy: str) -> Iterator[None]:
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
        raise HeedfulError(f"{doing}: {reason[:500]}; {remedy}") from error
