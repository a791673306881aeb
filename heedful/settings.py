"""Typed settings from and to TOML, JSON and `--a.b=c`; unknown or invalid settings raise an error that says what to do.

Settings are frozen, keyword-only dataclasses; required fields have no default. A field may be a string, a number, a
bool, Literal, tuple, dict[str, ...], another dataclass, None, or a union of dataclasses that differ in a Literal field
`kind`. A base class with a list MEMBERS means the union of the listed classes. TOML has no null, so in every
format the word "none" is read as None, where None is allowed. A dataclass is called a table here, as in TOML. The
settings of runs, models and tokenizers are read and written by this module.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.toml_json import Json, as_json, cut, format_path, parse, to_plain_data, toml_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter, ValidationError
    from typing_extensions import TypeIs

Settings = TypeVar("Settings", bound="DataclassInstance")
Value = TypeVar("Value")
Exclusive = tuple[tuple[str, ...], ...]  # the class variable EXCLUSIVE: groups of mutually exclusive fields

MAX_FILE_BYTES = 1_000_000  # bytes of a settings file
MAX_LISTED_PROBLEMS = 10  # problems that one message lists
_CACHE_CLEARERS: list[Callable[[], None]] = []  # functions that each clear one cache of `cache_by_class`


def cache_by_class(function: Callable[[type], Value]) -> Callable[[type], Value]:
    """Decorate a function of a class, so that its results are cached until `clear_type_caches`."""
    cached = cache(function)
    _CACHE_CLEARERS.append(cached.cache_clear)
    return cached


def clear_type_caches() -> None:
    """Clear the caches of `cache_by_class`, after a union has got another member."""
    for clear_cache in _CACHE_CLEARERS:
        clear_cache()


@cache_by_class
def type_hints(cls: type) -> dict[str, object]:
    """Return the types of a dataclass's fields, with unions instead of base classes that have MEMBERS."""
    return {name: _members_of(hint) for name, hint in get_type_hints(cls).items()}


def _members_of(hint: object) -> object:
    """Return the union of the MEMBERS of a type, or the type itself."""
    members = getattr(hint, "MEMBERS", None)
    return hint if members is None or dataclasses.is_dataclass(hint) else Union[tuple(members)]  # noqa: UP007


# ---------------------------------------------------------------------------------------------------- reading


def from_mapping(cls: type[Settings], data: object, *, source: str | Callable[[Sequence[str | int]], str]) -> Settings:
    """Build a settings dataclass from plain data.

    Args:
        cls: The dataclass.
        data: Its fields as dicts, lists, strings, numbers, bools and None.
        source: Origin of the data, for messages; or a function that returns the origin of a path, "" if unknown.

    Raises:
        SettingError: If a value is invalid. The message lists all problems, and `path` is that of the first problem.
    """
    from pydantic import ValidationError

    source_of = source if callable(source) else lambda path: source
    plain = to_plain_data(data, (), source_of(()))
    try:
        settings: Settings = _adapter(cls).validate_python(plain)
    except ValidationError as error:
        raise _setting_error(cls, plain, error, source_of) from None
    return settings


def _setting_error(
    cls: type, plain: Json, error: ValidationError, source_of: Callable[[Sequence[str | int]], str]
) -> SettingError:
    """Return the error for invalid settings, with a line for each of the first MAX_LISTED_PROBLEMS problems."""
    problems = list(islice(_problems(cls, plain, error), MAX_LISTED_PROBLEMS + 1))
    lines = [
        f"{origin}: {text}" if (origin := source_of(path) or source_of(path[:-1])) else text for path, text in problems
    ]
    if len(lines) > MAX_LISTED_PROBLEMS:
        origin = source_of(problems[-1][0])
        lines[MAX_LISTED_PROBLEMS:] = [f"{origin}: and more" if origin else "and more"]
    first_path = problems[0][0]
    is_unknown = error.errors(include_url=False)[0]["type"] == "extra_forbidden"
    return SettingError(
        "\n".join(dict.fromkeys(lines)),
        path=format_path(first_path) if first_path else "",
        source=source_of(first_path) or source_of(first_path[:-1]),
        code="unknown" if is_unknown else "invalid",
    )


