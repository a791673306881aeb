"""Assign a table's columns to the roles of an example: by settings, by name, or by their cells."""

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

Key = str | int  # name of a column, or its number from 1
KeysByRole = Mapping[str, Key | Sequence[Key]]

COLUMN_NAMES: dict[str, tuple[str, ...]] = {  # role to known column names, compared without case
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
    "answers": ("answers",),
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
NUMBERED = {  # roles that may have numbered columns, to the names of these
    "candidates": re.compile(r"(?i)(?:candidate|choice|option|ending)_?(\d+)"),
    "negative": re.compile(r"(?i)(?:hard_)?negatives?_?(\d*)"),
}
GUESSES = (
    TaggedExample,
    QuestionExample,
    ChoiceExample,
    MultiLabelExample,
    LabelledExample,
    ScoredExample,
    PairExample,
    Seq2SeqExample,
    TextExample,
)  # tried in this order
TARGETS = {"label", "labels", "gold_label", "score", "tags", "ner_tags"}  # names that only a header has, never a label
INPUTS = (  # a first row with names for all of these roles is a header too; "positive" alone may be a label
    ("text",),
    ("words",),
    ("question", "context"),
    ("candidates",),
    ("anchor", "positive"),
    ("query", "document"),
    ("source",),
)
SEVERAL = {  # roles that may have more than one column: texts, which are joined, and lists
    *("text", "text_pair", "question", "context", "source", "target", "anchor", "positive", "prompt"),
    *("labels", "words", "candidates", "negative"),
}
SEPARATOR = "|"  # separates labels, words or candidates in one cell


class MissingColumnError(HeedfulError):
    """No column has the role."""

    def __init__(self, message: str, role: str) -> None:
        super().__init__(message)
        self.role = role


class _AmbiguousError(HeedfulError):
    """Several columns could have the role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of each role of an example."""

    kind: type[Example]
    of: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...]
    proposed: tuple[str, ...] = ()  # roles whose columns were guessed from their cells

    @property
    def note(self) -> str:
        """Sentence for the user."""
        text = "columns: " + ", ".join(f"{role}={' + '.join(map(_said, names))}" for role, names in self.of.items())
        if self.proposed:
            give = " and ".join(f"columns.{role}=NUMBER" for role in self.proposed)
            text += f", by what is in their cells; {give} takes others"
        return text + (f"; not used: {', '.join(map(_said, self.unused[:20]))}" if self.unused else "")


def _said(name: str) -> str:
    return f"column {name}" if name.isdigit() else shown(name)


def is_header(cells: Sequence[str], header: bool | None, keys_by_role: KeysByRole) -> bool:
    """Whether the first row of a file names its columns.

    Args:
        cells: the first row.
        header: the setting; None: decide by the names.
        keys_by_role: columns given by the user.
    """
    if header is not None:
        return header
    names = [cell.strip().casefold() for cell in cells]
    for role, keys in keys_by_role.items():
        for key in column_keys(keys):
            if not isinstance(key, int) and not key.isdigit():
                return True
            if 0 < int(key) <= len(names):
                if _speaks(names[int(key) - 1], role):
                    return True
                names[int(key) - 1] = ""  # a label or text of this column may equal a known name
    return bool(TARGETS & {*names}) or any(
        all(any(_speaks(name, role) for name in names) for role in inputs) for inputs in INPUTS
    )


def _speaks(name: str, role: str) -> bool:
    return name in COLUMN_NAMES.get(role, ()) or _is_numbered(name, role)


def _is_numbered(name: str, role: str) -> bool:
    return role in NUMBERED and bool(NUMBERED[role].fullmatch(name))


