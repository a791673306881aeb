"""Rows of files as inputs of a model, without targets; a bad row yields an error in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from heedful.data.bad_rows import BadRow, CellError, RowErrors, Skip, shown
from heedful.data.corpus.documents import TEXT_SUFFIXES, CountingPath, list_files
from heedful.data.examples import TextExample
from heedful.data.formats.tables import Cells, Table
from heedful.data.formats.text_files import NoRowsError
from heedful.data.inputs.inherited_settings import inherit_settings
from heedful.data.inputs.tables import CONLL_COLUMNS, open_input_table
from heedful.data.labelled.class_folders import LAYOUTS, is_named_as_text, list_text_files
from heedful.data.labelled.columns import (
    Columns,
    KeysByRole,
    MissingColumnError,
    RowReader,
    find_columns,
    guessed_roles,
    has_number,
    unused_columns,
)
from heedful.data.labelled.data_file import FORMAT_BY_SUFFIX, DataSettings, Format, format_of, stem_and_suffix
from heedful.data.labelled.row_reader import fill_blank
from heedful.errors import DataError, did_you_mean

PAIR_ROLES = {"text_pair", "positive", "document"}  # of a second text
MOST_BAD = 100_000  # consecutive bad rows of one file, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """Input of a head: required and optional columns, and how a row becomes an input."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    make: Callable[[RowReader, Cells], object]


def _text(read: RowReader, cells: Cells) -> object:
    text, pair = read.text(cells, "text"), read.text_pair(cells)
    return text if pair is None else (text, pair)


def _both(read: RowReader, cells: Cells) -> object:
    return read.text(cells, "anchor"), read.text(cells, "positive")


def _query_and_document(read: RowReader, cells: Cells) -> object:
    return read.text(cells, "query"), read.text(cells, "document")


def _choices(read: RowReader, cells: Cells) -> object:
    questions = read.value(cells, "question") if read.has("question") else None
    if isinstance(questions, list):
        raise CellError(read.name("question"), f"holds {len(questions)} questions: give each a row of its own")
    value = read.value(cells, "candidates")
    if isinstance(value, dict) and isinstance(cells, dict):  # {"text": [...], "label": ["A", ...]}
        cells = {**cells, read.name("candidates"): value.get("text")}
    candidates = list(read.texts(cells, "candidates"))
    if len(candidates) < 2:
        raise CellError(read.name("candidates"), f"has {len(candidates)} candidates, expected two or more")
    question = read.text(cells, "question") if read.has("question") else None
    if not read.has("prompt"):
        return {"prompt": question, "choices": candidates}
    if question is not None:
        candidates = [fill_blank(question, candidate) for candidate in candidates]
    return {"prompt": read.text(cells, "prompt"), "choices": candidates}


TEXT = InputSpec(needed=("text",), make=lambda read, cells: read.text(cells, "text"))
TEXT_OR_PAIR = InputSpec(needed=("text",), optional=("text_pair",), make=_text)
PAIR = InputSpec(needed=("text", "text_pair"), make=_text)
BOTH = InputSpec(needed=("anchor", "positive"), make=_both)
QUERY_DOCUMENT = InputSpec(needed=("query", "document"), make=_query_and_document)
SOURCE = InputSpec(needed=("source",), make=lambda read, cells: read.text(cells, "source"))
WORDS = InputSpec(needed=("words",), make=lambda read, cells: list(read.texts(cells, "words")))
QUESTION = InputSpec(
    needed=("question", "context"),
    make=lambda read, cells: {"question": read.text(cells, "question"), "context": read.text(cells, "context")},
)
PROMPT = InputSpec(needed=("prompt", "candidates"), optional=("question",), make=_choices)
ASKED = InputSpec(needed=("question", "candidates"), make=_choices)
INPUT_SPECS: dict[str, tuple[InputSpec, ...]] = {  # by the kind of input; the first whose columns are there
    "masked_lm": (TEXT,),
    "next_sentence": (PAIR,),
    "pretraining": (TEXT_OR_PAIR,),
    "sequence_classification": (TEXT_OR_PAIR,),
    "cross_encoder": (QUERY_DOCUMENT, TEXT_OR_PAIR),
    "token_classification": (WORDS, TEXT),
    "question_answering": (QUESTION,),
    "multiple_choice": (PROMPT, ASKED),
    "embedding": (BOTH, TEXT_OR_PAIR),
    "language_model": (SOURCE, TEXT),
}


