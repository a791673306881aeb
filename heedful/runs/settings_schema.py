"""Schema of settings: path, type, default, meaning and choices of each setting, from the dataclasses.

The meaning of a setting is the comment on its line, or else the comment lines directly above it. Flags, `heedful init`
and the reference page are generated from the schema.
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

Kind = Literal["table", "dict", "value"]  # table: contains settings; dict: has keys with any names


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting. If several kinds of a table have the setting, there is one entry for each kind."""

    path: str  # full path, such as "train.batch_size"
    annotation: object  # type of the value
    default: object  # dataclasses.MISSING: no default
    choices: tuple[object, ...] = ()  # values of a Literal
    when: tuple[str, ...] = ()  # conditions on kinds of tables, such as 'train.schedule.kind = "cosine"'; (): always
    owner: type  # dataclass that declares the setting
    table: bool = False  # whether the value is a table of settings or None

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """The meaning of the setting, or "" if the source has no comment on the field."""
        table = self.path.rpartition(".")[0]
        doc_of_kind = f"kind of {table.rpartition('.')[2]}" if self.name == "kind" else ""
        return _comments(self.owner).get(self.name, doc_of_kind)


def describe_settings(settings: DataclassInstance | type[DataclassInstance]) -> list[Setting]:
    """List all settings of a dataclass or of an instance, whose values are then the defaults."""
    if isinstance(settings, type):
        return list(_walk(settings, None, "", ()))
    return list(_walk(type(settings), settings, "", ()))


@cache_by_class
def setting_paths(cls: type) -> dict[str, Kind]:
    """Return the kind of each path of a settings class, including tables."""
    kinds: dict[str, Kind] = {}
    for setting in _walk(cls, None, "", ()):
        parts = setting.path.split(".")
        for depth in range(1, len(parts)):
            kinds[".".join(parts[:depth])] = "table"
        if setting.table:
            kind: Kind = "table"
        elif any(get_origin(member) is dict for member in _members(setting.annotation)):
            kind = "dict"
        else:
            kind = "value"
        kinds.setdefault(setting.path, kind)
    return kinds


def _walk(cls: type[DataclassInstance], instance: object, prefix: str, when: tuple[str, ...]) -> Iterator[Setting]:
    """Yield the settings of a dataclass and of the tables in it.

    Args:
        cls: The dataclass.
        instance: Settings whose values are the defaults. If None, the class has the defaults.
        prefix: Path of the table of the class, with a dot at the end, or "" for the root.
        when: Conditions on kinds of tables under which the settings exist.
    """
    hints = type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        path = prefix + field.name
        members = _members(hints[field.name])
        default = _default(field) if instance is None else getattr(instance, field.name)
        choices = tuple(value for member in members for value in _literals(member))
        setting = Setting(
            path=path, annotation=hints[field.name], default=default, choices=choices, when=when, owner=cls
        )
        tables = [member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)]
        if not tables:
            yield setting
            continue
        if len(tables) < len(members):  # a value other than a table is possible, such as None
            yield dataclasses.replace(setting, table=True)
        if len(tables) == 1:
            yield from _walk(tables[0], default if type(default) is tables[0] else None, f"{path}.", when)
            continue
        kind_path = f"{path}.kind"
        kinds = [kind for table in tables for kind in _kinds(table)]
        kind_type = Literal[tuple(kinds)]  # type: ignore[valid-type]
        default_kind = getattr(default, "kind", MISSING)
        yield Setting(
            path=kind_path, annotation=kind_type, default=default_kind, choices=tuple(kinds), when=when, owner=cls
        )
        for table in tables:
            conditions = (*when, *(f'{kind_path} = "{kind}"' for kind in _kinds(table)))
            for inner in _walk(table, default if type(default) is table else None, f"{path}.", conditions):
                if inner.path != kind_path:
                    yield inner


def _members(hint: object) -> tuple[object, ...]:
    """Return the member types of a union, or a tuple with the type itself for any other type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _literals(hint: object) -> tuple[object, ...]:
    """Return the values of a Literal, or () for any other type."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def _kinds(table: type) -> tuple[object, ...]:
    """Return the possible values of the field `kind` of a dataclass, or () if it has no such field."""
    return _literals(get_type_hints(table).get("kind"))


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- meaning --------------------------------------------------------------------------------------------------------


@cache
def _comments(cls: type) -> dict[str, str]:
    """Return the comment on each field of a class and its bases, from their source."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _own_comments(base)
    return comments


def _own_comments(cls: type) -> dict[str, str]:
    """Return the comment on each field that a class itself declares, or {} if the source is not installed."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    comment_by_line = {}
    comment_lines = set()  # lines with nothing but a comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment_by_line[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                comment_lines.add(token.start[0])
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comment_by_field = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last_line = statement.end_lineno or statement.lineno
            lines = [line for line in range(statement.lineno, last_line + 1) if line in comment_by_line]
            if not lines:
                first_line = statement.lineno
                while first_line - 1 in comment_lines:
                    first_line -= 1
                lines = list(range(first_line, statement.lineno))
            if lines:
                comment_by_field[statement.target.id] = " ".join(comment_by_line[line] for line in lines)
    return comment_by_field
