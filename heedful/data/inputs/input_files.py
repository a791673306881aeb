"""Files whose rows are inputs of a model, without targets. A bad row yields an error instead of an input.

`open_inputs` opens files for `heedful predict`; `settings_for_inputs` derives the data settings for such files from
those of a training run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from heedful.data.labelled.column_guess import has_no_header
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

PAIR_ROLES = {"text_pair", "positive", "document"}  # roles of the second text of a pair
MAX_CONSECUTIVE_BAD = 100_000  # maximum bad rows one after another, which stay in memory until the next usable row


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """A form of input: the roles of its columns, and a function that converts a row to the input."""

    needed: tuple[str, ...]  # roles of required columns
    optional: tuple[str, ...] = ()  # roles of optional columns
    make: Callable[[RowReader, Cells], object]  # converts the cells of a row to an input of an Engine

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of all columns, the required ones first."""
        return (*self.needed, *self.optional)


def _text(reader: RowReader, cells: Cells) -> object:
    text = reader.text(cells, "text")
    text_pair = reader.text_pair(cells)
    return text if text_pair is None else (text, text_pair)


def _anchor_and_positive(reader: RowReader, cells: Cells) -> object:
    return reader.text(cells, "anchor"), reader.text(cells, "positive")


def _query_and_document(reader: RowReader, cells: Cells) -> object:
    return reader.text(cells, "query"), reader.text(cells, "document")


def _choices(reader: RowReader, cells: Cells) -> object:
    """Return a prompt and its choices.

    With a prompt and a question, each choice is the question completed by a candidate. A question alone is the prompt.
    """
    questions = reader.value(cells, "question") if reader.has("question") else None
    if isinstance(questions, list):
        raise CellError(reader.name("question"), f"holds {len(questions)} questions: give each question its own row")
    value = reader.value(cells, "candidates")
    if isinstance(value, dict) and isinstance(cells, dict):  # published as {"text": [...], "label": ["A", ...]}
        cells = {**cells, reader.name("candidates"): value.get("text")}
    candidates = list(reader.texts(cells, "candidates"))
    if len(candidates) < 2:
        raise CellError(reader.name("candidates"), f"has {len(candidates)} candidates, expected two or more")
    question = reader.text(cells, "question") if reader.has("question") else None
    if not reader.has("prompt"):
        return {"prompt": question, "choices": candidates}
    if question is not None:
        candidates = [fill_blank(question, candidate) for candidate in candidates]
    return {"prompt": reader.text(cells, "prompt"), "choices": candidates}


TEXT = InputSpec(needed=("text",), make=lambda reader, cells: reader.text(cells, "text"))
TEXT_OR_PAIR = InputSpec(needed=("text",), optional=("text_pair",), make=_text)
PAIR = InputSpec(needed=("text", "text_pair"), make=_text)
ANCHOR_AND_POSITIVE = InputSpec(needed=("anchor", "positive"), make=_anchor_and_positive)
QUERY_AND_DOCUMENT = InputSpec(needed=("query", "document"), make=_query_and_document)
SOURCE = InputSpec(needed=("source",), make=lambda reader, cells: reader.text(cells, "source"))
WORDS = InputSpec(needed=("words",), make=lambda reader, cells: list(reader.texts(cells, "words")))
QUESTION_AND_CONTEXT = InputSpec(
    needed=("question", "context"),
    make=lambda reader, cells: {"question": reader.text(cells, "question"), "context": reader.text(cells, "context")},
)
PROMPT_AND_CANDIDATES = InputSpec(needed=("prompt", "candidates"), optional=("question",), make=_choices)
QUESTION_AND_CANDIDATES = InputSpec(needed=("question", "candidates"), make=_choices)
# forms of input by kind of head; the first form whose required columns a table has is used
INPUT_SPECS: dict[str, tuple[InputSpec, ...]] = {
    "masked_lm": (TEXT,),
    "next_sentence": (PAIR,),
    "pretraining": (TEXT_OR_PAIR,),
    "sequence_classification": (TEXT_OR_PAIR,),
    "cross_encoder": (QUERY_AND_DOCUMENT, TEXT_OR_PAIR),
    "token_classification": (WORDS, TEXT),
    "question_answering": (QUESTION_AND_CONTEXT,),
    "multiple_choice": (PROMPT_AND_CANDIDATES, QUESTION_AND_CANDIDATES),
    "embedding": (ANCHOR_AND_POSITIVE, TEXT_OR_PAIR),
    "language_model": (SOURCE, TEXT),
}


