"""Data settings of a training run that apply to other files: an encoding belongs to a format, numbers to a header."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from pathlib import Path

from heedful.data.bad_rows import RowErrors, Skip
from heedful.data.formats.text_files import NoRowsError, read_head
from heedful.data.formats.text_files import detect_encoding as find_file
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

ORDERED = ("csv", "tsv")  # formats with numbered columns
NAMED = (*ORDERED, "json", "jsonl", "parquet")  # formats with named columns
OF_JSON = ("json", "jsonl", "squad")  # formats that are always UTF-8
DEFAULT = DataSettings()


def list_data_files(data: object) -> list[Path]:
    """Files of data in any form that `heedful.data.read` accepts; [] for data in memory."""
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

    The format applies to files with the suffixes of the run's files; encoding, delimiter, quoting and header apply to
    files of the same format. Column numbers apply to CSV and TSV without a header. Corrections do not apply.

    Args:
        trained: settings of the run.
        names: names of the run's files; empty: unknown.
        files: the other files.
        chosen: settings given for the other files, which override the result.
    """
    trained = replace(trained, corrections=None)
    run_files = [Path(name) for name in names]
    known = (
        {trained.format} if trained.format else {FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1]) for path in run_files}
    )
    if trained.format and not all(_same_suffix(path, run_files, trained.format) for path in files):
        trained = replace(trained, format=None)
    forms = {format_of(path, chosen.format or trained.format) for path in files}
    if trained.encoding and not _keeps_encoding(forms, known, files):
        trained = replace(trained, encoding=None)
    tables = forms if known == {"text"} else forms - {"text"}
    same = bool(tables) and tables <= (known or {"csv"})
    if not same:
        trained = replace(trained, delimiter=None, quoting=None)
    numbers = {role: keys for role, keys in (trained.columns or {}).items() if has_number(keys)}
    if tables & {*NAMED}:
        holds = tables <= {*ORDERED} and (same or not known)
        holds = holds and not (
            chosen.header is None and any(_has_header(path, trained, chosen, numbers) for path in files)
        )
    else:
        holds = same or not known
    if not holds:
        by_name = {role: keys for role, keys in (trained.columns or {}).items() if role not in numbers}
        trained = replace(trained, columns=by_name or None, header=None)
    return trained


def columns_by_name(settings: DataSettings, columns: Mapping[str, Sequence[str]]) -> DataSettings:
    """Replace column numbers by names if the data has a header.

    Args:
        settings: settings with which the data was read.
        columns: role to column names; "1", "2", ... without a header.
    """
    columns_by_role = dict(settings.columns or {})
    for role, keys in columns_by_role.items():
        names = tuple(columns.get(role, ()))
        if has_number(keys) and names and not any(name.isdigit() for name in names):
            columns_by_role[role] = names[0] if len(names) == 1 else names
    return replace(settings, columns=columns_by_role or None)


def _same_suffix(path: Path, run_files: Sequence[Path], form: Format) -> bool:
    """Whether a file has the suffix of those for which the format was set."""
    suffix = stem_and_suffix(path)[1]
    return (
        suffix in {stem_and_suffix(file)[1] for file in run_files}
        if run_files
        else FORMAT_BY_SUFFIX.get(suffix, form) == form
    )


def _keeps_encoding(forms: Set[Format | None], known: Set[Format | None], files: Sequence[Path]) -> bool:
    """Whether files use a run's encoding: all are of its format, and none looks like UTF-8."""
    if forms & {*OF_JSON} or (known and not forms <= known):
        return False
    return not any(_is_utf8(path) for path in files)


def _is_utf8(path: Path) -> bool:
    """Whether the beginning of a file is UTF-8 with characters beyond ASCII."""
    try:
        file, _ = find_file(path, encoding="latin-1")
        head = read_head(file).encode("latin-1")
        return not head.isascii() and bool(codecs.getincrementaldecoder("utf-8")().decode(head))
    except (HeedfulError, UnicodeDecodeError):
        return False


def _has_header(path: Path, trained: DataSettings, chosen: DataSettings, numbers: KeysByRole) -> bool:
    """Whether a CSV or TSV file has a header."""
    form = format_of(path, chosen.format or trained.format)
    if form not in ORDERED or not numbers or trained.header:
        return False
    how = {name: getattr(chosen, name) or getattr(trained, name) for name in ("encoding", "delimiter", "quoting")}
    try:
        row_errors = RowErrors(Skip())
        table = open_table(path, DataSettings(format=form, header=False, **how), row_errors)
        first = next(islice((cells for _, cells in table.rows(row_errors)), 1), [])
    except NoRowsError:
        return False
    except HeedfulError:  # reported when the file is read
        return False
    return names_known_roles(list(first), numbers)
