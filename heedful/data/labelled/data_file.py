"""One data file, or one object in memory: settings, detection of format and columns, and reading of examples.

A `Dataset` opens each of its files with `open_data_file`. `open_table` opens files without roles of columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.examples import (
    Example,
    LabelledExample,
    MultiLabelExample,
    QuestionExample,
    TaggedExample,
    TextExample,
)
from heedful.data.formats import conll, label_text, squad
from heedful.data.formats.csv_escape import is_review_header, unescape_cell
from heedful.data.formats.tables import (
    DatasetObject,
    Rows,
    Table,
    read_dataset_object,
    read_delimited,
    read_json_lines,
    read_json_list,
    read_parquet,
)
from heedful.data.formats.text_files import (
    COMPRESSED,
    MAX_ROW_BYTES,
    TextFile,
    check_file,
    detect_encoding,
    read_head,
    read_text_lines,
)
from heedful.data.labelled.column_guess import has_no_header
from heedful.data.labelled.columns import Columns, MissingColumnError, has_number, is_header, resolve_columns
from heedful.data.labelled.headers import check_header
from heedful.data.labelled.row_reader import read_examples
from heedful.errors import DataError, HeedfulError, SettingError

Format = Literal[
    "csv",
    "tsv",
    "jsonl",
    "json",
    "parquet",
    "text",
    "label-text",
    "class-files",
    "class-folders",
    "conll",
    "squad",
    "glue",
]
OPTIONAL_ROLES = {  # roles for which either all files of a dataset have a column, or none
    *("text_pair", "score", "prompt", "question", "negative", "document", "teacher_scores"),
}
PLAIN_TEXT_NOTE = "one text on each line; empty lines are left out"
FORMAT_BY_SUFFIX: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".label": "label-text",
    ".conll": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".bio": "conll",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """How data is read. A setting that is None is detected and reported."""

    format: Format | None = None  # file format; None: by the file's name and first lines
    # column of each role, by name or by number from 1; several columns are joined (texts) or listed (labels, choices)
    columns: dict[str, str | int | tuple[str | int, ...]] | None = None
    encoding: str | None = None  # text encoding; None: UTF-8, or as the byte order mark says
    header: bool | None = None  # whether the first row of CSV, TSV and CoNLL names the columns
    delimiter: str | None = None  # separator; None: comma (or semicolon or tab, by the first row); in TSV a tab
    quoting: Literal["quoted", "literal"] | None = None  # None: quotes enclose cells in CSV and are characters in TSV
    label_until: str | None = None  # cut labels at the first of these: ":" makes "DESC:manner" the coarse label "DESC"
    corrections: str | None = None  # CSV file of reviewed labels, from check --label-errors, applied to examples
    dev_fraction: float = 0.1  # share of train that becomes the dev split if the data have none; 0: no dev split
    seed: int = 0  # seed of the dev split
    max_row_bytes: int = MAX_ROW_BYTES  # a longer row is a bad row; texts in memory are counted in characters

    def __post_init__(self) -> None:
        if not 0 <= self.dev_fraction < 1:
            raise SettingError(
                f"dev_fraction is {self.dev_fraction}, expected a share from 0 up to 1", path="dev_fraction"
            )
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise SettingError(f"delimiter is {shown(self.delimiter)}, expected one character", path="delimiter")
        if self.label_until == "":
            raise SettingError('label_until is "", expected text that occurs in labels, like ":"', path="label_until")
        if self.max_row_bytes < 1:
            raise SettingError(
                f"max_row_bytes is {self.max_row_bytes}, expected a number of bytes", path="max_row_bytes"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Settings of commands that read data without training; options are called --data.x, as in a run."""

    data: DataSettings = DataSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file or object with examples. Each call of `read` starts from the first row."""

    display_name: str  # name of the file or object in messages
    kind: type[Example]
    read: Callable[[RowErrors], Iterator[Example]]
    notes: tuple[str, ...]  # sentences for the user about what was detected
    labels: tuple[str, ...] = ()  # label names that come with the data, in order
    optional_roles: frozenset[str] = frozenset()  # optional roles with columns; equal for all files of a dataset
    # column names by role; without a header "1", "2", ...
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def stem_and_suffix(path: Path) -> tuple[str, str]:
    """Split the name of a file into stem and suffix, without a suffix of compression. An unknown suffix becomes "".

    >>> stem_and_suffix(Path("folder/dev-v1.1.json.gz")), stem_and_suffix(Path("eng.train"))
    (('dev-v1.1', '.json'), ('eng.train', ''))
    """
    name = Path(path.name.removesuffix(path.suffix)) if path.suffix in COMPRESSED else Path(path.name)
    suffix = name.suffix.lower()
    return (name.stem, suffix) if suffix in FORMAT_BY_SUFFIX else (name.name, "")


def format_of(path: Path, requested: Format | None) -> Format | None:
    """Return the requested format, else the format of the file's suffix, or None if the suffix is unknown."""
    return requested or FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1])


