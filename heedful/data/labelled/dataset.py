"""Dataset: splits of typed examples, streamed from files, folders or objects in memory. `read` opens one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from heedful.data.bad_rows import BadRow, BadRowPolicy, Raise, RowErrors, Skip, shown
from heedful.data.examples import Example, LabelledExample, MultiLabelExample, TaggedExample, in_dev_split, sort_labels
from heedful.data.formats import conll
from heedful.data.labelled import class_folders, glue
from heedful.data.labelled.columns import MissingColumnError
from heedful.data.labelled.corrections import Corrections, apply_corrections, read_corrections
from heedful.data.labelled.data_file import (
    FORMAT_BY_SUFFIX,
    DataFile,
    DataSettings,
    from_object,
    open_data_file,
    stem_and_suffix,
)
from heedful.data.labelled.in_memory import is_in_memory, to_dataset_object
from heedful.data.labelled.split_files import SPLIT_BY_WORD, assign_splits, find_split_files
from heedful.data.tag_schemes import to_iob2, unknown_labels
from heedful.errors import DataError, HeedfulError, did_you_mean

Kind = TypeVar("Kind", bound=Example, covariant=True)
MAX_LABELS = 10_000  # maximum different labels
TARGET_ROLES = ("label", "labels", "score", "tags", "answers", "answer")  # roles that a test split may lack


class Dataset(Generic[Kind]):
    """Splits of examples of one class. Each iteration reads the files anew."""

    def __init__(
        self,
        kind: type[Kind],
        files_by_split: Mapping[str, tuple[DataFile, ...]],
        notes: Sequence[str],
        settings: DataSettings,
        row_errors: RowErrors,
    ) -> None:
        self.kind = kind
        self.settings = settings
        self.row_errors = row_errors  # counts bad rows and repairs of the rows read so far
        self.layout: class_folders.Layout | None = None  # set if labels are names of files or folders
        # labels that a model knows; an example with another label is a bad row; (): labels of the first split
        self.known_labels: tuple[str, ...] = ()
        self._files_by_split = dict(files_by_split)
        self._notes = tuple(notes)
        lacks_dev = "train" in files_by_split and "dev" not in files_by_split
        self.has_generated_dev = lacks_dev and settings.dev_fraction > 0  # whether a part of train is the dev split

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits: train, dev, test, then others."""
        names = [*self._files_by_split, *(["dev"] if self.has_generated_dev else [])]
        order = ("train", "dev", "dev-mismatched", "test")
        return tuple(sorted(names, key=lambda name: order.index(name) if name in order else len(order)))

    @property
    def names_by_split(self) -> dict[str, tuple[str, ...]]:
        """The paths of files, or names of objects, of each split."""
        return {split: tuple(file.display_name for file in files) for split, files in self._files_by_split.items()}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels in order, from one pass over the first split, or () if the examples have no labels.

        Label names that come with the data keep their order. Other labels are sorted, numbers by value. Tags are
        converted to IOB2, with O first. The first split is train, including a generated dev split.

        Raises:
            DataError: If there are too many different labels.
        """
        if self.kind is TaggedExample:
            return self._tag_scheme.labels
        if self.kind not in (LabelledExample, MultiLabelExample):
            return ()
        if self._label_names:
            return self._label_names
        seen: set[str] = set()
        for example in self._read_with_iob2(self._first_split):
            seen.update(_labels_of(example))
            if len(seen) > MAX_LABELS:
                raise DataError(
                    f"{example.file}:{example.line}: more than {MAX_LABELS:,} different labels: is that the label "
                    "column? For numbers use the task regress"
                )
        return sort_labels(seen)

    @cached_property
    def stated(self) -> tuple[str, ...]:
        """Sentences for the user about everything that was detected."""
        notes = list(self._notes)
        if self.kind is TaggedExample:
            notes.append(self._tag_scheme.note)
        if labels := self.labels:
            more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
            notes.append(f"labels in order: {', '.join(map(shown, labels[:20]))}{more}")
        if self.has_generated_dev:
            share, seed = f"{100 * self.settings.dev_fraction:g} %", self.settings.seed
            notes.append(f"no dev split was given: {share} of train, chosen by a hash of the text and seed {seed}")
        return tuple(notes)

    def examples(self, split: str) -> Iterator[Kind]:
        """Yield the examples of a split in the order of its files. An example with an unknown label is a bad row.

        Known labels are `known_labels`, else the names that come with the data, else the labels of the first split.

        Raises:
            DataError: If there is no such split.
        """
        if split not in self.splits:
            splits = ", ".join(self.splits)
            raise DataError(f"there is no split {shown(split)}, but {splits}{did_you_mean(split, self.splits)}")
        is_part_of_train = self.has_generated_dev and split in ("train", "dev")
        file_split = "train" if is_part_of_train else split  # the split whose files have the examples
        known: frozenset[str] = frozenset()  # empty: any label
        if self.known_labels:
            known = frozenset(self.known_labels)
        elif self._label_names or file_split != self._first_split:
            known = frozenset(self.labels)
        across_schemes = self.kind is TaggedExample and bool(self.known_labels)
        for index, example in enumerate(self._read_with_iob2(file_split)):
            unknown = unknown_labels(_labels_of(example), known, tags=across_schemes) if known else []
            if unknown:
                bad = BadRow(
                    file=example.file,
                    line=example.line,
                    column="",
                    reason=self._unknown_label_reason(unknown[0]),
                    text=example.texts[0][:200],
                )
                self.row_errors.reject(bad, index=index, stage="label")
                continue
            if is_part_of_train:
                is_dev = in_dev_split(example, self.settings.dev_fraction, self.settings.seed)
                if is_dev != (split == "dev"):
                    continue
            yield example

    def _unknown_label_reason(self, label: str) -> str:
        if self.known_labels:
            where = "one that the model knows:"
        elif self._label_names:
            where = f"among those that come with {self._first_split}:"
        else:
            where = f"in {self._first_split}, which has"
        return f"the label {shown(label)} is not {where} {_list_labels(self.known_labels or self.labels)}"

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The column names of each role in the first file. Without a header they are "1", "2", ..."""
        return dict(self._files_by_split[self._first_split][0].columns)

    @property
    def _first_split(self) -> str:
        """The name of the split that defines the labels: train, else the first one."""
        return "train" if "train" in self._files_by_split else next(iter(self._files_by_split))

    @property
    def _label_names(self) -> tuple[str, ...]:
        """The label names that come with the data, or ()."""
        if self.kind not in (LabelledExample, MultiLabelExample):
            return ()
        return self._files_by_split[self._first_split][0].labels

    @cached_property
    def _tag_scheme(self) -> conll.TagScheme:
        """The tagging scheme of the first split."""
        return conll.detect_scheme(self._read_split(self._first_split))

    def _read_with_iob2(self, split: str) -> Iterator[Kind]:
        """Yield the examples in the files of a split, with tags converted to IOB2."""
        if self.kind is not TaggedExample or not self._tag_scheme.name:
            yield from self._read_split(split)
            return
        for example in self._read_split(split):
            yield replace(example, tags=to_iob2(example.tags))

    def _read_split(self, split: str) -> Iterator[Any]:
        """Yield the examples in the files of a split."""
        rows = chain.from_iterable(file.read(self.row_errors) for file in self._files_by_split[split])
        return self.kind.merge_rows(rows)  # type: ignore[arg-type]