def resolve_columns(table: Table, kind: type[Example] | None, keys_by_role: KeysByRole) -> Columns:
    """Resolve the columns of a table.

    Args:
        table: the table.
        kind: class of the examples; None: the first class whose columns are present.
        keys_by_role: columns given by the user.

    Raises:
        MissingColumnError: If a role has no column.
        DataError: If a column is unknown, or several columns could have a role.
    """
    if kind is not None:
        return _resolve(table, kind, keys_by_role)
    for role, keys in keys_by_role.items():
        if role not in COLUMN_NAMES:
            close = did_you_mean(role, list(COLUMN_NAMES))
            raise DataError(f"column {shown(role)} is not one of {', '.join(COLUMN_NAMES)}{close}")
        _given(table, keys)
    guesses = [guess for guess in GUESSES if set(keys_by_role) <= {*guess.needed, *guess.optional}]
    if not guesses:
        raise DataError(f"columns {', '.join(keys_by_role)}: no kind of example has all of them")
    for guess in guesses:
        if guess is TextExample and not keys_by_role and has_no_header(table) and len(table.names) > 1:
            continue  # one of its columns is probably a label
        try:
            guessed = _resolve(table, guess, keys_by_role)
        except MissingColumnError:
            continue
        else:
            if (
                guess is not MultiLabelExample
                or isinstance(table.first_row, list)
                or _is_list(table, guessed, "labels")
            ):
                return guessed
    raise _missing(table, "text", None if keys_by_role else guess_columns(table, ("text", "label")))


def _is_list(table: Table, columns: Columns, role: str) -> bool:
    assert isinstance(table.first_row, dict)
    return isinstance(table.first_row.get(columns.of[role][0]), list)


def _resolve(table: Table, kind: type[Example], keys_by_role: KeysByRole) -> Columns:
    names_by_role = _find_needed(table, kind, keys_by_role)
    if kind is ChoiceExample and not {"prompt", "question"} & set(names_by_role):
        raise _missing(table, "prompt")
    unused, proposed = unused_columns(table, names_by_role), guessed_roles(table, names_by_role, keys_by_role)
    columns = Columns(kind=kind, of=names_by_role, unused=unused, proposed=proposed)
    if kind is PairExample and {"score", "negative"} <= {*names_by_role}:
        raise DataError(
            f"{table.display_name}: {_said(names_by_role['score'][0])} is the score of a pair, and a pair with "
            "negatives has none: leave it out (--data.columns.score='[]'), or set "
            f"{column_option('teacher_scores', 'NAME')} where a column has a teacher's scores, or its margins"
        )
    if kind is PairExample and "score" not in {*names_by_role, *keys_by_role}:
        _refuse_verdict(table, columns.unused)
    return columns


def _find_needed(table: Table, kind: type[Example], keys_by_role: KeysByRole) -> dict[str, tuple[str, ...]]:
    """Find the columns of the needed roles, or else of the alternative ones."""
    if kind.alternative and set(keys_by_role) & ({*kind.alternative} - {*kind.needed}):
        return find_columns(table, kind.alternative, kind.optional, keys_by_role)
    try:
        return find_columns(table, kind.needed, kind.optional, keys_by_role)
    except MissingColumnError:
        if not kind.alternative or set(keys_by_role) & ({*kind.needed} - {*kind.alternative}):
            raise
    return find_columns(table, kind.alternative, kind.optional, keys_by_role)


def _refuse_verdict(table: Table, names: Sequence[str]) -> None:
    """Raise DataError for an unused column of labels: all pairs would be trained as positive pairs."""
    by_number = isinstance(table.first_row, list)
    places: dict[str, Any] = {name: table.names.index(name) if by_number else name for name in names}
    top = [cells for _, cells in islice(table.rows(RowErrors(Skip())), HEAD_ROWS)]
    for name, place in places.items():
        values = {str(cells[place]) for cells in top if isinstance(cells, list) or place in cells}
        if name.casefold() in TARGETS.union(COLUMN_NAMES["label"]) or values in ({"0", "1"}, {"False", "True"}):
            raise DataError(
                f"{table.display_name}: {_said(name)} beside the two texts would not be used, and every row learned "
                f"as texts that belong together: set {column_option('score', name)} where it has numbers of how "
                "much they do; "
                "or keep only rows in which they do, and leave the column out: --data.columns.score='[]'"
            )


