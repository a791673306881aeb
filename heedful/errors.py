"""What went wrong at the border, in the user's words."""


class HeedfulError(ValueError):
    """Something the user gave cannot be used: the message says what was given, what was expected and what to do."""


class InputError(HeedfulError):
    """One of several inputs cannot be used."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(f"input {number}: {reason}")
        self.reason, self.number = reason, number


class HeedfulWarning(UserWarning):
    """Something the user should know and may want to change; the result is still the one that was asked for."""


def did_you_mean(given: str, known: "list[str] | tuple[str, ...]") -> str:
    """' (did you mean "x"?)' when one of the known names is close to the given one, else ''."""
    from difflib import get_close_matches

    close = get_close_matches(given, known, n=1, cutoff=0.6)
    return f' (did you mean "{close[0]}"?)' if close else ""