def _labels_of(example: Example) -> tuple[str, ...]:
    """Return the labels or tags of an example, or () if it has neither."""
    match example:
        case LabelledExample():
            return (example.label,)
        case MultiLabelExample():
            return example.labels
        case TaggedExample():
            return example.tags
    return ()


def _list_labels(labels: Sequence[str]) -> str:
    """List the first labels, for messages."""
    return ", ".join(map(shown, labels[:8])) + (", …" if len(labels) > 8 else "")


def cut_labels(file: DataFile, mark: str | None) -> DataFile:
    """Cut the labels of a file at a mark, which is the setting `label_until`. If it is None, nothing is cut."""
    if mark is None or file.kind not in (LabelledExample, MultiLabelExample):
        return file

    def cut_all(labels: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label.partition(mark)[0] for label in labels))

    def read(row_errors: RowErrors) -> Iterator[Example]:
        for example in file.read(row_errors):
            if isinstance(example, LabelledExample):
                yield replace(example, label=example.label.partition(mark)[0])
            elif isinstance(example, MultiLabelExample):
                yield replace(example, labels=cut_all(example.labels))

    return replace(file, read=read, labels=cut_all(file.labels))


# ---------------------------------------------------------------------------------------------------- opening

DEFAULT = DataSettings()
RAISE = Raise()


