"""Errors and warnings for users: what is wrong, the value given, what to do."""

MAX_MESSAGE = 4_000  # characters of an error message, which may quote untrusted files and requests


class HeedfulError(ValueError):
    """A value from the user cannot be used; the message states the value, what was expected and what to do.

    A message of more than MAX_MESSAGE characters is cut in the middle.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2
            left_out = len(message) - 2 * half
            message = f"{message[:half]} [... {left_out} characters left out ...] {message[-half:]}"
        super().__init__(message)


class InputError(HeedfulError):
    """One of several inputs cannot be used."""

    def __init__(self, reason: str, index: int) -> None:
        super().__init__(f"input {index}: {reason}")
        self.reason, self.index = reason, index


class SettingError(HeedfulError):
    """A setting cannot be used.

    Args:
        message: What is wrong, the value given, what to do.
        path: Full path of the setting, such as "train.batch_size", or "" if the error is about several settings.
        source: Origin of the value: an argument, a flag, a file, a Python keyword.
        code: "invalid", "unknown", "ambiguous" (a short name of several settings), or "duplicate" (given twice).
        candidates: Full paths of the settings that the user may mean.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        source: str = "",
        code: str = "invalid",
        candidates: "tuple[str, ...]" = (),
    ) -> None:
        super().__init__(message)
        self.path, self.source, self.code, self.candidates = path, source, code, candidates


class DataError(HeedfulError):
    """A data file, a row, a column or a corpus cannot be used."""


class ModelError(HeedfulError):
    """A model folder, its configuration or its weights cannot be used, or not for this purpose."""


class TokenizerError(HeedfulError):
    """A tokenizer cannot be read, trained or used."""


class RunError(HeedfulError):
    """A run cannot begin, resume or write its results."""


class RequestError(HeedfulError):
    """A request to a server, or an input given to an engine, cannot be answered."""


class HeedfulWarning(UserWarning):
    """A fact that the user should know and may want to change; the result is still as requested."""


def quoted(value: object, max_chars: int = 80) -> str:
    """Return the repr of a value from an untrusted file, cut after `max_chars` characters.

    >>> quoted("a name"), quoted("x" * 1000, max_chars=5)
    ("'a name'", "'xxxx…")
    """
    text = repr(value[: max_chars + 1] if isinstance(value, str) else value)
    return text if len(text) <= max_chars + 2 else text[:max_chars] + "…"


def did_you_mean(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """Return ' (did you mean "x"?)' if one of the known names is similar to `name`, otherwise ''."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.6) if len(name) < 200 else []
    return f' (did you mean "{close[0]}"?)' if close else ""
