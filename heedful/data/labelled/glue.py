"""Folders of GLUE (Wang et al. 2019): the files and columns of each task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from heedful.data.bad_rows import RowErrors
from heedful.data.examples import Example, LabelledExample, PairExample, ScoredExample
from heedful.data.formats.tables import Cells, Table, read_delimited
from heedful.data.formats.text_files import detect_encoding
from heedful.data.labelled.columns import Columns, resolve_columns
from heedful.data.labelled.data_file import DataFile, DataSettings, check_column_roles
from heedful.data.labelled.row_reader import read_examples
from heedful.errors import DataError

Names = dict[str, str | int]
PLAIN_FILES = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
MATCHED = {
    "train": "train.tsv",
    "dev": "dev_matched.tsv",
    "dev-mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test-mismatched": "test_mismatched.tsv",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueLayout:
    """Files and columns of one task."""

    columns: Names
    header: bool = True
    kind: type[Example] = LabelledExample
    files: dict[str, str] = field(default_factory=lambda: PLAIN_FILES)
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """File with the labels that test.tsv lacks."""

    file: str
    columns: Names
    header: bool


_SENTENCES: Names = {"text": "sentence1", "text_pair": "sentence2"}
PAIR_ROLES = {"text": "anchor", "text_pair": "positive"}  # of pairs with scores, where sentence embeddings read them
_MRPC: Names = {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}
LAYOUTS: dict[str, GlueLayout] = {
    "CoLA": GlueLayout(columns={"text": 4, "label": 2}, header=False),
    "SST-2": GlueLayout(columns={"text": "sentence", "label": "label"}),
    "MRPC": GlueLayout(columns=_MRPC),
    "STS-B": GlueLayout(columns=_SENTENCES | {"score": "score"}, kind=ScoredExample),
    "QQP": GlueLayout(columns={"text": "question1", "text_pair": "question2", "label": "is_duplicate"}),
    "MNLI": GlueLayout(columns=_SENTENCES | {"label": "gold_label"}, files=MATCHED),
    "QNLI": GlueLayout(columns={"text": "question", "text_pair": "sentence", "label": "label"}),
    "RTE": GlueLayout(columns=_SENTENCES | {"label": "label"}),
    "WNLI": GlueLayout(
        columns=_SENTENCES | {"label": "label"},
        note="WNLI: dev repeats sentences of train with other labels, so that few models are better than the majority",
    ),
}
EXTRAS = {
    "MRPC": Extra(file="msr_paraphrase_test.txt", columns=_MRPC, header=True),
    "STS-B": Extra(file="original/sts-test.tsv", columns={"text": 6, "text_pair": 7, "score": 5}, header=False),
}
ORIGINAL = "msr_paraphrase_train.txt"  # MRPC's train and dev in one file


def task_of(folder: Path) -> str | None:
    """GLUE task of a folder, by its name; None if it is not one."""
    if not any(os.path.isfile(folder / layout) for layout in ("train.tsv", "dev.tsv", "dev_matched.tsv")):
        return None
    names = {name.replace("-", "").casefold(): name for name in LAYOUTS}
    return names.get(folder.absolute().name.replace("-", "").replace("_", "").casefold())


def open_task(
    folder: Path, task: str, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors
) -> tuple[dict[str, tuple[DataFile, ...]], list[str]]:
    """Open the splits of a task's folder; with notes for the user."""
    layout = LAYOUTS[task]
    if layout.kind is ScoredExample and kind is PairExample:
        layout = replace(layout, kind=PairExample)
    if kind not in (None, layout.kind):
        assert kind is not None
        raise DataError(f"{folder}: an example of {task} is {layout.kind.about}, but this task needs {kind.about}")
    check_column_roles(str(folder), f"GLUE's {task}", settings)
    opened: dict[str, tuple[DataFile, ...]] = {}
    notes = [f"GLUE's {task}; quotes are read literally", *([layout.note] if layout.note else [])]
    for split, name in layout.files.items():
        extra = EXTRAS.get(task) if split == "test" else None
        if extra is not None and (folder / extra.file).is_file():
            notes.append(f"{split}: {extra.file}, since the labels of {name} are hidden")
            opened[split] = (
                _part(folder / extra.file, layout.kind, extra.columns, extra.header, settings, row_errors),
            )
        elif (folder / name).is_file() and split.startswith("test"):
            notes.append(f"{name}: its labels are hidden, so it is left out")
        elif (folder / name).is_file():
            opened[split] = (_part(folder / name, layout.kind, layout.columns, layout.header, settings, row_errors),)
    if task == "MRPC" and {"train", "dev"} <= set(opened) and (folder / ORIGINAL).is_file():
        notes += _complete(folder, opened, settings, row_errors)
    notes += dict.fromkeys(note for some in opened.values() for part in some for note in part.notes)
    return opened, notes


