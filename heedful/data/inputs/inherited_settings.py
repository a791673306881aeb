"""Inheritance of data settings from a training run to other files, such as inputs and evaluation data.

Which settings apply depends on the formats and headers of the files.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from heedful.data.bad_rows import RowErrors, Skip
from heedful.data.formats.text_files import detect_encoding, read_head
from heedful.data.labelled.columns import KeysByRole, has_number
from heedful.data.labelled.data_file import (
    FORMAT_BY_SUFFIX,
    DataSettings,
    Format,
    format_of,
    open_table,
    stem_and_suffix,
)
from heedful.data.labelled.headers import names_known_roles
from heedful.data.labelled.in_memory import is_in_memory
from heedful.data.labelled.split_files import find_split_files
from heedful.errors import HeedfulError

NUMBERED_FORMATS = ("csv", "tsv")  # formats of tables whose columns may be set by position
NAMED_FORMATS = (*NUMBERED_FORMATS, "json", "jsonl", "parquet")  # formats of tables whose columns have names
JSON_FORMATS = ("json", "jsonl", "squad")  # formats that are always UTF-8
DEFAULT = DataSettings()


def list_data_files(data: object) -> list[Path]:
    """Return the files of data in any form that `heedful.data.read` accepts, or [] for data in memory."""
    if is_in_memory(data):
        return []
    match data:
        case str() | Path():
            folder = Path(data)
            if not folder.is_dir():
                return [folder]
            try:
                return [path for paths in find_split_files(folder)[0].values() for path in paths]
            except HeedfulError:
                return []
        case Mapping():
            return [path for files in data.values() for path in list_data_files(files)]
        case Sequence():
            return [path for files in data for path in list_data_files(files)]
    return []


def inherit_settings(
    trained: DataSettings, names: Iterable[str], files: Sequence[Path], chosen: DataSettings = DEFAULT
) -> DataSettings:
    """Return the data settings of a run that apply to other files.

    The format applies to files with the suffixes of the run's files. Encoding, delimiter, quoting and header apply to
    files of the same format. Column positions apply to CSV and TSV without a header. Corrections never apply.

    Args:
        trained: settings of the run.
        names: names of the run's files, or empty if they are unknown.
        files: the other files.
        chosen: settings that the user sets for the other files. They take precedence; the caller merges them.
    """
    trained = replace(trained, corrections=None)
    run_files = [Path(name) for name in names]
    run_formats = (
        {trained.format} if trained.format else {FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1]) for path in run_files}
    )
    if trained.format and not all(_same_suffix(path, run_files, trained.format) for path in files):
        trained = replace(trained, format=None)
    formats = {format_of(path, chosen.format or trained.format) for path in files}
    if trained.encoding and not _keeps_encoding(formats, run_formats, files):
        trained = replace(trained, encoding=None)
    # plain text files have no columns, so they matter only if the run was on plain text too
    table_formats = formats if run_formats == {"text"} else formats - {"text"}
    is_same_format = bool(table_formats) and table_formats <= (run_formats or {"csv"})
    if not is_same_format:
        trained = replace(trained, delimiter=None, quoting=None)
    numbered = {role: keys for role, keys in (trained.columns or {}).items() if has_number(keys)}
    numbers_apply = is_same_format or not run_formats
    if table_formats & {*NAMED_FORMATS}:
        numbers_apply = numbers_apply and table_formats <= {*NUMBERED_FORMATS}
        if numbers_apply and chosen.header is None:
            numbers_apply = not any(_has_header(path, trained, chosen, numbered) for path in files)
    if not numbers_apply:
        named = {role: keys for role, keys in (trained.columns or {}).items() if role not in numbered}
        trained = replace(trained, columns=named or None, header=None)
    return trained


def columns_by_name(settings: DataSettings, columns: Mapping[str, Sequence[str]]) -> DataSettings:
    """Return data settings with column positions replaced by names, if the data has a header.

    Args:
        settings: settings with which the data was read.
        columns: column names of the data by role. Without a header they are "1", "2", ...
    """
    columns_by_role = dict(settings.columns or {})
    for role, keys in columns_by_role.items():
        names = tuple(columns.get(role, ()))
        if has_number(keys) and names and not any(name.isdigit() for name in names):
            columns_by_role[role] = names[0] if len(names) == 1 else names
    return replace(settings, columns=columns_by_role or None)


def _same_suffix(path: Path, run_files: Sequence[Path], file_format: Format) -> bool:
    """Whether a file has the suffix of one of the run's files, for which the format was set."""
    suffix = stem_and_suffix(path)[1]
    if not run_files:
        return FORMAT_BY_SUFFIX.get(suffix, file_format) == file_format
    return suffix in {stem_and_suffix(file)[1] for file in run_files}


def _keeps_encoding(formats: Set[Format | None], run_formats: Set[Format | None], files: Sequence[Path]) -> bool:
    """Whether a run's encoding applies to files: all have the run's format, and none looks like UTF-8."""
    if formats & {*JSON_FORMATS} or (run_formats and not formats <= run_formats):
        return False
    return not any(_is_utf8(path) for path in files)


def _is_utf8(path: Path) -> bool:
    """Whether the beginning of a file is UTF-8 with characters beyond ASCII."""
    try:
        file, _ = detect_encoding(path, encoding="latin-1")
        head = read_head(file).encode("latin-1")
        return not head.isascii() and bool(codecs.getincrementaldecoder("utf-8")().decode(head))
    except (HeedfulError, UnicodeDecodeError):
        return False


def _has_header(path: Path, trained: DataSettings, chosen: DataSettings, numbered: KeysByRole) -> bool:
    """Whether a CSV or TSV file has a header, for columns that a run set by position. False for other files."""
    file_format = format_of(path, chosen.format or trained.format)
    if file_format not in NUMBERED_FORMATS or not numbered or trained.header:
        return False
    options = {name: getattr(chosen, name) or getattr(trained, name) for name in ("encoding", "delimiter", "quoting")}
    try:
        row_errors = RowErrors(Skip())
        table = open_table(path, DataSettings(format=file_format, header=False, **options), row_errors)
        _, first_row = next(table.rows(row_errors), (0, []))
    except HeedfulError:  # the file has no rows, or the error is reported when it is read
        return False
    return names_known_roles(list(first_row), numbered)