def choose_spec(table: Table, kind: str, keys_by_role: KeysByRole) -> tuple[InputSpec, Columns]:
    """Choose how the rows of a table become inputs of a head.

    Args:
        table: the table.
        kind: kind of the head, a key of INPUT_SPECS.
        keys_by_role: columns that the user sets. Only forms of input with all of these roles are considered.

    Returns:
        The form of the inputs, and the columns of the table by role.

    Raises:
        DataError: If no form of input has all roles in `keys_by_role`, or if a required column is missing.
    """
    specs = [spec for spec in INPUT_SPECS[kind] if set(keys_by_role) <= {*spec.roles}]
    if not specs:
        roles = list(dict.fromkeys(chain.from_iterable(spec.roles for spec in INPUT_SPECS[kind])))
        unknown_role = next((role for role in keys_by_role if role not in roles), None)
        if unknown_role is None:
            raise DataError(f"columns {' and '.join(keys_by_role)} do not go together for this model's {kind} head")
        raise DataError(
            f"column {shown(unknown_role)} is not one of {', '.join(roles)}{did_you_mean(unknown_role, roles)}, "
            f"which this model's {kind} head reads"
        )
    for spec in specs:
        try:
            names_by_role = find_columns(table, spec.needed, spec.optional, keys_by_role)
        except MissingColumnError:
            if spec is specs[-1]:  # no other form is left that the table may have
                raise
            continue
        columns = Columns(
            kind=TextExample,
            names_by_role=names_by_role,
            unused=unused_columns(table, names_by_role),
            guessed=guessed_roles(table, names_by_role, keys_by_role),
        )
        return spec, columns
    raise AssertionError("the loop returns or raises for the last form")


# ---------------------------------------------------------------------------------------------------- files


class InputRow(NamedTuple):
    """A row of a file with its position, and its cells or its error."""

    number: int  # number of the row in the file, counted from 1, bad rows included
    line: int  # number of the first line of the row, counted from 1; in Parquet the number of the row
    cells: Cells | None  # None: the row is bad
    error: str | None  # why the row is bad; None: the row is usable
    path: str = ""  # file of the row, relative to the folder, if each file of a folder is one text; "": not a folder


class _CollectedErrors(RowErrors):
    """Collects bad rows, so that `InputFile.rows` can yield them at their positions among the usable rows."""

    def __init__(self) -> None:
        super().__init__(Skip())
        self.collected: list[BadRow] = []

    def reject(self, bad: BadRow, *, index: int = 0, stage: str = "row") -> None:
        self.collected.append(bad)
        if len(self.collected) > MAX_CONSECUTIVE_BAD:
            raise DataError(
                f"more than {MAX_CONSECUTIVE_BAD:,} rows one after another cannot be read, the last is {bad}"
            )