def open_data_file(path: Path, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors) -> DataFile:
    """Open a file with examples: detect its format and find its columns.

    Args:
        path: the file.
        kind: class of the examples. If None, it is detected.
        settings: how the file is read.
        row_errors: handles bad rows among the rows that are examined.

    Raises:
        DataError: If the file cannot be read, or has no examples of the class.
        MissingColumnError: If a required role has no column.
    """
    if settings.format == "parquet" or (settings.format is None and stem_and_suffix(path)[1] == ".parquet"):
        check_file(path)
        return from_table(read_parquet(path, row_errors), kind, settings)
    detected = replace(settings, format=None, columns=None, encoding=None, header=None, delimiter=None, quoting=None)
    is_review_file = settings != detected and _is_review_file(path)  # the settings are meant for the other files
    settings = detected if is_review_file else settings
    file, notes = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    if is_review_file:
        notes.append(f"{path.name}: settings of the format and the columns of data are not used for it")
    file_format = settings.format or _detect_format(file, kind)
    if file_format == "squad" or (file_format == "json" and kind in (None, QuestionExample) and is_squad(file)):
        return _open_squad(file, kind, settings, notes)
    if file_format == "conll":
        return _open_conll(file, kind, settings, notes)
    if file_format == "label-text":
        check_column_roles(file.display_name, "a label and a text on each line", settings, ("labels",))
        multi_label = False if kind is LabelledExample else None  # None: detected
        if kind is MultiLabelExample or "labels" in (settings.columns or {}):
            multi_label = True
        return from_table(label_text.read_table(file, row_errors, multi_label), kind, settings, notes)
    if file_format == "text":
        _require_kind(file, kind, TextExample, "plain text")
        check_column_roles(file.display_name, "plain text", settings)
        return DataFile(
            display_name=file.display_name,
            kind=TextExample,
            read=lambda row_errors: read_texts(file, row_errors),
            notes=(*notes, PLAIN_TEXT_NOTE),
        )
    return from_table(_open_rows(file, file_format, settings, row_errors), kind, settings, notes)


def _is_review_file(path: Path) -> bool:
    """Whether a file is one that `heedful select` or `heedful check --label-errors` wrote, perhaps edited by hand."""
    if stem_and_suffix(path)[1] != ".csv":
        return False
    try:
        names = open_table(path, DataSettings(header=True), RowErrors(Skip())).names
    except HeedfulError:
        return False
    return is_review_header(names) and "suggested_label" in names and bool({"margin", "given_label"} & {*names})