def find_columns(
    table: Table, needed: tuple[str, ...], more: tuple[str, ...], keys_by_role: KeysByRole
) -> dict[str, tuple[str, ...]]:
    """Find the columns of required and optional roles."""
    roles = (*needed, *more)
    for role in keys_by_role:
        if role not in roles:
            raise DataError(f"column {shown(role)} is not one of {', '.join(roles)}{did_you_mean(role, roles)}")
    chosen = {role: _given(table, keys) for role, keys in keys_by_role.items()}
    for role, names in chosen.items():
        if len(names) > 1 and role not in SEVERAL:
            raise DataError(
                f"{table.display_name}: {' and '.join(map(shown, names))} are given as the {role}, but that is one "
                f"column: set which, as in {column_option(role, names[0])}"
            )
    names_by_role: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    lacking = [role for role in needed if role not in chosen]
    proposal = guess_columns(table, lacking, [name for names in chosen.values() for name in names]) if lacking else None
    if proposal is not None:
        chosen |= proposal.sure
    for role in roles:
        names = chosen[role] if role in chosen else _by_name(table, role, taken)
        if not names and role in needed:
            raise _missing(table, role, proposal)
        if len(names) > 1 and role not in keys_by_role and not _is_numbered(names[0], role):
            raise _AmbiguousError(
                f"{table.display_name}: {' and '.join(map(shown, names))} could each be the {role}: "
                f"say which, as {column_option(role, names[0])}"
            )
        if names:
            names_by_role[role] = names
            taken |= set(names)
    return names_by_role