def _part(
    path: Path,
    kind: type[Example],
    columns: Names,
    header: bool,
    settings: DataSettings,
    row_errors: RowErrors,
    wanted: Callable[[Cells], bool] | None = None,
) -> DataFile:
    table, resolved, notes = _table(path, kind, columns, header, settings, row_errors)

    def read(row_errors: RowErrors) -> Iterator[Example]:
        if wanted is None:
            return read_examples(table, resolved, row_errors, settings.max_row_bytes)
        chosen = replace(table, rows=lambda row_errors: (row for row in table.rows(row_errors) if wanted(row[1])))
        return read_examples(chosen, resolved, row_errors, settings.max_row_bytes)

    return DataFile(display_name=table.display_name, kind=resolved.kind, read=read, notes=tuple(notes))


def _table(
    path: Path, kind: type[Example], columns: Names, header: bool, settings: DataSettings, row_errors: RowErrors
) -> tuple[Table, Columns, list[str]]:
    file, notes = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    numbers = [key for key in columns.values() if isinstance(key, int)]
    min_cells = max(numbers) if numbers else None
    table = read_delimited(
        file, row_errors, delimiter="\t", quoted=False, is_header=lambda _: header, min_cells=min_cells
    )
    if kind is PairExample:
        columns = {PAIR_ROLES.get(role, role): name for role, name in columns.items()}
    resolved = resolve_columns(table, kind, columns)
    roles = Columns(kind=resolved.kind, names_by_role=resolved.names_by_role, unused=()).note
    return table, resolved, [*notes, f"{path.name}: {roles}"]


def _complete(
    folder: Path, opened: dict[str, tuple[DataFile, ...]], settings: DataSettings, row_errors: RowErrors
) -> list[str]:
    """Add to train the pairs that the original file has and neither train nor dev has."""

    def pairs(path: Path) -> Iterator[tuple[str, ...]]:
        table, _, _ = _table(path, LabelledExample, _MRPC, True, settings, row_errors)
        at = [table.names.index(name) for name in ("#1 ID", "#2 ID") if name in table.names]
        for _, cells in table.rows(row_errors):
            assert isinstance(cells, list)
            yield tuple(cells[index] for index in at)

    have = {pair for name in ("train.tsv", "dev.tsv") for pair in pairs(folder / name)}
    lacking = set(pairs(folder / ORIGINAL)) - have
    if not lacking:
        return []

    def wanted(cells: Cells) -> bool:
        assert isinstance(cells, list)
        return (cells[1], cells[2]) in lacking

    more = _part(folder / ORIGINAL, LabelledExample, _MRPC, True, settings, row_errors, wanted)
    opened["train"] = (*opened["train"], more)
    named = ", ".join(" / ".join(pair) for pair in sorted(lacking)[:3])
    return [
        f"train.tsv lacks {len(lacking)} of the pairs in {ORIGINAL} that dev.tsv has not: taken from there ({named})"
    ]