def from_file(cls: type[Settings], path: str | PathLike[str]) -> Settings:
    """Read a settings dataclass from a .toml or .json file."""
    return from_mapping(cls, load_mapping(path), source=str(path))


def load_mapping(path: str | PathLike[str]) -> dict[str, Json]:
    """Read the plain data of a .toml or .json file.

    Raises:
        HeedfulError: If the file is missing, larger than MAX_FILE_BYTES, not UTF-8 or not valid, is nested too deeply,
            or has duplicate keys or numbers that are not finite.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise HeedfulError(f"{path}: a settings file ends in .toml or .json")
    if not path.is_file():
        raise HeedfulError(f"{path}: {'is not a file' if path.exists() else 'there is no such file'}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise HeedfulError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise HeedfulError(f"{path}: is larger than 1 MB, the most that a settings file may have")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeedfulError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    return parse(text, "TOML" if path.suffix == ".toml" else "JSON", str(path))


def overlay(settings: Settings, data: Mapping[str, object], *, source: str) -> Settings:
    """Return settings with new values from plain data, as `merge` does; `source` is their origin, for messages."""
    mapping = to_mapping(settings)
    changes = to_plain_data(data, (), source)
    assert isinstance(changes, dict)
    merge(mapping, changes, type(settings))
    return from_mapping(type(settings), mapping, source=source)


def merge(table: dict[str, Json], data: Mapping[str, Json], *classes: type) -> None:
    """Update settings in place, table by table.

    Args:
        table: Settings as plain data.
        data: New values. A new `kind` removes all old values of its table. A value for one of several mutually
            exclusive settings sets the others to None.
        classes: Dataclasses, one of which the table must fit.
    """
    if "kind" in data and table.get("kind") != data["kind"]:
        table.clear()
    for group in (group for cls in classes for group in exclusive(cls)):
        if any(is_set(data.get(name)) for name in group):
            table.update(dict.fromkeys(group))
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(inner := table.get(key), dict):
            merge(inner, value, *(inner_cls for cls in classes for inner_cls in _tables(type_hints(cls).get(key))))
        else:
            table[key] = value


def exclusive(cls: type) -> Exclusive:
    """Return the groups of mutually exclusive fields of a dataclass."""
    return getattr(cls, "EXCLUSIVE", ())


def is_set(value: object) -> bool:
    """Return whether plain data is a value, and not None or "none"."""
    return value is not None and value != "none"


@cache_by_class
def exclusive_paths(cls: type) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the groups of mutually exclusive fields of a dataclass and of the tables in it; a field is a path."""
    groups: list[tuple[tuple[str, ...], ...]] = [tuple((name,) for name in group) for group in exclusive(cls)]
    for field in _fields(cls):
        for table in _tables(type_hints(cls)[field.name]):
            groups += [tuple((field.name, *path) for path in paths) for paths in exclusive_paths(table)]
    return tuple(groups)


def _tables(kind: object) -> list[type[DataclassInstance]]:
    """Return the dataclasses among a type or the members of a union."""
    return [cls for cls in (get_args(kind) if _is_union(kind) else (kind,)) if _is_table(cls)]


# ---------------------------------------------------------------------------------------------------- writing


def to_mapping(settings: DataclassInstance) -> dict[str, Json]:
    """Return settings as plain data, from which `from_mapping` builds them again."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}


def to_toml(settings: DataclassInstance) -> str:
    """Return all settings as TOML.

    Raises:
        HeedfulError: If reading the text would not restore the settings, since one of them is the string "none".
    """
    text = "\n".join(toml_lines(to_mapping(settings), ())) + "\n"
    if from_mapping(type(settings), parse(text, "TOML", "to_toml"), source="to_toml") != settings:
        raise HeedfulError('to_toml: the text "none" would be read as None; use another text')
    return text


def _plain(value: object) -> Json:
    """Return the value of a field as plain data."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple() | list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
    assert dataclasses.is_dataclass(value) and not isinstance(value, type)
    return to_mapping(value)


# ---------------------------------------------------------------------------------------------------- types

# pydantic puts the tag of a union's member into the location of an error; _MARK begins each tag, but no key of settings
_MARK = "\0"
_OTHERS = "\0\0"  # tag of all members of a union that are not dataclasses