def choose_spec(table: Table, kind: str, keys_by_role: KeysByRole) -> tuple[InputSpec, Columns]:
    """Choose how the rows of a table become inputs of a head.

    Args:
        table: the table.
        kind: kind of the head.
        keys_by_role: columns given by the user.

    Raises:
        DataError: If columns are unknown to this head, or a required column is missing.
    """
    specs = [spec for spec in INPUT_SPECS[kind] if set(keys_by_role) <= {*spec.needed, *spec.optional}]
    if not specs:
        roles = list(dict.fromkeys(chain(*((*spec.needed, *spec.optional) for spec in INPUT_SPECS[kind]))))
        wrong = next((role for role in keys_by_role if role not in roles), None)
        if wrong is None:
            raise DataError(f"columns {' and '.join(keys_by_role)} do not go together for this model's {kind} head")
        raise DataError(
            f"column {shown(wrong)} is not one of {', '.join(roles)}{did_you_mean(wrong, roles)}, "
            f"which this model's {kind} head reads"
        )
    for spec in specs:
        try:
            columns = find_columns(table, spec.needed, spec.optional, keys_by_role)
        except MissingColumnError:
            if spec is specs[-1]:
                raise
        else:
            by_cells = guessed_roles(table, columns, keys_by_role)
            return spec, Columns(
                kind=TextExample, names_by_role=columns, unused=unused_columns(table, columns), guessed=by_cells
            )
    raise AssertionError


# ---------------------------------------------------------------------------------------------------- files


class InputRow(NamedTuple):
    """A row with its position, and its cells or its error."""

    number: int  # from 1, in its file
    line: int  # its first line; in Parquet the number of the row
    cells: Cells | None
    error: str | None
    path: str = ""  # of the row's file, if the input is a folder with one text per file


class _CollectedErrors(RowErrors):
    """Collects bad rows until their position is known."""

    def __init__(self) -> None:
        super().__init__(Skip())
        self.collected: list[BadRow] = []

    def reject(self, bad: BadRow, *, number: int = 0, stage: str = "row") -> None:
        self.collected.append(bad)
        if len(self.collected) > MOST_BAD:
            raise DataError(f"more than {MOST_BAD:,} rows one after another cannot be read, the last is {bad}")


