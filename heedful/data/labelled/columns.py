"""Roles of columns ("text", "label"): which column of a table has which role, by settings, by names, or by cells.

`resolve_columns` finds the columns; a `RowReader` then reads the cells of each row by role.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from shlex import quote
from typing import Any

from heedful.data.bad_rows import CellError, RowErrors, Skip, shown
from heedful.data.examples import (
    ChoiceExample,
    Example,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    QuestionExample,
    ScoredExample,
    Seq2SeqExample,
    TaggedExample,
    TextExample,
)
from heedful.data.formats.list_cells import parse_list_cell
from heedful.data.formats.squad import check_surrogates
from heedful.data.formats.tables import HEAD_ROWS, Cells, Table
from heedful.data.labelled.column_guess import ColumnGuess, guess_columns, has_no_header
from heedful.errors import DataError, HeedfulError, did_you_mean

Key = str | int  # name of a column, or its position from 1
KeysByRole = Mapping[str, Key | Sequence[Key]]  # columns that the user sets, by role
NamesByRole = Mapping[str, tuple[str, ...]]

COLUMN_NAMES: dict[str, tuple[str, ...]] = {  # known column names by role, compared without case
    "text": ("text", "sentence", "sentence1", "premise", "question1", "review", "content", "comment", "tweet"),
    "text_pair": ("text_pair", "pair", "text2", "sentence2", "hypothesis", "question2"),
    "label": ("label", "class", "category", "sentiment", "intent", "topic", "gold_label", "is_duplicate"),
    "labels": ("labels",),
    "score": ("score", "similarity"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "labels"),
    "id": ("id",),
    "question": ("question", "questions", "sent2"),
    "context": ("context",),
    "answers": ("answers", "answer"),
    "impossible": ("is_impossible", "impossible"),
    "prompt": ("prompt", "article", "passage", "context", "premise", "ctx", "sent1"),
    "candidates": ("candidates", "choices", "options", "endings"),
    "answer": ("answer", "answers", "answerkey", "label", "gold"),
    "anchor": ("anchor", "a", "query", "text1", "sentence1"),
    "positive": ("positive", "b", "document", "text2", "sentence2"),
    "negative": ("negative", "negatives", "hard_negative", "hard_negatives"),
    "query": ("query", "question", "anchor"),
    "document": ("document", "passage", "text", "answer", "response"),
    "relevance": ("relevance", "label", "score", "grade"),
    "teacher_scores": ("teacher_scores", "teacher_score", "margins", "margin"),
    "source": ("source", "input", "article", "document", "dialogue", "src", "text"),
    "target": ("target", "output", "summary", "rewritten", "translation", "highlights", "tgt"),
}
NUMBERED_COLUMNS = {  # pattern of numbered names, for roles that may have several columns
    "candidates": re.compile(r"(?i)(?:candidate|choice|option|ending)_?(\d+)"),
    "negative": re.compile(r"(?i)(?:hard_)?negatives?_?(\d*)"),
}
GUESSED_KINDS = (  # kinds of examples that are tried for unknown data, in this order
    TaggedExample,
    ChoiceExample,
    QuestionExample,
    MultiLabelExample,
    LabelledExample,
    ScoredExample,
    PairExample,
    Seq2SeqExample,
    TextExample,
)
# a first row with one of these names of targets is a header, since labels are not called so
TARGET_NAMES = {"label", "labels", "gold_label", "score", "tags", "ner_tags"}
HEADER_ROLES = (  # a first row with known names for all roles of one tuple is a header ("positive" may be a label)
    ("text",),
    ("words",),
    ("question", "context"),
    ("candidates",),
    ("anchor", "positive"),
    ("query", "document"),
    ("source",),
)
MULTI_COLUMN_ROLES = {  # roles that may have several columns
    *("text", "text_pair", "question", "context", "source", "target", "anchor", "positive", "prompt"),  # joined
    *("labels", "words", "candidates", "negative"),  # listed
}
SEPARATOR = "|"  # separates labels or candidates in one cell


class MissingColumnError(HeedfulError):
    """Raised if no column has a required role."""

    def __init__(self, message: str, role: str) -> None:
        super().__init__(message)
        self.role = role


class _AmbiguousError(HeedfulError):
    """Raised if several columns could have the same role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a table by their roles in an example."""

    kind: type[Example]
    names_by_role: NamesByRole
    unused: tuple[str, ...]  # columns without a role
    guessed: tuple[str, ...] = ()  # roles whose columns were guessed from their cells

    @property
    def note(self) -> str:
        """A sentence for the user about the columns of each role."""
        roles = (f"{role}={' + '.join(map(_describe_column, names))}" for role, names in self.names_by_role.items())
        text = f"columns: {', '.join(roles)}"
        if self.guessed:
            options = " and ".join(f"columns.{role}=NUMBER" for role in self.guessed)
            text += f", by what is in their cells; {options} takes others"
        if self.unused:
            text += f"; not used: {', '.join(map(_describe_column, self.unused[:20]))}"
        return text


def _describe_column(name: str) -> str:
    return f"column {name}" if name.isdigit() else shown(name)


def is_header(cells: Sequence[str], header: bool | None, keys_by_role: KeysByRole) -> bool:
    """Whether the first row of a file names its columns.

    Args:
        cells: cells of the first row.
        header: the setting `header`. If None, the names decide.
        keys_by_role: columns that the user sets. A column that is set by name implies a header.
    """
    if header is not None:
        return header
    names = [cell.strip().casefold() for cell in cells]
    for role, keys in keys_by_role.items():
        for key in column_keys(keys):
            if not isinstance(key, int) and not key.isdecimal():
                return True
            if 0 < int(key) <= len(names):
                if _is_known_name(names[int(key) - 1], role):
                    return True
                names[int(key) - 1] = ""  # a label or text in this column may happen to equal a known name
    if TARGET_NAMES & {*names}:
        return True

    def has_name_of(role: str) -> bool:
        return any(_is_known_name(name, role) for name in names)

    return any(all(map(has_name_of, roles)) for roles in HEADER_ROLES)


def _is_known_name(name: str, role: str) -> bool:
    """Whether a lower-case column name is a known name for a role."""
    return name in COLUMN_NAMES.get(role, ()) or _is_numbered(name, role)


def _is_numbered(name: str, role: str) -> bool:
    return role in NUMBERED_COLUMNS and bool(NUMBERED_COLUMNS[role].fullmatch(name))


def resolve_columns(table: Table, kind: type[Example] | None, keys_by_role: KeysByRole) -> Columns:
    """Find the columns of each role of an example.

    Args:
        table: the table.
        kind: class of the examples. If None, the first class of GUESSED_KINDS whose columns are in the table.
        keys_by_role: columns that the user sets.

    Raises:
        MissingColumnError: If a required role has no column.
        DataError: If a role or column is unknown, or if several columns could have a role.
    """
    if kind is not None:
        return _resolve(table, kind, keys_by_role)
    for role, keys in keys_by_role.items():
        if role not in COLUMN_NAMES:
            close = did_you_mean(role, list(COLUMN_NAMES))
            raise DataError(f"column {shown(role)} is not one of {', '.join(COLUMN_NAMES)}{close}")
        _resolve_keys(table, keys)
    possible_kinds = [guess for guess in GUESSED_KINDS if set(keys_by_role) <= {*guess.needed, *guess.optional}]
    if not possible_kinds:
        raise DataError(f"columns {', '.join(keys_by_role)}: no kind of example has all of them")
    for guess in possible_kinds:
        if guess is TextExample and not keys_by_role and has_no_header(table) and len(table.names) > 1:
            continue  # one of its columns is probably a label
        try:
            columns = _resolve(table, guess, keys_by_role)
        except MissingColumnError:
            continue
        if guess is not MultiLabelExample or _may_be_list(table, columns.names_by_role["labels"][0]):
            return columns
    raise _missing_column_error(table, "text", None if keys_by_role else guess_columns(table, ("text", "label")))


def _may_be_list(table: Table, column: str) -> bool:
    """Whether the cells of a column may be lists, by the first row. In a table without types any cell may be a list."""
    return isinstance(table.first_row, list) or isinstance(table.first_row.get(column), list)


def _resolve(table: Table, kind: type[Example], keys_by_role: KeysByRole) -> Columns:
    """Find the columns of each role of a class of examples; raises the same errors as `resolve_columns`."""
    names_by_role = _find_needed(table, kind, keys_by_role)
    if kind is ChoiceExample and not {"prompt", "question"} & set(names_by_role):
        raise _missing_column_error(table, "prompt")
    columns = Columns(
        kind=kind,
        names_by_role=names_by_role,
        unused=unused_columns(table, names_by_role),
        guessed=guessed_roles(table, names_by_role, keys_by_role),
    )
    if kind is PairExample and {"score", "negative"} <= {*names_by_role}:
        column = _describe_column(names_by_role["score"][0])
        raise DataError(
            f"{table.display_name}: {column} is the score of a pair, and a pair with negatives has none: leave it out "
            f"(--data.columns.score='[]'), or set {column_option('teacher_scores', 'NAME')} to a column with a "
            "teacher's scores, or its margins"
        )
    if kind is PairExample and "score" not in {*names_by_role, *keys_by_role}:
        _check_unused_labels(table, columns.unused)
    return columns


def _find_needed(table: Table, kind: type[Example], keys_by_role: KeysByRole) -> dict[str, tuple[str, ...]]:
    """Find the columns of the needed roles, or of the alternative roles if the needed ones are missing.

    If the user sets the column of a role that only one of both has, that one is chosen.
    """
    if kind.alternative and set(keys_by_role) & ({*kind.alternative} - {*kind.needed}):
        return find_columns(table, kind.alternative, kind.optional, keys_by_role)
    try:
        return find_columns(table, kind.needed, kind.optional, keys_by_role)
    except MissingColumnError:
        if not kind.alternative or set(keys_by_role) & ({*kind.needed} - {*kind.alternative}):
            raise
    return find_columns(table, kind.alternative, kind.optional, keys_by_role)


def _check_unused_labels(table: Table, names: Sequence[str]) -> None:
    """Raise DataError if an unused column has labels of pairs, since all pairs would be trained as positive pairs.

    Args:
        table: the table.
        names: the unused columns.
    """
    head = [cells for _, cells in islice(table.rows(RowErrors(Skip())), HEAD_ROWS)]
    for name in names:
        key: Any = table.names.index(name) if isinstance(table.first_row, list) else name
        values = {str(cells[key]) for cells in head if isinstance(cells, list) or key in cells}
        if name.casefold() in TARGET_NAMES.union(COLUMN_NAMES["label"]) or values in ({"0", "1"}, {"False", "True"}):
            raise DataError(
                f"{table.display_name}: {_describe_column(name)} beside the two texts would not be used: the texts of "
                f"every row would be learned as similar ones. Set {column_option('score', name)} if it is a number "
                "for their similarity; if all rows have similar texts, leave the column out: "
                "--data.columns.score='[]'"
            )


def find_columns(
    table: Table, needed: tuple[str, ...], optional: tuple[str, ...], keys_by_role: KeysByRole
) -> dict[str, tuple[str, ...]]:
    """Return the names of columns by role, for the required and optional roles that have columns.

    Args:
        table: the table.
        needed: the required roles.
        optional: the optional roles.
        keys_by_role: columns that the user sets. The columns of other roles are found by name, or guessed.

    Raises:
        MissingColumnError: If a required role has no column.
        DataError: If a role or column is unknown, or if a role has too many columns.
        HeedfulError: If several columns could have a role.
    """
    roles = (*needed, *optional)
    for role in keys_by_role:
        if role not in roles:
            raise DataError(f"column {shown(role)} is not one of {', '.join(roles)}{did_you_mean(role, roles)}")
    chosen = {role: _resolve_keys(table, keys) for role, keys in keys_by_role.items()}
    for role, names in chosen.items():
        if len(names) > 1 and role not in MULTI_COLUMN_ROLES:
            raise DataError(
                f"{table.display_name}: {' and '.join(map(shown, names))} are given as the {role}, but that is one "
                f"column: set which, as in {column_option(role, names[0])}"
            )
    names_by_role: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    missing = [role for role in needed if role not in chosen]
    guess = guess_columns(table, missing, [name for names in chosen.values() for name in names]) if missing else None
    if guess is not None:
        chosen |= guess.sure
    for role in roles:
        names = chosen[role] if role in chosen else _find_by_name(table, role, used)
        if not names and role in needed:
            raise _missing_column_error(table, role, guess)
        if len(names) > 1 and role not in keys_by_role and not _is_numbered(names[0], role):
            raise _AmbiguousError(
                f"{table.display_name}: {' and '.join(map(shown, names))} could each be the {role}: "
                f"say which, as {column_option(role, names[0])}"
            )
        if names:
            names_by_role[role] = names
            used |= set(names)
    return names_by_role


def unused_columns(table: Table, names_by_role: NamesByRole) -> tuple[str, ...]:
    """Return the columns without a role."""
    used = {name for names in names_by_role.values() for name in names}
    return tuple(name for name in table.names if name not in used)


def guessed_roles(table: Table, names_by_role: NamesByRole, keys_by_role: KeysByRole) -> tuple[str, ...]:
    """Return the roles whose columns were neither set by the user nor named in a header."""
    return tuple(role for role in names_by_role if role not in keys_by_role) if has_no_header(table) else ()


def _find_by_name(table: Table, role: str, used: set[str]) -> tuple[str, ...]:
    """Return the columns with a known name of a role: all numbered ones in order, else all without another role."""
    if numbered := [name for name in table.names if _is_numbered(name, role)]:
        return tuple(sorted(numbered, key=lambda name: int(NUMBERED_COLUMNS[role].sub(r"\1", name) or 0)))
    free = [name for name in table.names if name not in used]
    return tuple(name for name in free if name.casefold() in COLUMN_NAMES[role])


def column_option(role: str, name: str) -> str:
    """Return the command-line option that sets the column of a role.

    >>> column_option("text", "my review")
    "--data.columns.text='my review'"
    """
    return f"--data.columns.{role}={quote(name)}"


def column_keys(keys: Key | Sequence[Key]) -> tuple[Key, ...]:
    """Return the names or positions of one role's columns as a tuple."""
    return (keys,) if isinstance(keys, str | int) else tuple(keys)