@cache_by_class
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Return the pydantic adapter that builds a dataclass from plain data."""
    from pydantic import TypeAdapter

    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    pydantic_type: Any = _pydantic_type(cls)
    return TypeAdapter(pydantic_type)


def _pydantic_type(kind: object) -> object:
    """Return the type that pydantic validates for the type of a field.

    A dataclass becomes a TypedDict without other keys, whose values are passed to the dataclass. A union gets its
    member from `kind`.
    """
    from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict, with_config
    from typing_extensions import TypedDict  # typing's own has no config before Python 3.12

    if _is_table(kind):
        cls = kind
        hints = type_hints(cls)
        keys = {}
        for field in _fields(cls):
            merge_default = BeforeValidator(partial(_merge_default, field.default))
            key_type: Any = Annotated[_pydantic_type(hints[field.name]), merge_default]
            keys[field.name] = key_type if _is_required(field) else NotRequired[key_type]
        make_table: Any = TypedDict
        table = with_config(ConfigDict(strict=True, extra="forbid"))(make_table(cls.__name__, keys))
        return Annotated[table, AfterValidator(lambda values: cls(**values))]
    arguments = get_args(kind)
    if _is_union(kind):
        return _pydantic_union(arguments)
    if get_origin(kind) is tuple:
        elements = tuple(element if element is ... else _pydantic_type(element) for element in arguments)
        return Annotated[tuple[elements], Strict(False)]  # type: ignore[valid-type]
    if get_origin(kind) is dict:
        return dict[arguments[0], _pydantic_type(arguments[1])]  # type: ignore[misc, valid-type]
    assert kind in _WORDS or get_origin(kind) is Literal, f"{kind} has no place in settings"
    return kind


def _merge_default(default: object, value: object) -> object:
    """Return a table merged into the default of its field.

    A table of another `kind`, or with keys that the default does not have, is not merged with it.
    """
    if not isinstance(value, dict) or not dataclasses.is_dataclass(default) or isinstance(default, type):
        return value
    table = to_mapping(default)
    if "kind" not in value and not value.keys() <= table.keys():
        return value
    merge(table, value, type(default))
    return table


def _pydantic_union(members: tuple[object, ...]) -> object:
    """Return the type that pydantic validates for a union."""
    from pydantic import BeforeValidator, Discriminator, Tag

    tables, others = _by_kind(members)
    union: Any = Union[tuple(map(_pydantic_type, [*tables.values(), *others]))]  # noqa: UP007
    if len(tables) + bool(others) > 1 and tables:
        tagged = [Annotated[_pydantic_type(member), Tag(tag)] for tag, member in tables.items()]
        if others:
            tagged.append(Annotated[Union[tuple(map(_pydantic_type, others))], Tag(_OTHERS)])  # noqa: UP007
        union = Annotated[Union[tuple(tagged)], Discriminator(lambda value: _tag(value, tables))]  # noqa: UP007
    if types.NoneType in members:
        union = Annotated[union | None, BeforeValidator(lambda value: None if value == "none" else value)]
    return union


def _by_kind(members: tuple[object, ...]) -> tuple[dict[str, type[DataclassInstance]], list[object]]:
    """Split a union: return its dataclasses by their tags (_MARK and the `kind`), and its other members except None."""
    tables = {
        f"{_MARK}{kind}": member
        for member in members
        if _is_table(member)
        for kind in get_args(type_hints(member).get("kind")) or [""]
    }
    return tables, [cls for cls in members if cls is not types.NoneType and not _is_table(cls)]


def _tag(value: object, tables: Mapping[str, object]) -> str | None:
    """Return the tag of the union's member to which a value belongs, or None for a table without `kind`."""
    if not isinstance(value, dict):
        return _OTHERS
    if len(tables) == 1:
        return next(iter(tables))
    return f"{_MARK}{value['kind']}" if "kind" in value else None