class InputFile:
    """A file, or a folder with one text per file, whose rows are inputs of a head.

    Args:
        path: the file or folder.
        name: name of the file or folder in messages and answers.
        kind: kind of the head.
        settings: how the file is read.

    Raises:
        DataError: If the file or folder cannot be read, or a required column is missing.
    """

    def __init__(self, path: Path, name: str, kind: str, settings: DataSettings) -> None:
        self.is_folder = os.path.isdir(path)
        self.path = path if self.is_folder else CountingPath(path)
        self.name = name
        self.file_format = format_of(path, settings.format)
        self.stamp = file_stamp(path)  # tells later whether the file was changed
        self.size = self.stamp[0]  # bytes
        self.table: Table | None = None  # None: the file has no rows
        self.roles: tuple[str, ...] = ()  # roles with columns
        self.notes: list[str] = []  # sentences for the user about how the file is read
        self.first_cells: list[str] = []  # descriptions of the first cells of columns without names
        self._make_input: Callable[[Cells], object] | None = None  # None: the file has no rows
        self._num_rows: int | None = None  # None: unknown without reading the whole file
        self._rows_read = 0
        self._at_end = False
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
            # "words" was the position of a column in the file; in the table this column is already called "words"
            keys_by_role.pop("words", None)
        spec, columns = choose_spec(self.table, kind, keys_by_role)
        self._make_input = partial(spec.make, RowReader(self.table, columns, settings.max_row_bytes))
        self.roles = tuple(columns.names_by_role)
        self.notes = [*self.table.notes, f"{name}: {columns.note}"]
        self.first_cells = [f"{name}: {cell}" for cell in _describe_first_cells(self.table, columns)]
        if self.file_format == "parquet":
            from pyarrow.parquet import read_metadata

            self._num_rows = read_metadata(path).num_rows
        elif self.is_folder:
            self._num_rows = sum(1 for _ in list_text_files(path))

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns in answers: those of the table, but "column NUMBER" for an empty name."""
        names = self.table.names if self.table is not None else ()
        return tuple(name or f"column {position}" for position, name in enumerate(names, start=1))

    @cached_property
    def column_name_set(self) -> frozenset[str]:
        """`column_names` as a set, in which a name of each cell of each row is looked up quickly."""
        return frozenset(self.column_names)

    def cells_by_name(self, cells: Cells) -> dict[str, object]:
        """Return the cells of a row by name, as in `column_names`."""
        if not isinstance(cells, dict):
            return dict(zip(self.column_names, cells, strict=False))
        if self.table is None or "" not in cells or "" not in self.table.names:
            return cells
        unnamed = self.column_names[self.table.names.index("")]
        return {name or unnamed: cell for name, cell in cells.items()}

    @property
    def fraction_read(self) -> float:
        """The fraction of the file that was read (0-1), by rows if the file's row count is known, else by bytes."""
        if self._at_end:
            return 1.0
        if self._num_rows is None:
            return getattr(self.path, "bytes_read", 0) / max(self.size, 1)
        return self._rows_read / max(self._num_rows, 1)

    def rows(self) -> Iterator[InputRow]:
        """Yield all rows in order. A bad row has an error instead of cells."""
        number = 0  # rows so far
        self._at_end = self.table is None
        if self.table is None:
            return
        row_errors = _CollectedErrors()
        usable_rows = self.table.rows(row_errors)
        while True:
            row = next(usable_rows, None)  # None: the end of the file
            for bad in row_errors.collected:  # the bad rows between the last usable row and this one
                number += 1
                self._rows_read = number
                reason = f"{bad.column}: {bad.reason}" if bad.column else bad.reason
                yield InputRow(number, bad.line, None, reason, self._path_in_folder(bad.file))
            row_errors.collected.clear()
            if row is None:
                self._at_end = True
                return
            number += 1
            self._rows_read = number
            line, cells = row
            path = str(cells["path"]) if self.is_folder and isinstance(cells, dict) else ""
            yield InputRow(number, line, cells, None, path)

    def _path_in_folder(self, file: str) -> str:
        """Return the path of a file relative to the folder, or "" if the input is a file."""
        return str(Path(file).relative_to(self.path)) if self.is_folder else ""

    def file_name(self, row: InputRow) -> str:
        """Return the name of the file that a row comes from."""
        return f"{self.name}/{row.path}" if row.path else self.name

    def engine_input(self, row: InputRow) -> tuple[object, str | None]:
        """Return (input, None) for a usable row, or (None, error) for a bad one."""
        if row.cells is None:
            return None, row.error
        assert self._make_input is not None, "a file without rows has no cells"
        try:
            return self._make_input(row.cells), None
        except CellError as error:
            return None, f"{error.column}: {error.reason}"


def _describe_first_cells(table: Table, columns: Columns) -> Iterator[str]:
    """Yield a description of the first cell of each column without a name, so that users notice a wrong column."""
    if not has_no_header(table):
        return
    first_cells = dict(zip(table.names, table.first_row, strict=False))
    for role, names in columns.names_by_role.items():
        for name in names:
            yield f"{role} = column {name}, {shown(first_cells[name])}"


def input_files(
    files: Sequence[Path], file_format: Format | None, kind: str, exclude: Path | None
) -> list[tuple[Path, str]]:
    """List the files to read. A folder is replaced by its files, but a folder with one text per file counts as one.

    Args:
        files: files and folders.
        file_format: the format. If None, the names of the files decide.
        kind: kind of the head. Only token classification accepts CoNLL.
        exclude: folder of predictions, whose files are skipped. If None, no files are skipped.

    Returns:
        The path of each input, and its name: the path relative to the folder that was given, or the last component of
        a path that was given itself.

    Raises:
        DataError: If there are no files, or if `exclude` is in a folder with one text per file.
    """
    conll_suffixes = [suffix for suffix, name in FORMAT_BY_SUFFIX.items() if name == "conll"]
    suffixes = [*TEXT_SUFFIXES, *(conll_suffixes if kind == "token_classification" else [])]
    listed: list[tuple[Path, str]] = []
    for path in files:
        is_folder = os.path.isdir(path)
        if is_folder and file_format == "class-files" and (class_files := [*list_text_files(path, exclude=exclude)]):
            # class files may have any suffix, so `list_files` would not list them
            listed += [(file, str(file.relative_to(path))) for file in class_files]
        elif is_folder and _has_text_files(path, file_format, suffixes):
            # answers in this folder would become texts when the same command is run again
            if exclude is not None and path.resolve() in (exclude.resolve(), *exclude.resolve().parents):
                raise DataError(
                    f"{exclude}: is inside the folder of texts {path}: give a folder for the answers outside of it"
                )
            listed.append((path, path.absolute().name))
        else:
            listed += list_files([path], exclude, suffixes)[0]
    if not listed:
        raise DataError("no files were given")
    return listed


