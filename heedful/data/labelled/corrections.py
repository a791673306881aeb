"""Corrections of labels: a CSV file of examples that a person has reviewed, applied when data is read.

`heedful check --label-errors` writes the file; the setting `data.corrections` applies it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.data.bad_rows import Raise, RowErrors, Skip, shown
from heedful.data.examples import Example, LabelledExample, sort_labels
from heedful.data.formats.csv_escape import escape_cell
from heedful.data.labelled.data_file import DataFile, DataSettings, open_table
from heedful.errors import DataError, did_you_mean

CORRECTED_LABEL = "label"  # column of the label that a person edits
DATA_LABEL = "given_label"  # column of the label in the data
REQUIRED_COLUMNS = ("text", CORRECTED_LABEL, DATA_LABEL)
MAX_LISTED_LABELS = 20  # maximum labels listed in an error message
CorrectionKey = tuple[str, str, str]  # (text, second text, label in the data) of an example, as normalised cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """The corrected labels of a file."""

    name: str  # name of the file
    labels: Mapping[CorrectionKey, str]  # corrected labels by example; "": the example is left out

    def apply(self, example: LabelledExample) -> LabelledExample | None:
        """Return the example with its corrected label, unchanged without a correction, or None if it is left out."""
        label = self.labels.get(_key_of(example), example.label)
        return replace(example, label=label) if label else None


def _normalise_cell(text: str) -> str:
    """Normalise a text for comparison with cells of a spreadsheet: single spaces."""
    return " ".join(text.split())


def _cell_text(value: object) -> str:
    """Return a cell as text. An empty cell of Parquet or JSON lines, which is None, becomes ""."""
    return "" if value is None else str(value)


def _key(text: str, text_pair: str, label: str) -> CorrectionKey:
    return _normalise_cell(text), _normalise_cell(text_pair), _normalise_cell(label)


def _key_of(example: LabelledExample) -> CorrectionKey:
    return _key(example.text, example.text_pair or "", example.label)


def read_corrections(path: str | Path) -> Corrections:
    """Read a file that `write_review_file` wrote and a person edited. Rows with an unchanged label are ignored.

    Raises:
        DataError: If the file cannot be read, lacks a column, or corrects an example in two ways.
    """
    path = Path(path)
    row_errors = RowErrors(Raise())
    table = open_table(path, DataSettings(), row_errors)
    names = table.names
    if missing := [name for name in REQUIRED_COLUMNS if name not in names]:
        raise DataError(
            f"{path}: has no column {missing[0]}, but {', '.join(names)}; expected a file from heedful check "
            "--label-errors"
        )
    labels: dict[CorrectionKey, str] = {}
    for line, cells in table.rows(row_errors):
        row = cells if isinstance(cells, dict) else dict(zip(names, cells, strict=True))
        text, text_pair, data_label, label = (
            _cell_text(row.get(name)) for name in ("text", "text_pair", DATA_LABEL, CORRECTED_LABEL)
        )
        label = label.strip()
        key = _key(text, text_pair, data_label)
        if labels.setdefault(key, label) != label:
            raise DataError(
                f"{path}:{line}: {shown(text)} with the label {shown(data_label)} is corrected to {shown(label)}, and "
                f"to {shown(labels[key])} in an earlier row: give both rows the same label"
            )
    return Corrections(
        name=path.name, labels={key: label for key, label in labels.items() if _normalise_cell(label) != key[2]}
    )


def apply_corrections(
    files_by_split: Mapping[str, tuple[DataFile, ...]], corrections: Corrections
) -> tuple[dict[str, tuple[DataFile, ...]], list[str]]:
    """Apply corrections to the examples of all files. Each changed example is counted as a repair.

    Returns:
        The files with corrected examples, and notes about corrections that change nothing.

    Raises:
        DataError: If an example has no label or several, or no example has one of the corrected labels.
    """
    all_files = [file for files in files_by_split.values() for file in files]
    for file in all_files:
        if file.kind is not LabelledExample:
            raise DataError(
                f"--data.corrections={corrections.name} is for examples with one label, but each example of "
                f"{file.display_name} is {file.kind.about}: leave it out"
            )
    notes = _check_corrections(all_files, corrections)
    corrected = {
        split: tuple(_correct_file(file, corrections) for file in files) for split, files in files_by_split.items()
    }
    return corrected, notes


def _check_corrections(files: Iterable[DataFile], corrections: Corrections) -> list[str]:
    """Return a note if corrections match no example. Files are read until all labels and examples have occurred.

    Raises:
        DataError: If no example has one of the corrected labels.
    """
    unseen = {*corrections.labels.values()} - {""}  # corrected labels that have not occurred
    unmatched = dict.fromkeys(corrections.labels)  # examples to correct that have not occurred, in order
    known = set[str]()
    for file in files:
        unseen -= {*file.labels}
        known |= {*file.labels}
        for example in file.read(RowErrors(Skip())) if unseen or unmatched else ():
            assert isinstance(example, LabelledExample)
            known.add(example.label)
            unseen.discard(example.label)
            unmatched.pop(_key_of(example), None)
            if not unseen and not unmatched:
                break
    if unseen:
        key, label = next((key, label) for key, label in corrections.labels.items() if label in unseen)
        labels = sort_labels(known)
        listed = ", ".join(map(shown, labels[:MAX_LISTED_LABELS])) + (", …" if len(labels) > MAX_LISTED_LABELS else "")
        raise DataError(
            f"{corrections.name} corrects {shown(key[0])} to the label {shown(label)}, which no example has"
            f"{did_you_mean(label, labels)}: use one of {listed}, or add an example with the new label to the data"
        )
    if not unmatched:
        return []
    text, _, data_label = next(iter(unmatched))
    return [
        f"{corrections.name}: {len(unmatched):,} of {len(corrections.labels):,} corrections change nothing, since no "
        f"example has their text and {DATA_LABEL}, like {shown(text)} with {shown(data_label)}"
    ]


def _correct_file(file: DataFile, corrections: Corrections) -> DataFile:
    """Return a file whose examples are corrected when they are read."""

    def read(row_errors: RowErrors) -> Iterator[Example]:
        for index, example in enumerate(file.read(row_errors)):
            assert isinstance(example, LabelledExample)
            corrected = corrections.apply(example)
            if corrected != example:
                kind = f"{'corrected' if corrected else 'left out'} by {corrections.name}"
                row_errors.count_repair(kind, example.file, example.line, index)
            if corrected:
                yield corrected

    return replace(file, read=read)


def check_review_path(path: Path) -> None:
    """Raise DataError if `write_review_file` cannot create a file, so that nothing is computed in vain.

    The file must not exist, since it may contain a person's work, and its folder must exist.
    """
    if path.exists():
        raise DataError(f"{path}: exists already and may hold your work: give another --output")
    if not path.parent.is_dir():
        raise DataError(f"{path}: there is no folder {path.parent}: create it, or give another --output")


def write_review_file(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as a CSV file for spreadsheets: UTF-8 with a byte order mark, formulas escaped.

    Raises:
        DataError: If the file exists, since it may contain a person's work, or if it cannot be written.
    """
    names = list(columns)
    check_review_path(path)
    try:
        with path.open("x", encoding="utf-8-sig", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for row in rows:
                values = (row[name] for name in names)
                writer.writerow([escape_cell(value) if isinstance(value, str) else value for value in values])
    except FileExistsError:
        raise DataError(f"{path}: exists already and may hold your work: give another --output") from None
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # else the same command would find half a file
        raise DataError(f"{path}: cannot be written: {error.strerror}: give another --output") from None