def unused_columns(table: Table, names_by_role: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The columns without a role."""
    taken = {name for names in names_by_role.values() for name in names}
    return tuple(name for name in table.names if name not in taken)


def guessed_roles(
    table: Table, names_by_role: Mapping[str, tuple[str, ...]], keys_by_role: KeysByRole
) -> tuple[str, ...]:
    """The roles that were neither given by the user nor found in a header."""
    return tuple(role for role in names_by_role if role not in keys_by_role) if has_no_header(table) else ()


def _by_name(table: Table, role: str, taken: set[str]) -> tuple[str, ...]:
    if numbered := [name for name in table.names if _is_numbered(name, role)]:
        return tuple(sorted(numbered, key=lambda name: int(NUMBERED[role].sub(r"\1", name) or 0)))
    free = [name for name in table.names if name not in taken]
    return tuple(name for name in free if name.casefold() in COLUMN_NAMES[role])


def column_option(role: str, name: str) -> str:
    """The command-line option that chooses a column.

    >>> column_option("text", "my review")
    "--data.columns.text='my review'"
    """
    return f"--data.columns.{role}={quote(name)}"


def column_keys(keys: Key | Sequence[Key]) -> tuple[Key, ...]:
    """The names or numbers of one role's columns, as a tuple."""
    return (keys,) if isinstance(keys, str | int) else tuple(keys)


def has_number(keys: Key | Sequence[Key]) -> bool:
    """Whether some column is given by number."""
    return any(isinstance(key, int) or key.isdigit() for key in column_keys(keys))


def _given(table: Table, keys: Key | Sequence[Key]) -> tuple[str, ...]:
    names = []
    for key in column_keys(keys):
        if isinstance(key, str) and key.isdigit() and key not in table.names:
            key = int(key)
        if isinstance(key, int):
            if not 1 <= key <= len(table.names):
                raise DataError(f"{table.display_name}: has {len(table.names)} columns, and column {key} was asked for")
            name = table.names[key - 1]
            if table.names.count(name) > 1:
                raise DataError(
                    f"{table.display_name}: column {key} is called {shown(name)} as another is: name them apart"
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


def _missing(table: Table, role: str, proposal: ColumnGuess | None = None) -> MissingColumnError:
    which = f"{table.display_name}: which column is the {role}?"
    if has_no_header(table):
        if proposal is not None and proposal.doubt:
            return MissingColumnError(f"{which} {proposal.doubt}", role)
        cells = ", ".join(map(shown, [*table.first_row][:5]))
        say = f"Say {column_option(role, 'NUMBER')} (from 1)"
        looks = str(proposal or "") or f"{say}, or NAME instead if its first row is a header"
        return MissingColumnError(f"{which} There is no header that is understood; a row is {cells}. {looks}", role)
    known, names = (
        " or ".join(map(shown, COLUMN_NAMES[role][:3])),
        ", ".join(map(shown, table.names[:20])),
    )
    return MissingColumnError(
        f"{which} None is called {known} or the like: say {column_option(role, 'NAME')}, one of {names}", role
    )


# ---------------------------------------------------------------------------------------------------- cells


class RowReader:
    """Reads the cells of a table by role."""

    def __init__(self, table: Table, columns: Columns, longest: int) -> None:
        self._at: dict[str, list[tuple[Any, str]]] = {}
        self.label_names = {role: table.label_names.get(names[0], ()) for role, names in columns.of.items()}
        self._longest = longest
        for role, names in columns.of.items():
            by_number = isinstance(table.first_row, list)
            self._at[role] = [(table.names.index(name) if by_number else name, name) for name in names]

    def has(self, role: str) -> bool:
        """Whether the role has a column."""
        return role in self._at

    def name(self, role: str) -> str:
        """Name of the role's first column."""
        return self._at[role][0][1]

    def values(self, cells: Cells, role: str) -> list[tuple[object, str]]:
        """Values of a role's columns, with the names of the columns."""
        values = []
        for key, name in self._at[role]:
            try:
                values.append((cells[key], name))
            except (LookupError, TypeError):
                raise CellError(name, "is missing") from None
        return values

    def value(self, cells: Cells, role: str) -> object:
        """Value of the role's first column."""
        return self.values(cells, role)[0][0]

    def text(self, cells: Cells, role: str) -> str:
        """Text of a role; several columns are joined by spaces."""
        return " ".join(self.checked(value, name) for value, name in self.values(cells, role))

    def checked(self, value: object, name: str) -> str:
        """Return a value that is a usable text, else raise CellError."""
        if not isinstance(value, str):
            raise CellError(name, "is missing" if value is None else f"is {shown(value)}, expected text")
        if len(value) > self._longest:
            raise CellError(name, f"is longer than {self._longest:,} characters, the most that a text may have")
        return check_surrogates(value, name)

    def pair(self, cells: Cells) -> str | None:
        """The second text of a pair, if there is such a column."""
        return self.text(cells, "text_pair") if self.has("text_pair") else None

    def texts(self, cells: Cells, role: str) -> tuple[str, ...]:
        """Several texts: of several columns, of a list, or of one cell separated by bars."""
        values = self.values(cells, role)
        if len(values) > 1:
            while role in NUMBERED and values and values[-1][0] in (None, ""):
                values.pop()  # this row has fewer
            if empty := [name for value, name in values if role in NUMBERED and value in (None, "")]:
                raise CellError(empty[0], f"is empty, but a {role.removesuffix('s')} after it is not")
            return tuple(self.checked(value, name) for value, name in values)
        value, name = values[0]
        if role == "words":
            value = parse_list_cell(value, name)
        if isinstance(value, str):
            parts = self.checked(value, name).split(SEPARATOR if role != "words" and role != "tags" else None)
            return tuple(part.strip() for part in parts)
        if not isinstance(value, list | tuple):
            raise CellError(name, "is missing" if value is None else f"is {shown(value)}, expected a list of texts")
        return tuple(self.checked(text, f"{name}[{index}]") for index, text in enumerate(value))

    def text_list(self, cells: Cells, role: str) -> tuple[str, ...]:
        """Texts of several columns, of a list, or the one text of a cell; none where it is empty."""
        values = self.values(cells, role)
        if len(values) > 1:
            return self.texts(cells, role)
        value, name = values[0]
        value = parse_list_cell(value, name)
        texts = [value] if isinstance(value, str) and value else value or ()
        if not isinstance(texts, list | tuple):
            raise CellError(name, f"is {shown(value)}, expected a text or a list of texts")
        return tuple(self.checked(text, f"{name}[{index}]") for index, text in enumerate(texts))

    def label(self, value: object, name: str, words: Sequence[str]) -> str:
        """A label as text: 1 and 1.0 become "1", true becomes "true", an index becomes its label name."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int) and words:
            if not 0 <= value < len(words):
                raise CellError(
                    name, f"is {value}, expected 0 to {len(words) - 1}" + (": it is hidden" if value == -1 else "")
                )
            return words[value]
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            return str(value)
        text = self.checked(value, name).strip()
        if not text:
            raise CellError(name, "is empty, expected a label")
        return text

    def number(self, cells: Cells, role: str) -> float:
        """A finite number, else raise CellError."""
        return self._finite(*self.values(cells, role)[0])

    def numbers(self, cells: Cells, role: str) -> tuple[float, ...]:
        """Finite numbers of a list, or the one number of a cell."""
        value, name = self.values(cells, role)[0]
        value = parse_list_cell(value, name)
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(self._finite(number, name) for number in values)

    def _finite(self, value: Any, name: str) -> float:
        try:
            number = float(value.strip() if isinstance(value, str) else value)
            if isinstance(value, bool) or not math.isfinite(number) or "_" in str(value):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise CellError(name, f"is {shown(value)}, expected a number") from None
        return number
