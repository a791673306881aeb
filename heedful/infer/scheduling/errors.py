"""Errors of requests, with messages for the client."""

from __future__ import annotations

from heedful.errors import HeedfulError


class RequestRefusedError(Exception):  # a base of several
    """A request that is not answered; the message may be shown to whoever asked."""


class QueueFullError(RequestRefusedError):
    """Too much waits already; `retry` says in how many seconds less will."""

    def __init__(self, message: str, retry: float = 1.0) -> None:
        super().__init__(message)
        self.retry = retry


class UnavailableError(RequestRefusedError):
    """The model is loading, or the server is stopping."""


class DeadlineExceededError(RequestRefusedError):
    """The deadline passed; what had not been started never will be."""


class TooLongError(RequestRefusedError):
    """More tokens than one request may have."""


class InferenceFailedError(RequestRefusedError):
    """The model, or its tokenizer, failed on this request; `reason` is for the log alone."""

    def __init__(self, reason: str) -> None:
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
    frames, last = error.__traceback__, ""
    while frames is not None:  # where it was raised, without what was given
        last, frames = f"{frames.tb_frame.f_code.co_name}:{frames.tb_lineno}", frames.tb_next
    return InferenceFailedError(f"{type(error).__name__} in {last}")