def open_table(path: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file as a table whose columns have no roles. Each line of plain text is a row.

    Raises:
        DataError: If the file cannot be read, or is in CoNLL format or SQuAD's JSON.
    """
    suffix = stem_and_suffix(path)[1]
    if settings.format == "parquet" or (settings.format is None and suffix == ".parquet"):
        check_file(path)
        return read_parquet(path, row_errors)
    file, notes = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    file_format = settings.format or FORMAT_BY_SUFFIX.get(suffix)
    if file_format in (None, "text") and settings.format is None and label_text.is_label_text(file, strict=True):
        file_format = "label-text"
    if file_format is None:
        raise _unknown_format_error(file)
    if file_format == "label-text":
        table = label_text.read_table(file, row_errors, None)
        return replace(table, notes=(*notes, *table.notes))
    if file_format == "text":
        table = Table(
            display_name=file.display_name,
            names=("text",),
            first_row=[""],
            rows=lambda row_errors: _text_rows(file, row_errors),
        )
        return replace(table, notes=(*notes, PLAIN_TEXT_NOTE))
    if file_format not in ("csv", "tsv", "json", "jsonl") or (file_format == "json" and is_squad(file)):
        what = "SQuAD's JSON" if file_format == "json" else file_format
        raise DataError(
            f"{path}: {what} is not a table: convert it to CSV, TSV, JSON lines or Parquet, with a row for each input"
        )
    table = _open_rows(file, file_format, settings, row_errors)
    # the keys of the first row are the columns; a row with other keys is reported when it is read
    names = tuple(table.first_row) if isinstance(table.first_row, dict) else table.names
    return replace(table, names=names, notes=(*notes, *table.notes))


def _text_rows(file: TextFile, row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of plain text."""
    for example in read_texts(file, row_errors):
        yield example.line, [example.text]


def _open_rows(file: TextFile, file_format: Format, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file of CSV, TSV, JSON or JSON lines as a table."""
    if file_format == "csv" or file_format == "tsv":
        return _delimited_table(file, file_format, settings, row_errors)
    if file_format not in ("json", "jsonl"):
        raise DataError(f"{file.display_name}: format={file_format} is for a folder, and this is a file")
    if file_format == "jsonl" or is_json_lines(file):
        return read_json_lines(file, row_errors)
    return read_json_list(file, row_errors)


def from_object(
    name: str, data: DatasetObject, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors
) -> DataFile:
    """Open data in memory as a file with examples."""
    return from_table(read_dataset_object(name, data, row_errors), kind, settings)


def from_table(
    table: Table, kind: type[Example] | None, settings: DataSettings, notes: list[str] | None = None
) -> DataFile:
    """Read the rows of a table as examples, by the roles of its columns.

    Args:
        table: the table.
        kind: class of the examples. If None, it is detected from the columns.
        settings: how the data is read.
        notes: sentences for the user, before the notes of the table.
    """
    columns = resolve_columns(table, kind, settings.columns or {})
    if "label" in columns.names_by_role and isinstance(table.first_row, dict):
        label = columns.names_by_role["label"][0]
        if table.first_row.get(label) == -1 and table.label_names.get(label):
            raise MissingColumnError(
                f"{table.display_name}: labels are hidden: {shown(label)} is -1, which means no label", "label"
            )

    def read(row_errors: RowErrors) -> Iterator[Example]:
        return read_examples(table, columns, row_errors, settings.max_row_bytes)

    return DataFile(
        display_name=table.display_name,
        kind=columns.kind,
        read=read,
        notes=(*(notes or ()), *table.notes, columns.note),
        labels=_label_names(table, columns),
        optional_roles=frozenset(columns.names_by_role) & OPTIONAL_ROLES - {*columns.kind.needed},
        columns=columns.names_by_role,
    )


def _label_names(table: Table, columns: Columns) -> tuple[str, ...]:
    """Return the label names that come with a table, or () if it has none."""
    for role in ("label", "labels"):
        if role in columns.names_by_role:
            return table.label_names.get(columns.names_by_role[role][0], ())
    return ()


# ---------------------------------------------------------------------------------------------------- formats


def read_texts(file: TextFile, row_errors: RowErrors) -> Iterator[TextExample]:
    """Yield one text per line. Empty lines are skipped."""
    for line_number, line in read_text_lines(file, row_errors):
        if line.strip():
            yield TextExample(file=file.display_name, line=line_number, text=line)


def _detect_format(file: TextFile, kind: type[Example] | None) -> Format:
    """Detect the format of a file by its suffix, its first lines, and the class of its examples."""
    suffix = stem_and_suffix(file.path)[1]
    file_format = FORMAT_BY_SUFFIX.get(suffix)
    needs_tags = kind is TaggedExample
    may_be_conll = needs_tags or file_format in (None, "text", "tsv")
    if may_be_conll and file_format not in ("csv", "json", "jsonl"):
        head = read_head(file)
        first_line = head.split("\n", 1)[0]
        has_tsv_header = file_format == "tsv" and is_header(first_line.split("\t"), None, {})
        looks_like_conll = conll.is_conll(head) or conll.has_header(head, blank_lines=True)
        if needs_tags and not has_tsv_header:
            return "conll"
        if looks_like_conll and (kind is None or needs_tags):
            return "conll"
    if file_format in (None, "text"):
        labelled_format = _detect_labelled_format(file, kind, guess=kind is not None or file_format is None)
        if labelled_format is not None:
            return labelled_format
    if file_format is None:
        raise _unknown_format_error(file)
    return file_format


def _detect_labelled_format(file: TextFile, kind: type[Example] | None, *, guess: bool) -> Format | None:
    """Detect labelled texts or tab-separated columns in a file whose suffix does not decide the format.

    Args:
        file: the file.
        kind: class of the examples. If None, any class is possible.
        guess: whether weak evidence is enough, since the file cannot have another format.

    Returns:
        The format, or None if the file has neither.
    """
    may_have_labels = kind in (None, LabelledExample, MultiLabelExample)
    if may_have_labels and label_text.is_label_text(file, strict=True):
        return "label-text"
    if guess and kind not in (TextExample, TaggedExample) and label_text.is_tab_separated(file):
        return "tsv"
    if guess and may_have_labels and label_text.is_label_text(file, strict=False):
        return "label-text"
    return None


def _unknown_format_error(file: TextFile) -> HeedfulError:
    suffixes = ", ".join(FORMAT_BY_SUFFIX)
    return DataError(
        f"{file.display_name}: the format is not known: the name should end in {suffixes}; or set it, as in "
        "--data.format=csv"
    )


def _delimited_table(
    file: TextFile, file_format: Literal["csv", "tsv"], settings: DataSettings, row_errors: RowErrors
) -> Table:
    """Open a CSV or TSV file, with the delimiter and quoting that are set or detected."""
    notes = []
    delimiter = settings.delimiter or ("\t" if file_format == "tsv" else ",")
    if settings.delimiter is None and file_format == "csv":
        first_line = read_head(file).split("\n", 1)[0]
        separator = max(";\t", key=first_line.count)
        if "," not in first_line and separator in first_line:
            delimiter = separator
            plural = "tabs" if separator == "\t" else "semicolons"
            notes = [f"{file.path.name}: cells are separated by {plural}"]
    quoted = settings.quoting == "quoted" if settings.quoting else file_format == "csv"
    table = read_delimited(
        file,
        row_errors,
        delimiter=delimiter,
        quoted=quoted,
        is_header=lambda cells: is_header(cells, settings.header, settings.columns or {}),
    )
    if settings.header is None and has_no_header(table) and any(map(has_number, (settings.columns or {}).values())):
        check_header(table)
    notes += [] if quoted else [f"{file.path.name}: quotes are read literally"]
    if is_review_header(table.names):
        table = _unescape_table(table)
        notes.append(f"{file.path.name}: from select or check --label-errors; the ' before formulas is removed")
    return replace(table, notes=(*notes, *table.notes), header=settings.header)


def _unescape_table(table: Table) -> Table:
    """Return a table of CSV without the escapes of its cells."""

    def rows(row_errors: RowErrors) -> Rows:
        for line, cells in table.rows(row_errors):
            yield line, [*map(unescape_cell, cells)]

    return replace(table, first_row=[*map(unescape_cell, table.first_row)], rows=rows)


def is_json_lines(file: TextFile) -> bool:
    """Whether a .json file contains JSON lines: the first line is an object, and other lines follow."""
    first_line, newline, rest = read_head(file).lstrip().partition("\n")
    try:
        return bool(newline and rest.strip()) and isinstance(json.loads(first_line), dict)
    except (ValueError, RecursionError):
        return False


def is_squad(file: TextFile) -> bool:
    """Whether the beginning of a JSON file has articles with paragraphs under "data"."""
    head = read_head(file).lstrip()
    start = re.search(r'"data"\s*:\s*\[\s*\{', head)
    return head.startswith("{") and start is not None and '"paragraphs"' in head[start.end() :]


def _open_squad(file: TextFile, kind: type[Example] | None, settings: DataSettings, notes: list[str]) -> DataFile:
    _require_kind(file, kind, QuestionExample, "questions in SQuAD's JSON")
    check_column_roles(file.display_name, "SQuAD's JSON", settings)
    version = "v1.1: the beginning of the file has no impossible questions"
    if '"is_impossible"' in read_head(file):
        version = "v2.0: questions may be impossible"
    return DataFile(
        display_name=file.display_name,
        kind=QuestionExample,
        read=partial(squad.read_questions, file),
        notes=(*notes, f"SQuAD's JSON, {version}"),
    )


def _open_conll(file: TextFile, kind: type[Example] | None, settings: DataSettings, notes: list[str]) -> DataFile:
    _require_kind(file, kind, TaggedExample, "words with tags")
    word = column_position(file, settings, "words", 1)
    tag = column_position(file, settings, "tags", 0)
    check_column_roles(file.display_name, "columns without names", settings, ("words", "tags"))
    header = conll.has_header(read_head(file), word, tag) if settings.header is None else settings.header
    if header:
        notes = [*notes, f"{file.path.name}: its first line names the columns, unless header=false is set"]
    columns = f"words in column {word}, the tag in {f'column {tag}' if tag else 'the last'}"
    return DataFile(
        display_name=file.display_name,
        kind=TaggedExample,
        read=partial(conll.read_sentences, file, word=word, tag=tag, header=header),
        notes=(*notes, columns),
    )


def check_column_roles(name: str, what: str, settings: DataSettings, allowed: tuple[str, ...] = ()) -> None:
    """Raise DataError if a column is set that a format does not have.

    Args:
        name: name of the file, for messages.
        what: description of the file's contents, for messages.
        settings: settings with columns.
        allowed: roles of the columns that the format has.
    """
    if extra_roles := [role for role in settings.columns or {} if role not in allowed]:
        raise DataError(
            f"{name}: is {what}, which has no column for columns.{extra_roles[0]}: leave it out, or set data.format"
        )


def column_position(file: TextFile, settings: DataSettings, role: str, default: int) -> int:
    """Return the position of a CoNLL column, from 1, or 0 for the last one."""
    key = (settings.columns or {}).get(role, default)
    if isinstance(key, str) and key.isdecimal():
        key = int(key)
    if not isinstance(key, int) or (key < 1 and key != default):
        raise DataError(f"{file.display_name}: its columns have no names: set columns.{role} to a number from 1")
    return key


def _require_kind(file: TextFile, kind: type[Example] | None, file_kind: type[Example], what: str) -> None:
    """Raise DataError if a task needs other examples than a file has; `what` describes those of the file."""
    if kind not in (None, file_kind):
        assert kind is not None
        raise DataError(f"{file.display_name}: holds {what}, but this task needs {kind.about} in each example")
