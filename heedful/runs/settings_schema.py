"""Schema of settings: path, type, default, meaning and choices of each one, from the dataclasses.

The meaning of a setting is the comment on its line, or else the comment lines directly above it. Flags, `heedful init`
and the reference page are generated from this.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin, get_type_hints

from heedful.settings import cache_by_class, type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = Literal["table", "dict", "value"]  # a dict has keys of any name


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting; where several kinds of a table have it, there is one entry for each of them."""

    path: str  # from the root, as "train.batch_size"
    annotation: object  # the type
    default: object  # dataclasses.MISSING if it has to be given
    choices: tuple[object, ...] = ()  # values of a Literal
    when: tuple[str, ...] = ()  # kinds that have it, as 'train.schedule.kind = "cosine"'; (): always
    owner: type
    table: bool = False  # a table of settings, or its absence

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """The meaning; "" if the source has no comment on it."""
        table = self.path.rpartition(".")[0]
        usual = f"kind of {table.rpartition('.')[2]}" if self.name == "kind" else ""
        return _comments(self.owner).get(self.name, usual)


def describe_settings(settings: DataclassInstance | type[DataclassInstance]) -> list[Setting]:
    """List all settings of a dataclass, or of an instance, whose values are the defaults."""
    if isinstance(settings, type):
        return list(_walk(settings, None, "", ()))
    return list(_walk(type(settings), settings, "", ()))


@cache_by_class
def setting_paths(cls: type) -> dict[str, Kind]:
    """All paths of a settings class, tables included."""
    kinds: dict[str, Kind] = {}
    for setting in _walk(cls, None, "", ()):
        parts = setting.path.split(".")
        for depth in range(1, len(parts)):
            kinds[".".join(parts[:depth])] = "table"
        is_dict = any(get_origin(member) is dict for member in _members(setting.annotation))
        kind: Kind = "table" if setting.table else "dict" if is_dict else "value"
        kinds.setdefault(setting.path, kind)
    return kinds


def _walk(cls: type[DataclassInstance], instance: object, prefix: str, when: tuple[str, ...]) -> Iterator[Setting]:
    hints = type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, default = hints[field.name], _default(field) if instance is None else getattr(instance, field.name)
        path = prefix + field.name
        tables = [member for member in _members(hint) if isinstance(member, type) and dataclasses.is_dataclass(member)]
        choices = tuple(value for member in _members(hint) for value in _literals(member))
        if not tables:
            yield Setting(path=path, annotation=hint, default=default, choices=choices, when=when, owner=cls)
            continue
        if len(tables) < len(_members(hint)):  # none, or another value in place of a table
            yield Setting(
                path=path, annotation=hint, default=default, choices=choices, when=when, owner=cls, table=True
            )
        kinds, several = [kind for table in tables for kind in _kinds(table)], len(tables) > 1
        if several:
            default_kind = getattr(default, "kind", MISSING)
            name = f"{path}.kind"
            of_kinds = Literal[tuple(kinds)]  # type: ignore[valid-type]
            yield Setting(
                path=name, annotation=of_kinds, default=default_kind, choices=tuple(kinds), when=when, owner=cls
            )
        for table in tables:
            inner = default if type(default) is table else None
            conditions = (*when, *(f'{path}.kind = "{kind}"' for kind in _kinds(table))) if several else when
            for setting in _walk(table, inner, f"{path}.", conditions):
                if not (several and setting.path == f"{path}.kind"):
                    yield setting


def _members(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _literals(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _kinds(table: type) -> tuple[object, ...]:
    return _literals(get_type_hints(table).get("kind"))


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- meaning --------------------------------------------------------------------------------------------------------


@cache
def _comments(cls: type) -> dict[str, str]:
    """The comment on each field of a class, from its source; fields of its bases included."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _comments_of(base)
    return comments


def _comments_of(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # installed without its source
        return {}
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    by_field = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.end_lineno or statement.lineno
            lines = [line for line in range(statement.lineno, last + 1) if line in comments]
            if not lines:
                line = statement.lineno
                while line - 1 in alone:
                    line -= 1
                lines = list(range(line, statement.lineno))
            if lines:
                by_field[statement.target.id] = " ".join(comments[line] for line in lines)
    return by_field