@overload
def read(
    data: object, kind: type[Kind], settings: DataSettings = DEFAULT, *, on_bad_row: BadRowPolicy = RAISE
) -> Dataset[Kind]: ...


@overload
def read(
    data: object, kind: None = None, settings: DataSettings = DEFAULT, *, on_bad_row: BadRowPolicy = RAISE
) -> Dataset[Example]: ...


def read(
    data: object,
    kind: type[Example] | None = None,
    settings: DataSettings = DEFAULT,
    *,
    on_bad_row: BadRowPolicy = RAISE,
) -> Dataset[Example]:
    """Open a dataset. Examples are read when they are iterated.

    Args:
        data: a folder, a file, several files, a mapping from splits to files, or data in memory. Several files are
            assigned to splits by their names, or all to train if no name contains a split.
        kind: class of the examples. If None, it is detected from the columns.
        settings: how files are read.
        on_bad_row: policy for rows that cannot be used.

    Raises:
        DataError: If files are missing, their format or columns cannot be resolved, or they contradict each other.
    """
    row_errors = RowErrors(on_bad_row)
    corrections = read_corrections(settings.corrections) if settings.corrections is not None else None
    if isinstance(data, str | Path) and os.path.isdir(data):
        folder = Path(data)
        task = glue.task_of(folder) if settings.format in (None, "glue") else None
        if task:
            files_by_split, notes = glue.open_task(folder, task, kind, settings, row_errors)
            return _make_dataset(files_by_split, notes, settings, row_errors, corrections)
        if settings.format == "glue":
            raise DataError(
                f"{folder}: is not the folder of a GLUE task, which has a train.tsv and one of the names "
                f"{', '.join(glue.LAYOUTS)}"
            )
        sources_by_split: dict[str, tuple[object, ...]] = {"train": (folder,)}
        classes = class_folders.find_in_folder(folder, settings, kind)
        notes = []
        if classes is None and settings.format not in class_folders.LAYOUTS:
            split_files, notes = find_split_files(folder)
            sources_by_split = dict(split_files)
    else:
        sources_by_split, notes = _split_data(data)
        classes = class_folders.find_in_paths(sources_by_split, settings, kind)
    if classes is not None:
        return _open_class_layout(classes, notes, settings, kind, row_errors, corrections)
    if settings.format in class_folders.LAYOUTS:
        raise DataError(
            f"{', '.join(str(source) for sources in sources_by_split.values() for source in sources)}: has no "
            f"{(settings.format or '').removeprefix('class-')} of classes: give their folder, or leave format out"
        )
    files_by_split, split_notes = _open_splits(sources_by_split, kind, settings, row_errors)
    notes += [*split_notes, *_file_notes(files_by_split)]
    return _make_dataset(files_by_split, notes, settings, row_errors, corrections)