def has_number(keys: Key | Sequence[Key]) -> bool:
    """Whether some column is set by its position."""
    return any(isinstance(key, int) or key.isdecimal() for key in column_keys(keys))


def _resolve_keys(table: Table, keys: Key | Sequence[Key]) -> tuple[str, ...]:
    """Return the names of columns that are set by name or position; raise DataError if the table lacks one."""
    names = []
    for key in column_keys(keys):
        if isinstance(key, str) and key.isdecimal() and key not in table.names:
            key = int(key)
        if isinstance(key, int):
            if not 1 <= key <= len(table.names):
                raise DataError(f"{table.display_name}: has {len(table.names)} columns, and column {key} was asked for")
            name = table.names[key - 1]
            if table.names.count(name) > 1:
                raise DataError(
                    f"{table.display_name}: column {key} and another one are called {shown(name)}: rename one of them"
                )
            names.append(name)
        elif key in table.names:
            names.append(key)
        else:
            raise DataError(
                f"{table.display_name}: has no column {shown(key)}, but {', '.join(map(shown, table.names[:20]))}"
                f"{did_you_mean(key, table.names)}"
            )
    return tuple(names)


def _missing_column_error(table: Table, role: str, guess: ColumnGuess | None = None) -> MissingColumnError:
    """Return the error that a role has no column, with advice on what to set."""
    question = f"{table.display_name}: which column is the {role}?"
    if has_no_header(table):
        if guess is not None and guess.doubt:
            return MissingColumnError(f"{question} {guess.doubt}", role)
        cells = ", ".join(map(shown, [*table.first_row][:5]))
        advice = f"Say {column_option(role, 'NUMBER')} (from 1), or NAME instead if its first row is a header"
        if guess is not None:
            advice = str(guess) or advice
        return MissingColumnError(f"{question} No header was recognised; a row is {cells}. {advice}", role)
    known = " or ".join(map(shown, COLUMN_NAMES[role][:3]))
    names = ", ".join(map(shown, table.names[:20]))
    return MissingColumnError(
        f"{question} None is called {known} or the like: say {column_option(role, 'NAME')}, one of {names}", role
    )


