"""Read and write plain data as TOML and JSON, for `settings.py`; error messages quote the invalid values."""

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
    Json = object  # type checks at run time do not know recursive aliases

MAX_DEPTH = 100  # levels of nested tables and lists, and dots in a key
MAX_QUOTED_CHARS = 80  # characters of a value that a message quotes


# ---------------------------------------------------------------------------------------------------- reading

# strings and comments of TOML and JSON, in which brackets and dots mean nothing
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*",
    re.DOTALL,
)


def parse(text: str, language: Literal["TOML", "JSON"], source: str) -> dict[str, Json]:
    """Parse a text whose top level is a table; `source` is its origin, for messages.

    Raises:
        HeedfulError: If the text is invalid or nested too deeply, has duplicate keys, or holds other data than plain
            data with finite numbers.
    """

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        table: dict[str, Json] = {}
        for key, value in pairs:
            if key in table:
                raise HeedfulError(f"{source}: the key {as_json(key)} is given twice in one table")
            table[key] = value
        return table

    _check_depth(text, source)
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


def _check_depth(text: str, source: str) -> None:
    """Raise HeedfulError for deep nesting and long dotted keys, since tomllib's memory grows with their square.

    >>> _check_depth("x = [" * 101, "x.toml")
    Traceback (most recent call last):
    heedful.errors.HeedfulError: x.toml: is nested more than 100 deep
    """
    structure = _STRING_OR_COMMENT.sub("_", text)
    brackets = re.findall(r"[][{}]", structure)
    depths = accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    keys = re.findall(r"[\w\-. \t]+", structure)
    if max(depths, default=0) > MAX_DEPTH or any(key.count(".") > MAX_DEPTH for key in keys):
        raise HeedfulError(f"{source}: is nested more than {MAX_DEPTH} deep")


def to_plain_data(value: object, path: tuple[str | int, ...], source: str) -> Json:
    """Return data as dicts, lists, strings, finite numbers, bools and None; raises HeedfulError for anything else.

    Args:
        path: Path of the data, for messages.
        source: Origin of the data, for messages.
    """
    if len(path) > MAX_DEPTH:
        raise HeedfulError(f"{source}: is nested more than {MAX_DEPTH} deep")
    match value:
        case Mapping():
            if invalid := [key for key in value if not isinstance(key, str) or not _is_encodable(key)]:
                raise HeedfulError(f"{source}: {format_path(path)} has the key {as_json(invalid[0])}, expected text")
            return {key: to_plain_data(item, (*path, key), source) for key, item in value.items()}
        case list() | tuple():
            return [to_plain_data(item, (*path, index), source) for index, item in enumerate(value)]
        case str() if _is_encodable(value):
            return value
        case float() if not math.isfinite(value):
            raise HeedfulError(f"{source}: {format_path(path)} is {value}, expected a finite number")
        case None | bool() | int() | float():
            return value
    raise HeedfulError(
        f"{source}: {format_path(path)} is {as_json(value)}, "
        "expected text, a number, true, false, a list or a table (put a date in quotes)"
    )


def _is_encodable(text: str) -> bool:
    """Return whether a string can be written in UTF-8, which halves of surrogate pairs cannot."""
    return not re.search("[\ud800-\udfff]", text)


# ---------------------------------------------------------------------------------------------------- writing


def toml_lines(mapping: Mapping[str, Json], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the table at a path: its values, then the tables in it, each with its header."""
    for key, value in mapping.items():
        if not isinstance(value, dict):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield f"\n[{'.'.join(map(_key, (*path, key)))}]"
            yield from toml_lines(value, (*path, key))


def _value(value: Json) -> str:
    """Return a value in TOML; None is the string "none"."""
    match value:
        case None:
            return '"none"'
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
        case float():
            return repr(value)
    # strings, integers and bools are those of JSON, but TOML's strings must not have the character 0x7f
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


# ---------------------------------------------------------------------------------------------------- messages


def format_path(path: Sequence[str | int]) -> str:
    """Return the dotted path of a value, such as "train.max_steps"."""
    return ".".join(cut(str(key)) for key in path) or "the top level"


def as_json(value: object) -> str:
    """Return a value as JSON for messages, cut after MAX_QUOTED_CHARS characters."""
    return cut(repr(value) if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Return the first MAX_QUOTED_CHARS characters of a text, with escapes for characters that are not printable."""
    text = text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