def _has_text_files(folder: Path, file_format: Format | None, suffixes: Sequence[str]) -> bool:
    """Whether each file in a folder is one text.

    True with the format class-folders, false with any other format. Without a format, the names of the files decide: no
    file may have one of the suffixes of files that are inputs themselves, and the first file must be named as text.
    """
    if file_format == "class-folders":
        return any(True for _ in list_text_files(folder))
    if file_format is not None:
        return False
    if any(stem_and_suffix(path)[1] in suffixes for path in folder.rglob("*")):
        return False
    first_file = next(list_text_files(folder), None)
    return first_file is not None and is_named_as_text(first_file)


def open_inputs(
    files: Sequence[str | Path], kind: str, settings: DataSettings, *, exclude: Path | None
) -> list[InputFile]:
    """Open files, and the readable files in folders, as inputs of a head.

    Args:
        files: files and folders.
        kind: kind of the head.
        settings: how the files are read. If some files are plain text, which has no columns, the columns are only for
            the other files.
        exclude: folder of predictions, whose files are skipped. If None, no files are skipped.

    Raises:
        DataError: If a file is given twice or cannot be read, or if files have columns with different roles.
    """
    listed = input_files([Path(file) for file in files], settings.format, kind, exclude)
    seen: set[Path] = set()
    for path, _ in listed:
        if path.resolve() in seen:
            raise DataError(f"{path}: is given twice")
        seen.add(path.resolve())
    names = [name for _, name in listed]
    are_plain = [format_of(path, settings.format) == "text" for path, _ in listed]
    # if all files are plain text, the columns stay, so that a column that plain text lacks is an error
    plain_settings = settings if all(are_plain) else replace(settings, columns=None)
    opened = [
        InputFile(path, str(path) if names.count(name) > 1 else name, kind, plain_settings if is_plain else settings)
        for (path, name), is_plain in zip(listed, are_plain, strict=True)
    ]
    non_empty = [inputs for inputs in opened if inputs.table is not None]
    if differing := next((inputs for inputs in non_empty if inputs.roles != non_empty[0].roles), None):
        raise DataError(
            f"{non_empty[0].path} has columns for {', '.join(non_empty[0].roles)}, but {differing.path} for "
            f"{', '.join(differing.roles)}: predict them in separate commands, or "
            "name the columns (--data.columns.text=NAME)"
        )
    return opened


def file_stamp(path: Path) -> tuple[int, int]:
    """Return the size (bytes) and modification time (ns) of a file, or of all texts in a folder."""
    try:
        if os.path.isdir(path):
            stats = [file.stat() for file in list_text_files(path)]
            return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns


def without_split_settings(settings: DataSettings) -> DataSettings:
    """Return data settings without those of the generated dev split, which inputs do not have."""
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
    """Return the data settings of a training run that apply to unlabelled inputs.

    Args:
        trained: data settings of the run.
        kind: kind of the trained head.
        files: the input files.
        chosen: settings that the user sets for the input files. Columns of the run that cannot be combined with the
            chosen columns are left out.
        exclude: folder of predictions, whose files are skipped. If None, no files are skipped.
        names: names of the files that the run was trained on.
    """
    # inputs without labels do not show whether they are class files or class folders, so the run's format applies
    file_format = chosen.format or (trained.format if trained.format in LAYOUTS else None)
    paths = [path for path, _ in input_files(files, file_format, kind, exclude)]
    inherited = inherit_settings(trained, names, paths, chosen)
    if inherited.format in ("text", "conll", "squad", "glue"):
        # inputs need not have the format of labelled data: each file's suffix or content decides
        inherited = replace(inherited, format=None, columns=None)
    # a column of the run is inherited if the head has a form of input with its role and all chosen roles
    chosen_roles = {*(chosen.columns or ())}
    possible_specs = [spec for spec in INPUT_SPECS[kind] if chosen_roles <= {*spec.roles}]
    possible_roles = {role for spec in possible_specs for role in spec.roles}
    columns = {role: keys for role, keys in (inherited.columns or {}).items() if role in possible_roles}
    if kind == "token_classification":  # positions are those of columns in CoNLL, not in tables
        columns = {role: keys for role, keys in columns.items() if not has_number(keys)}
    if all(format_of(path, chosen.format or inherited.format) == "text" for path in paths):
        columns = {}  # plain text has no columns
    return without_split_settings(replace(inherited, columns=columns or None))