def _open_splits(
    sources_by_split: Mapping[str, tuple[object, ...]],
    kind: type[Example] | None,
    settings: DataSettings,
    row_errors: RowErrors,
) -> tuple[dict[str, tuple[DataFile, ...]], list[str]]:
    """Open the files and objects of each split. A test split without targets is left out.

    Returns:
        The files of each split, and notes about splits that are left out.

    Raises:
        MissingColumnError: If a split has no column for a required role, or if no split is left.
    """
    files_by_split: dict[str, tuple[DataFile, ...]] = {}
    notes: list[str] = []
    first_file: DataFile | None = None
    last_error: MissingColumnError | None = None
    for split, sources in sources_by_split.items():
        files: list[DataFile] = []
        for source in sources:
            try:
                file = cut_labels(_open_source(split, source, kind, settings, row_errors), settings.label_until)
            except MissingColumnError as error:
                may_lack_targets = split.startswith("test") and len(sources_by_split) > 1
                if not may_lack_targets or error.role not in TARGET_ROLES:
                    raise
                notes.append(f"{split}: has no {error.role}, so it is left out")
                last_error = error
                files.clear()
                break
            kind = kind or file.kind
            first_file = first_file or file
            _check_same_columns(first_file, file)
            if files:
                _check_same_labels(files[0], file)
            files.append(file)
        if files:
            files_by_split[split] = tuple(files)
    if not files_by_split and last_error is not None:
        raise last_error
    return files_by_split, notes


def _check_same_columns(first: DataFile, file: DataFile) -> None:
    """Raise DataError if only one of two files has a column for an optional role."""
    if not (differing := file.optional_roles ^ first.optional_roles):
        return
    has, lacks = (file, first) if file.optional_roles & differing else (first, file)
    roles = " and ".join(sorted(differing & has.optional_roles))
    raise DataError(
        f"{has.display_name} has a column for {roles}, and {lacks.display_name} has none: make "
        "them alike, or set which column it is"
    )


def _check_same_labels(first: DataFile, file: DataFile) -> None:
    """Raise DataError if two files come with different label names."""
    if file.labels and first.labels and {*file.labels} != {*first.labels}:
        raise DataError(
            f"{file.display_name} comes with the labels {_list_labels(file.labels)}, but {first.display_name} "
            f"with {_list_labels(first.labels)}: name them alike, or give the files separately"
        )


def _file_notes(files_by_split: Mapping[str, tuple[DataFile, ...]]) -> list[str]:
    """Return the different notes of all files, in order."""
    return list(dict.fromkeys(note for files in files_by_split.values() for file in files for note in file.notes))


def _open_class_layout(
    classes: class_folders.ClassLayout,
    notes: Sequence[str],
    settings: DataSettings,
    kind: type[Example] | None,
    row_errors: RowErrors,
    corrections: Corrections | None,
) -> Dataset[Example]:
    """Open a dataset whose labels are names of files or folders."""
    files_by_split = {
        split: tuple(cut_labels(file, settings.label_until) for file in files)
        for split, files in class_folders.open_classes(classes, settings, kind).items()
    }
    notes = [*notes, *_file_notes(files_by_split)]
    dataset = _make_dataset(files_by_split, notes, settings, row_errors, corrections)
    dataset.layout = classes.layout
    return dataset


def dataset_for_task(
    kind: type[Example], data: object, settings: DataSettings, on_bad_row: BadRowPolicy
) -> Dataset[Example]:
    """Open a dataset for a task. Classification becomes multi-label if rows have lists of labels.

    Raises:
        DataError: For the same reasons as `read`, and for a setting that would change nothing.
    """
    if kind is LabelledExample and _have_label_lists(data, settings):
        kind = MultiLabelExample
    dataset = read(data, kind, settings, on_bad_row=on_bad_row)
    _check_settings_used(dataset)
    return dataset


def _have_label_lists(data: object, settings: DataSettings) -> bool:
    """Whether rows have lists of labels."""
    if "labels" in (settings.columns or {}):
        return True
    try:
        return read(data, None, replace(settings, corrections=None), on_bad_row=Skip()).kind is MultiLabelExample
    except HeedfulError:  # will be reported when the data is read for the task
        return False


