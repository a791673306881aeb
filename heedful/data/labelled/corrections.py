"""Corrections of labels: a CSV file of examples whose labels a person has reviewed, applied when data is read."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.data.bad_rows import Raise, RowErrors, Skip, shown
from heedful.data.examples import Example, LabelledExample, sort_labels
from heedful.data.formats.csv_escape import escape_cell
from heedful.data.labelled.data_file import DataFile, DataSettings, open_table
from heedful.errors import DataError, did_you_mean

LABEL, GIVEN = "label", "given_label"  # the column that a person edits, and the label in the data
NEEDED = ("text", LABEL, GIVEN)
SHOWN_LABELS = 20  # in an error message
Key = tuple[str, str, str]  # text, second text and label in the data, as cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Corrected labels by example; "": the example is left out."""

    name: str  # of the file
    labels: Mapping[Key, str]

    def apply(self, example: LabelledExample) -> LabelledExample | None:
        """Return the example with its corrected label; None: it is left out."""
        label = self.labels.get(_key(example.text, example.text_pair or "", example.label), example.label)
        return replace(example, label=label) if label else None


def _cell(text: str) -> str:
    """Return a text as a spreadsheet may have saved it, to compare it: escaped, with single spaces."""
    return " ".join(escape_cell(text).split())


def _key(text: str, text_pair: str, label: str) -> Key:
    return _cell(text), _cell(text_pair), _cell(label)


def read_corrections(path: str | Path) -> Corrections:
    """Read a file that `write_review_file` made and a person edited; only rows whose label was edited count.

    Raises:
        DataError: If the file cannot be read, lacks a column, or corrects an example in two ways.
    """
    path = Path(path)
    row_errors = RowErrors(Raise())
    table = open_table(path, DataSettings(), row_errors)
    names = table.names
    if missing := [name for name in NEEDED if name not in names]:
        raise DataError(
            f"{path}: has no column {missing[0]}, but {', '.join(names)}; expected a file from heedful check "
            "--label-errors"
        )
    labels: dict[Key, str] = {}
    for line, cells in table.rows(row_errors):
        row = cells if isinstance(cells, dict) else dict(zip(names, cells, strict=True))
        text, text_pair, given_label, label = (str(row.get(name) or "") for name in ("text", "text_pair", GIVEN, LABEL))
        key = _unescaped(text), _unescaped(text_pair), _unescaped(given_label)
        label = _unescaped(label).strip()
        if labels.setdefault(_key(*key), label) != label:
            raise DataError(
                f"{path}:{line}: {shown(key[0])} with the label {shown(key[2])} is corrected to {shown(label)}, and to "
                f"{shown(labels[_key(*key)])} in an earlier row: correct both alike"
            )
    return Corrections(name=path.name, labels={key: label for key, label in labels.items() if _cell(label) != key[2]})


def _unescaped(cell: str) -> str:
    """Return the text of a cell that `escape_cell` may have prefixed."""
    return cell[1:] if cell.startswith("'") and escape_cell(cell[1:]) == cell else cell


def corrected(parts: Mapping[str, tuple[DataFile, ...]], corrections: Corrections) -> dict[str, tuple[DataFile, ...]]:
    """Apply corrections to the examples of the files of each split; each changed example is counted as a repair.

    Raises:
        DataError: If the examples have no single label, or a corrected label is one that no example has.
    """
    files = [part for of in parts.values() for part in of]
    for part in files:
        if part.kind is not LabelledExample:
            raise DataError(
                f"--data.corrections={corrections.name} is for examples with one label, but each example of "
                f"{part.display_name} is {part.kind.about}: leave it out"
            )
    _require_known_labels(files, corrections)
    return {split: tuple(_corrected(part, corrections) for part in of) for split, of in parts.items()}


def _require_known_labels(files: Iterable[DataFile], corrections: Corrections) -> None:
    """Raise a DataError for a corrected label that no example has; files are read until all labels were seen."""
    unseen, known = {*corrections.labels.values()} - {""}, set[str]()
    for part in files:
        unseen -= {*part.labels}
        known |= {*part.labels}
        examples = part.read(RowErrors(Skip())) if unseen else ()
        for example in examples:
            assert isinstance(example, LabelledExample)
            known.add(example.label)
            unseen.discard(example.label)
            if not unseen:
                break
    if not unseen:
        return
    key, label = next((key, label) for key, label in corrections.labels.items() if label in unseen)
    labels = sort_labels(known)
    listed = ", ".join(map(shown, labels[:SHOWN_LABELS])) + (", …" if len(labels) > SHOWN_LABELS else "")
    raise DataError(
        f"{corrections.name} corrects {shown(key[0])} to the label {shown(label)}, which no example has"
        f"{did_you_mean(label, labels)}: use one of {listed}, or add an example with the new label to the data"
    )


def _corrected(part: DataFile, corrections: Corrections) -> DataFile:
    def read(row_errors: RowErrors) -> Iterator[Example]:
        for number, example in enumerate(part.read(row_errors)):
            assert isinstance(example, LabelledExample)
            changed = corrections.apply(example)
            if changed != example:
                what = f"labels corrected by {corrections.name}" if changed else f"left out by {corrections.name}"
                row_errors.count_repair(what, example.file, example.line, number)
            if changed:
                yield changed

    return replace(part, read=read)


def write_review_file(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as a CSV file that a person opens in a spreadsheet: UTF-8 with a byte order mark, formulas escaped.

    Raises:
        DataError: If the file exists, since it may hold a person's work, or cannot be written.
    """
    names = list(columns)
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
        raise DataError(f"{path}: cannot be written: {error.strerror}: give another --output") from None
