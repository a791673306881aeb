"""Errors of requests, with messages that may be shown to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from heedful.errors import HeedfulError

T = TypeVar("T")


class RequestRefusedError(Exception):
    """Base class: a request is not answered. The message may be shown to the client."""


class QueueFullError(RequestRefusedError):
    """Too many requests, tokens or characters are waiting."""

    def __init__(self, message: str, retry: float = 1.0) -> None:
        """`retry` is the time in seconds after which the client should try again."""
        super().__init__(message)
        self.retry = retry


class UnavailableError(RequestRefusedError):
    """The model is loading, or the server is stopping."""


class DeadlineExceededError(RequestRefusedError):
    """The deadline of the request passed; its chunks that have not started are never run."""


class TooLongError(RequestRefusedError):
    """The request is larger than a limit: too many tokens, characters or inputs."""


class InferenceFailedError(RequestRefusedError):
    """The model or its tokenizer failed on this request."""

    def __init__(self, reason: str) -> None:
        """`reason` is written to the log; the client gets a general message."""
        super().__init__("the model failed on this input; other requests are not affected")
        self.reason = reason


def public_error(error: BaseException) -> Exception:
    """Return the error for the client: the error itself if the client can fix it, else an InferenceFailedError."""
    if isinstance(error, RequestRefusedError):
        return error
    if isinstance(error, HeedfulError):
        if error.__cause__ is None or isinstance(error.__cause__, HeedfulError):
            return error
        error = error.__cause__
    return InferenceFailedError(failure_reason(error))


def failure_reason(error: BaseException) -> str:
    """Return the type of an error and where it was raised, without its message, which may quote the client's text."""
    frame, location = error.__traceback__, ""
    while frame is not None:
        location, frame = f"{frame.tb_frame.f_code.co_name}:{frame.tb_lineno}", frame.tb_next
    return f"{type(error).__name__} in {location}"


def with_public_errors(function: Callable[[], T]) -> T:
    """Return function(); convert its errors by `public_error`."""
    try:
        return function()
    except BaseException as error:
        raise public_error(error) from None