def _check_settings_used(dataset: Dataset[Example]) -> None:
    """Raise DataError for a setting that would change nothing for this dataset."""
    settings = dataset.settings
    names = [name for names in dataset.names_by_split.values() for name in names]
    files = [Path(name) for name in names if os.path.isfile(name)]
    formats = {settings.format or FORMAT_BY_SUFFIX.get(stem_and_suffix(file)[1], "conll") for file in files}
    if any(map(os.path.isdir, names)):
        formats.add("text")
    has_tables = bool(formats & {"csv", "tsv", "glue"})
    has_headers = has_tables or (dataset.kind is TaggedExample and bool(formats & {"conll", "text"}))
    has_dev = "dev" in dataset.names_by_split
    has_labels = dataset.kind in (LabelledExample, MultiLabelExample)
    for name, is_useless, reason in (
        ("dev_fraction", has_dev and settings.dev_fraction not in (0.0, DEFAULT.dev_fraction), "a dev split is given"),
        ("seed", has_dev and settings.seed != DEFAULT.seed, "a dev split is given"),
        ("header", settings.header is not None and not has_headers, "no file is CSV, TSV or CoNLL"),
        ("delimiter", settings.delimiter is not None and not has_tables, "no file is CSV or TSV"),
        ("quoting", settings.quoting is not None and not has_tables, "no file is CSV or TSV"),
        ("label_until", settings.label_until is not None and not has_labels, "the examples have no labels"),
        ("encoding", settings.encoding is not None and not formats - {"parquet"}, "no file is text"),
    ):
        if is_useless:
            raise DataError(f"--data.{name}={getattr(settings, name)} would change nothing: {reason}; leave it out")


def _make_dataset(
    files_by_split: Mapping[str, tuple[DataFile, ...]],
    notes: Sequence[str],
    settings: DataSettings,
    row_errors: RowErrors,
    corrections: Corrections | None,
) -> Dataset[Example]:
    kind = next(iter(files_by_split.values()))[0].kind
    if corrections is not None:
        files_by_split, correction_notes = apply_corrections(files_by_split, corrections)
        notes = [*notes, *correction_notes]
    return Dataset(kind, files_by_split, [f"each example is {kind.about}", *notes], settings, row_errors)


def _split_data(data: object) -> tuple[dict[str, tuple[object, ...]], list[str]]:
    """Divide data into the paths and objects of each split, train first. Return them with notes for the user."""
    if isinstance(data, str | Path) or is_in_memory(data):
        return {"train": (data,)}, []
    if isinstance(data, Mapping):
        keys_by_split = {SPLIT_BY_WORD.get(str(key).casefold(), str(key)): key for key in data}
        if len(keys_by_split) < len(data) or not data:
            raise DataError(
                f"splits are {', '.join(map(str, data)) or 'none'}, expected train, dev and test, at most once each"
            )
        order = sorted(keys_by_split, key=lambda split: split != "train")
        return {split: _to_sources(data[keys_by_split[split]]) for split in order}, []
    sources = _to_sources(data)
    paths = [Path(source) for source in sources if isinstance(source, str | Path)]
    if len(sources) == len(paths) > 1:
        files, notes = assign_splits(paths)
        return dict(files), notes
    return {"train": sources}, []


def _to_sources(data: object) -> tuple[object, ...]:
    """Return the paths and objects of one split as a tuple. Other values raise DataError."""

    def is_source(value: object) -> bool:
        return isinstance(value, str | Path) or is_in_memory(value)

    if is_source(data):
        return (data,)
    if isinstance(data, Sequence) and data and all(map(is_source, data)):
        return tuple(data)
    raise DataError(
        f"data is {shown(data)}, expected a folder, files, a frame, a data set, a list of "
        "dicts, a pair (texts, labels), or a mapping from splits to any of these"
    )


def _open_source(
    split: str, source: object, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors
) -> DataFile:
    """Open the file at a path, or data in memory."""
    if isinstance(source, str | Path):
        return open_data_file(Path(source), kind, settings, row_errors)
    return from_object(f"{split} (data set)", to_dataset_object(source, kind), kind, settings, row_errors)
