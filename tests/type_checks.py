"""Check the types of arguments and results when a function is called; an int is accepted as a float, as mypy does."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its types checked, or the function itself if its signature contains `Self`.

    Beartype can check `Self` only where it decorates the whole class; jaxtyping's import hook decorates each method.
    """
    try:
        checked: Callable[..., Any] = _check(function)
    except BeartypeDecorHintPep673Exception:
        return function
    return checked
