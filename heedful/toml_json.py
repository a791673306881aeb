"""Plain data from and to TOML and JSON; messages about other data quote a little of it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias

from heedful.errors import HeedfulError

if TYPE_CHECKING:
    Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
else:
    Json = object  # a type checker of run time refuses a recursive alias

DEEPEST = 100  # tables or lists inside one another, and parts of a dotted key
LONGEST_ECHO = 80  # characters of what was given that a message repeats


# ---------------------------------------------------------------------------------------------------- reading

_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*",
    re.DOTALL,
)


def parse(text: str, language: Literal["TOML", "JSON"], source: str) -> dict[str, Json]:
    """Parse a table; `source` is the origin of the text, for messages."""

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        table: dict[str, Json] = {}
        for key, value in pairs:
            if key in table:
                raise HeedfulError(f"{source}: the key {as_json(key)} is given twice in one table")
            table[key] = value
        return table

    _refuse_depth(text, source)
    try:
        value = tomllib.loads(text) if language == "TOML" else json.loads(text, object_pairs_hook=unique)
    except HeedfulError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeedfulError(f"{source}: is not {language}: {cut(str(error))}") from None
    to_plain_data(value, (), source)
    if not isinstance(value, dict):
        raise HeedfulError(f"{source}: the top level is {as_json(value)}, expected a table")
    return value


def _refuse_depth(text: str, source: str) -> None:
    """Refuse deep nesting and long dotted keys before a parser meets them (tomllib's memory grows with their square).

    >>> _refuse_depth("x = [" * 101, "x.toml")
    Traceback (most recent call last):
    heedful.errors.HeedfulError: x.toml: is nested more than 100 deep
    """
    bare = _TEXT.sub("_", text)
    steps = ((mark in "[{") - (mark in "]}") for mark in re.findall(r"[][{}]", bare))
    if max(accumulate(steps), default=0) > DEEPEST or any(
        run.count(".") > DEEPEST for run in re.findall(r"[\w\-. \t]+", bare)
    ):
        raise HeedfulError(f"{source}: is nested more than {DEEPEST} deep")


def to_plain_data(value: object, path: tuple[str | int, ...], source: str) -> Json:
    """Return the data as dict, list, text, finite numbers, true, false and None; anything else is refused."""
    if len(path) > DEEPEST:
        raise HeedfulError(f"{source}: is nested more than {DEEPEST} deep")
    match value:
        case Mapping():
            if strange := [key for key in value if not isinstance(key, str) or not _writable(key)]:
                raise HeedfulError(f"{source}: {format_path(path)} has the key {as_json(strange[0])}, expected text")
            return {key: to_plain_data(item, (*path, key), source) for key, item in value.items()}
        case list() | tuple():
            return [to_plain_data(item, (*path, number), source) for number, item in enumerate(value)]
        case str() if _writable(value):
            return value
        case float() if not math.isfinite(value):
            raise HeedfulError(f"{source}: {format_path(path)} is {value}, expected a finite number")
        case None | bool() | int() | float():
            return value
    raise HeedfulError(
        f"{source}: {format_path(path)} is {as_json(value)}, "
        "expected text, a number, true, false, a list or a table (put a date in quotes)"
    )


def _writable(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)  # half a surrogate pair is no character


# ---------------------------------------------------------------------------------------------------- writing


def toml_lines(mapping: Mapping[str, Json], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the table at a path; tables inside it come last."""
    for key, value in mapping.items():
        if not isinstance(value, dict):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield f"\n[{'.'.join(map(_key, (*path, key)))}]"
            yield from toml_lines(value, (*path, key))


def _value(value: Json) -> str:
    match value:
        case None:
            return '"none"'
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
        case float():
            return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # JSON's text, numbers, truth are TOML's


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


# ---------------------------------------------------------------------------------------------------- words


def format_path(path: Sequence[str | int]) -> str:
    """Return the dotted path of a value, such as "train.max_steps"."""
    return ".".join(cut(str(key)) for key in path) or "the top level"


def as_json(value: object) -> str:
    """Return a value as JSON, cut, for messages."""
    return cut(repr(value) if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Return at most LONGEST_ECHO characters, all of them printable."""
    text = text if len(text) <= LONGEST_ECHO else text[: LONGEST_ECHO - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
