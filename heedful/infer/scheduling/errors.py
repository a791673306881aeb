"""Errors of requests, with messages for the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from heedful.errors import HeedfulError

T = TypeVar("T")


class RequestRefusedError(Exception):
    """Base of the errors of requests that are not answered; the message may be shown to the client."""


class QueueFullError(RequestRefusedError):
    """The queue is full."""

    def __init__(self, message: str, retry: float = 1.0) -> None:
        """`retry` is the number of seconds after which the client should try again."""
        super().__init__(message)
        self.retry = retry


class UnavailableError(RequestRefusedError):
    """The model is loading, or the server is stopping."""


class DeadlineExceededError(RequestRefusedError):
    """The deadline of the request passed; chunks that had not started are never run."""


class TooLongError(RequestRefusedError):
    """The request is larger than a limit: too many tokens, characters or inputs."""


class InferenceFailedError(RequestRefusedError):
    """The model or its tokenizer failed on this request."""

    def __init__(self, reason: str) -> None:
        """`reason` is for the log only; the client gets a general message."""
        super().__init__("the model failed on this input; other requests are not affected")
        self.reason = reason


def public_error(error: BaseException) -> Exception:
    """Return the error for the client: its own if the client can fix it, else an InferenceFailedError."""
    if isinstance(error, RequestRefusedError):
        return error
    if isinstance(error, HeedfulError):
        if error.__cause__ is None or isinstance(error.__cause__, HeedfulError):
            return error
        error = error.__cause__
    frame, location = error.__traceback__, ""
    while frame is not None:  # the message is left out: it may quote the client's text
        location, frame = f"{frame.tb_frame.f_code.co_name}:{frame.tb_lineno}", frame.tb_next
    return InferenceFailedError(f"{type(error).__name__} in {location}")


def with_public_errors(function: Callable[[], T]) -> T:
    """Return function(); an error becomes the one that the client may see."""
    try:
        return function()
    except BaseException as error:
        raise public_error(error) from None
