"""Folders of GLUE's tasks (Wang et al. 2019) as labelled data: their files and columns, recognised by their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from heedful.data.bad_rows import RowErrors
from heedful.data.examples import Example, LabelledExample, PairExample, ScoredExample
from heedful.data.formats.tables import Cells, Rows, Table, read_delimited
from heedful.data.formats.text_files import detect_encoding
from heedful.data.labelled.columns import Columns, resolve_columns
from heedful.data.labelled.data_file import DataFile, DataSettings, check_column_roles
from heedful.data.labelled.row_reader import read_examples
from heedful.errors import DataError

Keys = dict[str, str | int]  # column by role, as a name or a position from 1
PLAIN_FILES = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}  # file by split
MNLI_FILES = {
    "train": "train.tsv",
    "dev": "dev_matched.tsv",
    "dev-mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test-mismatched": "test_mismatched.tsv",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueLayout:
    """The files and columns of one task."""

    columns: Keys
    header: bool = True  # whether the files have a header
    kind: type[Example] = LabelledExample
    files: dict[str, str] = field(default_factory=lambda: PLAIN_FILES)  # file by split
    note: str = ""  # sentence for the user; "": no note


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledTest:
    """A test file with labels, used instead of test.tsv, which has none."""

    file: str
    columns: Keys
    header: bool


_SENTENCES: Keys = {"text": "sentence1", "text_pair": "sentence2"}
PAIR_ROLES = {"text": "anchor", "text_pair": "positive"}  # role in a PairExample by role in a ScoredExample
_MRPC: Keys = {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}
LAYOUTS: dict[str, GlueLayout] = {
    "CoLA": GlueLayout(columns={"text": 4, "label": 2}, header=False),
    "SST-2": GlueLayout(columns={"text": "sentence", "label": "label"}),
    "MRPC": GlueLayout(columns=_MRPC),
    "STS-B": GlueLayout(columns=_SENTENCES | {"score": "score"}, kind=ScoredExample),
    "QQP": GlueLayout(columns={"text": "question1", "text_pair": "question2", "label": "is_duplicate"}),
    "MNLI": GlueLayout(columns=_SENTENCES | {"label": "gold_label"}, files=MNLI_FILES),
    "QNLI": GlueLayout(columns={"text": "question", "text_pair": "sentence", "label": "label"}),
    "RTE": GlueLayout(columns=_SENTENCES | {"label": "label"}),
    "WNLI": GlueLayout(
        columns=_SENTENCES | {"label": "label"},
        note="WNLI: dev repeats sentences of train with other labels, so that few models are better than the majority",
    ),
}
LABELLED_TESTS = {
    "MRPC": LabelledTest(file="msr_paraphrase_test.txt", columns=_MRPC, header=True),
    "STS-B": LabelledTest(file="original/sts-test.tsv", columns={"text": 6, "text_pair": 7, "score": 5}, header=False),
}
MRPC_ORIGINAL = "msr_paraphrase_train.txt"  # file with train and dev of MRPC


def task_of(folder: Path) -> str | None:
    """Return the GLUE task that a folder is named after, or None if there is no such task or its files are missing."""
    if not any(os.path.isfile(folder / name) for name in ("train.tsv", "dev.tsv", "dev_matched.tsv")):
        return None
    tasks = {task.replace("-", "").casefold(): task for task in LAYOUTS}
    return tasks.get(folder.absolute().name.replace("-", "").replace("_", "").casefold())


def open_task(
    folder: Path, task: str, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors
) -> tuple[dict[str, tuple[DataFile, ...]], list[str]]:
    """Open the splits of a task's folder. A test split without labels is left out.

    Returns:
        The files of each split, and notes for the user.

    Raises:
        DataError: If the task needs examples of another class, or a file cannot be read.
    """
    layout = LAYOUTS[task]
    if layout.kind is ScoredExample and kind is PairExample:
        layout = replace(layout, kind=PairExample)
    if kind not in (None, layout.kind):
        assert kind is not None
        raise DataError(f"{folder}: an example of {task} is {layout.kind.about}, but this task needs {kind.about}")
    check_column_roles(str(folder), f"GLUE's {task}", settings)
    files_by_split: dict[str, tuple[DataFile, ...]] = {}
    notes = [f"GLUE's {task}; quotes are read literally", *([layout.note] if layout.note else [])]
    for split, name in layout.files.items():
        columns, header = layout.columns, layout.header
        labelled_test = LABELLED_TESTS.get(task) if split == "test" else None
        if labelled_test is not None and (folder / labelled_test.file).is_file():
            notes.append(f"{split}: {labelled_test.file}, since the labels of {name} are hidden")
            name, columns, header = labelled_test.file, labelled_test.columns, labelled_test.header
        elif not (folder / name).is_file():
            continue
        elif split.startswith("test"):
            notes.append(f"{name}: its labels are hidden, so it is left out")
            continue
        files_by_split[split] = (_open_file(folder / name, layout.kind, columns, header, settings, row_errors),)
    if task == "MRPC" and {"train", "dev"} <= set(files_by_split) and (folder / MRPC_ORIGINAL).is_file():
        notes += _add_missing_pairs(folder, files_by_split, settings, row_errors)
    notes += dict.fromkeys(note for files in files_by_split.values() for file in files for note in file.notes)
    return files_by_split, notes


def _open_file(
    path: Path,
    kind: type[Example],
    columns: Keys,
    header: bool,
    settings: DataSettings,
    row_errors: RowErrors,
    is_wanted: Callable[[Cells], bool] | None = None,
) -> DataFile:
    """Open one file of a task.

    Args:
        path: the file.
        kind: class of the examples.
        columns: column of each role of `kind` or of a ScoredExample.
        header: whether the file has a header.
        settings: encoding and row limit.
        row_errors: handles bad rows among the first two rows.
        is_wanted: whether a row is read, by its cells. If None, all rows are read.
    """
    table, resolved, notes = _open_table(path, kind, columns, header, settings, row_errors)

    def wanted_rows(row_errors: RowErrors) -> Rows:
        return (row for row in table.rows(row_errors) if is_wanted is None or is_wanted(row[1]))

    def read(row_errors: RowErrors) -> Iterator[Example]:
        return read_examples(replace(table, rows=wanted_rows), resolved, row_errors, settings.max_row_bytes)

    return DataFile(display_name=table.display_name, kind=resolved.kind, read=read, notes=tuple(notes))


def _open_table(
    path: Path, kind: type[Example], columns: Keys, header: bool, settings: DataSettings, row_errors: RowErrors
) -> tuple[Table, Columns, list[str]]:
    file, notes = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    positions = [key for key in columns.values() if isinstance(key, int)]
    min_cells = max(positions) if positions else None
    table = read_delimited(
        file, row_errors, delimiter="\t", quoted=False, is_header=lambda _: header, min_cells=min_cells
    )
    if kind is PairExample:
        columns = {PAIR_ROLES.get(role, role): name for role, name in columns.items()}
    resolved = resolve_columns(table, kind, columns)
    columns_note = replace(resolved, unused=(), guessed=()).note
    return table, resolved, [*notes, f"{path.name}: {columns_note}"]


def _add_missing_pairs(
    folder: Path, files_by_split: dict[str, tuple[DataFile, ...]], settings: DataSettings, row_errors: RowErrors
) -> list[str]:
    """Add pairs of MRPC's original file to train if neither train nor dev has them. Return notes for the user."""

    def id_pairs(path: Path) -> Iterator[tuple[str, ...]]:
        table, _, _ = _open_table(path, LabelledExample, _MRPC, True, settings, row_errors)
        indices = [table.names.index(name) for name in ("#1 ID", "#2 ID") if name in table.names]
        for _, cells in table.rows(row_errors):
            assert isinstance(cells, list)
            yield tuple(cells[index] for index in indices)

    present = {pair for name in ("train.tsv", "dev.tsv") for pair in id_pairs(folder / name)}
    missing = set(id_pairs(folder / MRPC_ORIGINAL)) - present
    if not missing:
        return []

    def is_missing(cells: Cells) -> bool:
        assert isinstance(cells, list)
        return (cells[1], cells[2]) in missing  # the columns of the two ids

    file = _open_file(folder / MRPC_ORIGINAL, LabelledExample, _MRPC, True, settings, row_errors, is_missing)
    files_by_split["train"] = (*files_by_split["train"], file)
    first_ids = ", ".join(" / ".join(pair) for pair in sorted(missing)[:3])
    return [
        f"train.tsv lacks {len(missing)} of the pairs in {MRPC_ORIGINAL} that dev.tsv does not have either: they are "
        f"read from there ({first_ids})"
    ]
