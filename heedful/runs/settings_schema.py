"""Schema of settings: path, type, default, meaning and choices of each setting, read from the settings dataclasses.

The meaning of a setting is the comment on the line of its field, or else the comment lines directly above the field.
Flags of commands, `heedful init` and the reference page docs/settings.md are generated from the schema.
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

Kind = Literal["table", "dict", "value"]  # table: contains settings; dict: has keys that a user may choose


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting.

    A table of settings may have one of several kinds, such as the kinds of a schedule. If several of them have a
    setting, there is a `Setting` for each of them.
    """

    path: str  # full path, such as "train.batch_size"
    annotation: object  # type of the value
    default: object  # dataclasses.MISSING: no default
    choices: tuple[object, ...] = ()  # values of a Literal
    when: tuple[str, ...] = ()  # conditions on kinds of tables, such as 'train.schedule.kind = "cosine"'; all must hold
    owner: type  # dataclass that declares the setting
    table: bool = False  # whether the value is either a table of settings or None

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """The meaning of the setting, or "" if the source has no comment on the field."""
        comments = _comments(self.owner)
        if self.name == "kind" and "kind" not in comments:
            table_path = self.path.rpartition(".")[0]
            return f"kind of {table_path.rpartition('.')[2]}"
        return comments.get(self.name, "")


def describe_settings(settings: DataclassInstance | type[DataclassInstance]) -> list[Setting]:
    """List all settings of a dataclass or of an instance, whose values are then the defaults."""
    if isinstance(settings, type):
        return list(_walk(settings, None, "", ()))
    return list(_walk(type(settings), settings, "", ()))


@cache_by_class
def setting_paths(cls: type) -> dict[str, Kind]:
    """Return the paths of all settings of a class and of the tables that contain them, each with its kind."""
    kinds: dict[str, Kind] = {}
    for setting in _walk(cls, None, "", ()):
        components = setting.path.split(".")
        for depth in range(1, len(components)):
            kinds[".".join(components[:depth])] = "table"
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
        instance: An instance whose values are the defaults. If None, the defaults of the class are used.
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
        else:
            yield from _walk_kinds(tables, setting)


def _walk_kinds(tables: list[type[DataclassInstance]], setting: Setting) -> Iterator[Setting]:
    """Yield the setting `kind` of a table that has several kinds, and the other settings of each kind.

    Args:
        tables: The dataclass of each kind.
        setting: The setting whose value is the table.
    """
    kind_path = f"{setting.path}.kind"
    kinds = tuple(kind for table in tables for kind in _kinds(table))
    yield Setting(
        path=kind_path,
        annotation=Literal[kinds],
        default=getattr(setting.default, "kind", MISSING),
        choices=kinds,
        when=setting.when,
        owner=setting.owner,
    )
    for table in tables:
        conditions = (*setting.when, *(f'{kind_path} = "{kind}"' for kind in _kinds(table)))
        instance = setting.default if type(setting.default) is table else None
        for inner in _walk(table, instance, f"{setting.path}.", conditions):
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
    """Return the default of a field, or dataclasses.MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- meaning --------------------------------------------------------------------------------------------------------


@cache
def _comments(cls: type) -> dict[str, str]:
    """Return the comment on each field of a dataclass, including the fields of its base classes, by field name."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _own_comments(base)
    return comments


def _own_comments(cls: type) -> dict[str, str]:
    """Return the comment on each field that a class itself declares, by field name.

    The result is {} if the source of the class is not installed.
    """
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    comment_by_line: dict[int, str] = {}  # all comments, by line number
    comment_only_lines: set[int] = set()  # numbers of the lines without code
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            comment_by_line[line] = token.string.lstrip("# ")
            if not token.line[:column].strip():
                comment_only_lines.add(line)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comment_by_field = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            first_line, last_line = statement.lineno, statement.end_lineno or statement.lineno
            lines = [line for line in range(first_line, last_line + 1) if line in comment_by_line]
            if not lines:  # no comment beside the field: take the comment lines directly above it
                start = first_line
                while start - 1 in comment_only_lines:
                    start -= 1
                lines = list(range(start, first_line))
            if lines:
                comment_by_field[statement.target.id] = " ".join(comment_by_line[line] for line in lines)
    return comment_by_field