# ---------------------------------------------------------------------------------------------------- cells


class RowReader:
    """Reads the values of a row by role. A value that cannot be used raises CellError."""

    def __init__(self, table: Table, columns: Columns, max_text_chars: int) -> None:
        self.label_names = {role: table.label_names.get(names[0], ()) for role, names in columns.names_by_role.items()}
        self._max_text_chars = max_text_chars
        self._keys_by_role: dict[str, list[tuple[Any, str]]] = {}  # (index or key of the cell, name of the column)
        for role, names in columns.names_by_role.items():
            by_index = isinstance(table.first_row, list)
            self._keys_by_role[role] = [(table.names.index(name) if by_index else name, name) for name in names]

    def has(self, role: str) -> bool:
        """Whether the role has a column."""
        return role in self._keys_by_role

    def name(self, role: str) -> str:
        """Return the name of a role's first column."""
        return self._keys_by_role[role][0][1]

    def values(self, cells: Cells, role: str) -> list[tuple[object, str]]:
        """Return (value, column name) for each column of a role."""
        values = []
        for key, name in self._keys_by_role[role]:
            try:
                values.append((cells[key], name))
            except (LookupError, TypeError):
                raise CellError(name, "is missing") from None
        return values

    def value(self, cells: Cells, role: str) -> object:
        """Return the value of a role's first column."""
        return self.values(cells, role)[0][0]

    def text(self, cells: Cells, role: str) -> str:
        """Return the text of a role. The texts of several columns are joined by spaces."""
        return " ".join(self.check_text(value, name) for value, name in self.values(cells, role))

    def check_text(self, value: object, name: str) -> str:
        """Return a value if it is a usable text, or raise CellError with the column name."""
        if not isinstance(value, str):
            raise CellError(name, "is missing" if value is None else f"is {shown(value)}, expected text")
        if len(value) > self._max_text_chars:
            raise CellError(name, f"is longer than {self._max_text_chars:,} characters, the most that a text may have")
        return check_surrogates(value, name)

    def text_pair(self, cells: Cells) -> str | None:
        """Return the second text of a pair, or None if it has no column."""
        return self.text(cells, "text_pair") if self.has("text_pair") else None

    def texts(self, cells: Cells, role: str) -> tuple[str, ...]:
        """Return the texts of a role: from several columns, from a list, or from one cell with bars between texts."""
        values = self.values(cells, role)
        if len(values) > 1:
            while role in NUMBERED_COLUMNS and values and values[-1][0] in (None, ""):
                values.pop()  # a row may have fewer candidates than columns
            if empty := [name for value, name in values if role in NUMBERED_COLUMNS and value in (None, "")]:
                raise CellError(empty[0], f"is empty, but a {role.removesuffix('s')} after it is not")
            return tuple(self.check_text(value, name) for value, name in values)
        value, name = values[0]
        if role == "words":
            value = parse_list_cell(value, name)
        if isinstance(value, str):
            separator = None if role in ("words", "tags") else SEPARATOR  # None: white space
            parts = self.check_text(value, name).split(separator)
            return tuple(part.strip() for part in parts)
        if not isinstance(value, list | tuple):
            raise CellError(name, "is missing" if value is None else f"is {shown(value)}, expected a list of texts")
        return tuple(self.check_text(text, f"{name}[{index}]") for index, text in enumerate(value))

    def text_list(self, cells: Cells, role: str) -> tuple[str, ...]:
        """Return the texts of several columns or of a list, or the one text of a cell, or () for an empty cell."""
        values = self.values(cells, role)
        if len(values) > 1:
            return self.texts(cells, role)
        value, name = values[0]
        value = parse_list_cell(value, name)
        if not value:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise CellError(name, f"is {shown(value)}, expected a text or a list of texts")
        return tuple(self.check_text(text, f"{name}[{index}]") for index, text in enumerate(texts))

    def label(self, value: object, name: str, label_names: Sequence[str]) -> str:
        """Return a label as text: 1 and 1.0 become "1", true becomes "true", an index becomes its label name.

        Args:
            value: value of the cell.
            name: name of the cell's column, for messages.
            label_names: names of labels by index, or empty if the data has no such names.
        """
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int) and label_names:
            if not 0 <= value < len(label_names):
                hint = ": it is hidden" if value == -1 else ""
                raise CellError(name, f"is {value}, expected 0 to {len(label_names) - 1}{hint}")
            return label_names[value]
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            return str(value)
        text = self.check_text(value, name).strip()
        if not text:
            raise CellError(name, "is empty, expected a label")
        return text

    def number(self, cells: Cells, role: str) -> float:
        """Return the number in a role's first column, which must be finite."""
        return self._parse_number(*self.values(cells, role)[0])

    def numbers(self, cells: Cells, role: str) -> tuple[float, ...]:
        """Return the numbers of a list, or the one number of a cell, which must be finite."""
        value, name = self.values(cells, role)[0]
        value = parse_list_cell(value, name)
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(self._parse_number(number, name) for number in values)

    def _parse_number(self, value: Any, name: str) -> float:
        try:
            number = float(value.strip() if isinstance(value, str) else value)
            if isinstance(value, bool) or not math.isfinite(number) or "_" in str(value):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise CellError(name, f"is {shown(value)}, expected a number") from None
        return number