def _is_table(kind: object) -> TypeIs[type[DataclassInstance]]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_union(kind: object) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _fields(cls: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# ---------------------------------------------------------------------------------------------------- messages

_WORDS: dict[object, str] = {  # type of a field -> its name in messages
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: '"none"',
}


def _problems(cls: type, plain: Json, error: ValidationError) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and a sentence for each problem."""
    for detail in error.errors(include_url=False):
        is_unknown_key, cause = detail["type"] == "extra_forbidden", detail.get("ctx", {}).get("error")
        path, kind, value = _locate(cls, plain, detail["loc"][:-1] if is_unknown_key else detail["loc"])
        name = format_path(path)
        if isinstance(cause, AssertionError):  # a bug of Heedful, not an invalid value
            raise cause
        if is_unknown_key:
            if _is_union(kind):  # a dataclass or None
                (kind,) = _by_kind(get_args(kind))[0].values()
            assert _is_table(kind)
            names = [field.name for field in _fields(kind)]
            known = f"; known here: {', '.join(names) or 'nothing'}"
            key = cut(str(detail["loc"][-1]))
            yield (*path, key), f"{format_path((*path, key))} is not a setting{did_you_mean(key, names) or known}"
        elif cause:  # an error of __post_init__
            yield _field_of_message(kind, path, str(cause))
        elif detail["type"].startswith("union_tag") and isinstance(value, dict):
            kinds = [tag.removeprefix(_MARK) for tag in _by_kind(get_args(kind))[0]]
            problem = f"is {as_json(value['kind'])}" if "kind" in value else "is missing"
            hint = did_you_mean(cut(str(value.get("kind"))), kinds)
            expected = f"expected one of {', '.join(map(as_json, kinds))}{hint}"
            yield (*path, "kind"), f"{name}.kind {problem}, {expected}"
        else:
            problem = "is missing" if value is dataclasses.MISSING else f"is {as_json(value)}"
            yield path, f"{name} {problem}, expected {_expected(kind)}"


def _field_of_message(kind: object, path: tuple[str | int, ...], message: str) -> tuple[tuple[str | int, ...], str]:
    """Return the path and the text for an error of __post_init__, whose message may begin with the name of a field."""
    tables = _by_kind(get_args(kind))[0].values() if _is_union(kind) else [kind]
    field_names = {field.name for table in tables if _is_table(table) for field in _fields(table)}
    first_word, _, rest = message.partition(" ")
    if first_word in field_names and rest.startswith(("is ", "would ")):
        field_path = (*path, first_word)
        return field_path, f"{format_path(field_path)} {rest}"
    return path, f"{format_path(path)}: {message}" if path else message


def _locate(cls: type, value: Any, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], object, object]:
    """Return the path in the user's data for a location of pydantic, the expected type, and the value.

    Args:
        cls: Type of all data.
        value: All data.
        loc: Keys and indices, with tags of members of unions in between.
    """
    path: list[str | int] = []
    kind: object = cls
    for key in loc:  # a key of a table, an index of a list, or a tag
        if _is_union(kind):
            tables, others = _by_kind(get_args(kind))
            if key in tables:
                kind = tables[str(key)]
                continue
            if len(tables) + len(others) > 1:
                break  # the tag of a member that pydantic tried
            kind = next(iter((*tables.values(), *others)))
        if isinstance(key, int) and key >= len(value):
            break  # the list is too short
        if _is_table(kind):
            kind = type_hints(kind)[str(key)]
        else:
            arguments = [argument for argument in get_args(kind) if argument is not ...]
            kind = arguments[min(int(key), len(arguments) - 1) if isinstance(key, int) else 1]
        value = value[key] if isinstance(key, int) else value.get(key, dataclasses.MISSING)
        path.append(key)
    return tuple(path), kind, value


def _expected(kind: object) -> str:
    """Describe a type for users.

    >>> _expected(int | tuple[float, ...] | None)
    'a whole number, a list or "none"'
    """
    if kind in _WORDS:
        return _WORDS[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(as_json, arguments))}" if len(arguments) > 1 else as_json(arguments[0])
    if get_origin(kind) is tuple:
        return "a list" if ... in arguments else f"a list of {len(arguments)}"
    if _is_union(kind):
        *first, last = map(_expected, arguments)
        return f"{', '.join(first)} or {last}"
    if _is_table(kind):
        ((tag, _),) = list(_by_kind((kind,))[0].items())[:1]
        names = ", ".join(field.name for field in _fields(kind)) or "nothing"
        return f"a table of {names}" if tag == _MARK else f"a table of kind {as_json(tag.removeprefix(_MARK))}"
    return "a table"