class InputFile:
    """Rows of one file as inputs of a head."""

    def __init__(self, path: Path, name: str, kind: str, settings: DataSettings) -> None:
        self.is_folder = os.path.isdir(path)
        self.path, self.name = (path if self.is_folder else CountingPath(path)), name
        self.stamp = file_stamp(path)
        self.size = self.stamp[0]
        self._read, self._ended = 0, False  # rows read, and whether the file is exhausted
        self._count: int | None = None  # number of rows, if known
        self.table: Table | None = None  # None: the file has no rows
        self.roles: tuple[str, ...] = ()
        self.echo: list[str] = []  # first cells of columns without names
        row_errors = _CollectedErrors()
        try:
            self.table = open_input_table(self.path, settings, row_errors)
        except NoRowsError as error:
            if row_errors.collected:
                raise DataError(f"{path}: no row of it can be read, the first is {row_errors.collected[0]}") from None
            self.notes = [str(error)]
            return
        keys_by_role = dict(settings.columns or {})
        if self.table.names == CONLL_COLUMNS:
            keys_by_role.pop("words", None)  # number of a column in the file, not a name
        self._spec, columns = choose_spec(self.table, kind, keys_by_role)
        self._reader = RowReader(self.table, columns, settings.max_row_bytes)
        self.roles = tuple(columns.names_by_role)
        self.notes = [*self.table.notes, f"{name}: {columns.note}"]
        self.echo = [f"{name}: {first_cell}" for first_cell in first_cells(self.table, columns)]
        self.form = format_of(path, settings.format)
        if self.form == "parquet":
            from pyarrow.parquet import read_metadata

            self._count = read_metadata(path).num_rows
        elif self.is_folder:
            self._count = sum(1 for _ in list_text_files(path))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the columns; an empty name becomes "column NUMBER"."""
        names = self.table.names if self.table is not None else ()
        return tuple(name or f"column {number}" for number, name in enumerate(names, start=1))

    @cached_property
    def display_names(self) -> dict[str, str]:
        """Names of the columns, by their names in the file."""
        return dict(zip(self.table.names if self.table is not None else (), self.names, strict=True))

    @cached_property
    def known(self) -> frozenset[str]:
        """Names of the columns, for lookup."""
        return frozenset(self.names)

    def named(self, cells: Cells) -> dict[str, object]:
        """Cells of a row by column name."""
        if not isinstance(cells, dict):
            return dict(zip(self.names, cells, strict=False))
        return {self.display_names.get(name, name): cell for name, cell in cells.items()} if "" in cells else cells

    @property
    def share(self) -> float:
        """Share of the file that is read (0-1), by bytes or rows."""
        if self._ended:
            return 1.0
        if self._count is None:
            return getattr(self.path, "read", 0) / max(self.size, 1)
        return self._read / max(self._count, 1)

    def rows(self) -> Iterator[InputRow]:
        """Yield all rows in order, including bad rows."""
        if self.table is None:
            return
        row_errors, number, self._ended = _CollectedErrors(), 0, False
        source = self.table.rows(row_errors)
        while True:
            row = next(source, None)
            for bad in row_errors.collected:
                number += 1
                reason = f"{bad.column}: {bad.reason}" if bad.column else bad.reason
                yield InputRow(number, bad.line, None, reason, self._within(bad.file))
            row_errors.collected.clear()
            if row is None:
                self._ended = True
                return
            number += 1
            self._read = number
            line, cells = row
            path = str(cells["path"]) if self.is_folder and isinstance(cells, dict) else ""
            yield InputRow(number, line, cells, None, path)

    def _within(self, file: str) -> str:
        return str(Path(file).relative_to(self.path)) if self.is_folder else ""

    def place(self, row: InputRow) -> str:
        """Name of the file that a row comes from."""
        return f"{self.name}/{row.path}" if row.path else self.name

    def engine_input(self, row: InputRow) -> tuple[object, str | None]:
        """Return (input, error) of a row; one of them is None."""
        if row.cells is None:
            return None, row.error
        try:
            return self._spec.make(self._reader, row.cells), None
        except CellError as wrong:
            return None, f"{wrong.column}: {wrong.reason}"


def first_cells(table: Table, columns: Columns) -> Iterator[str]:
    """Yield the first cell of each column without a name, so that the user can see a wrong choice."""
    first = table.first_row
    if isinstance(first, list) and table.names[:1] == ("1",):
        for role, names in columns.names_by_role.items():
            for name in names:
                yield f"{role} = column {name}, {shown(first[int(name) - 1])}"


def input_files(files: Sequence[Path], form: Format | None, kind: str, exclude: Path | None) -> list[tuple[Path, str]]:
    """List files, files in folders, and folders with one text per file, each with a distinguishing name.

    Args:
        files: files and folders.
        form: the format; None: by the names of the files.
        kind: kind of the head; token classification reads CoNLL too.
        exclude: folder of predictions, whose files are skipped.
    """
    conll = [suffix for suffix, of in FORMAT_BY_SUFFIX.items() if of == "conll"]
    known = [*TEXT_SUFFIXES, *(conll if kind == "token_classification" else [])]
    listed: list[tuple[Path, str]] = []
    for path in files:
        if form == "class-files" and os.path.isdir(path) and (texts := list(list_text_files(path))):
            listed += [(file, str(file.relative_to(path))) for file in texts]
        elif not (os.path.isdir(path) and _has_text_files(path, form, known)):
            listed += list_files([path], exclude, known)[0]
        elif exclude is not None and path.resolve() in (exclude.resolve(), *exclude.resolve().parents):
            raise DataError(
                f"{exclude}: lies in the folder of texts {path}: give a folder for the answers outside of it"
            )
        else:
            listed.append((path, path.absolute().name))
    if not listed:
        raise DataError("no files were given")
    return listed


def _has_text_files(folder: Path, form: Format | None, known: Sequence[str]) -> bool:
    """Whether each file in a folder is one text: the format says so, or no file has a known suffix."""
    if form == "class-folders":
        return any(True for _ in list_text_files(folder))
    if form is not None or any(stem_and_suffix(path)[1] in known for path in folder.rglob("*")):
        return False
    return is_named_as_text(next(list_text_files(folder), Path("none.unknown")))


def open_inputs(
    files: Sequence[str | Path], kind: str, settings: DataSettings, *, exclude: Path | None
) -> list[InputFile]:
    """Open files, and the readable files in folders, as inputs; files inside `exclude` are skipped.

    Raises:
        DataError: If a file is given twice, or files have columns of different roles.
    """
    listed = input_files([Path(file) for file in files], settings.format, kind, exclude)
    seen: set[Path] = set()
    for path, _ in listed:
        if path.resolve() in seen:
            raise DataError(f"{path}: is given twice")
        seen.add(path.resolve())
    names = [name for _, name in listed]
    plain = [format_of(path, settings.format) == "text" for path, _ in listed]
    bare = settings if all(plain) else replace(settings, columns=None)  # columns that are given belong to tables
    opened = [
        InputFile(path, str(path) if names.count(name) > 1 else name, kind, bare if is_plain else settings)
        for (path, name), is_plain in zip(listed, plain, strict=True)
    ]
    filled = [inputs for inputs in opened if inputs.table is not None]
    if differing := next((inputs for inputs in filled if inputs.roles != filled[0].roles), None):
        raise DataError(
            f"{filled[0].path} has columns for {', '.join(filled[0].roles)}, but {differing.path} for "
            f"{', '.join(differing.roles)}: answer them apart, or say which columns count (--data.columns.text=NAME)"
        )
    return opened


def file_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time (ns) of a file, or of all texts in a folder."""
    try:
        if os.path.isdir(path):
            stats = [file.stat() for file in list_text_files(path)]
            return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns


def without_split_settings(settings: DataSettings) -> DataSettings:
    """Remove the settings of the generated dev split."""
    return replace(settings, dev_fraction=0.0, seed=0)


def settings_for_inputs(
    trained: DataSettings,
    kind: str,
    files: Sequence[Path],
    chosen: DataSettings,
    *,
    exclude: Path | None = None,
    names: Iterable[str] = (),
) -> DataSettings:
    """The run's data settings that apply to unlabelled input for its head.

    Args:
        trained: data settings of the run.
        kind: kind of its head.
        files: the input files.
        chosen: settings given for them; the run's columns are kept as far as they can be combined with these.
        exclude: folder of predictions, whose files are skipped.
        names: names of the files of the run.
    """
    form = chosen.format or (trained.format if trained.format in LAYOUTS else None)
    paths = [path for path, _ in input_files(files, form, kind, exclude)]
    trained = inherit_settings(trained, names, paths, chosen)
    if trained.format in ("text", "conll", "squad", "glue"):
        trained = replace(trained, format=None, columns=None)
    forms = {format_of(path, chosen.format or trained.format) for path in paths} - {"text"}
    roles = {*(chosen.columns or ())}
    specs = [{*spec.needed, *spec.optional} for spec in INPUT_SPECS[kind] if roles <= {*spec.needed, *spec.optional}]
    columns = {role: keys for role, keys in (trained.columns or {}).items() if any(role in roles for roles in specs)}
    if not forms:
        columns = {}
    if kind == "token_classification":  # column numbers of CoNLL do not apply to tables
        columns = {role: keys for role, keys in columns.items() if not has_number(keys)}
    return without_split_settings(replace(trained, columns=columns or None))
