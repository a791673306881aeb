"""Datasets: files, a folder or objects in memory, resolved to splits and streamed as typed examples."""

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
MANY = 10_000  # different labels, at most
TARGETS = ("label", "labels", "score", "tags", "answers", "answer")


class Dataset(Generic[Kind]):
    """Splits of examples of one class, streamed; `notes` reports what was detected."""

    def __init__(
        self,
        kind: type[Kind],
        parts: Mapping[str, tuple[DataFile, ...]],
        notes: Sequence[str],
        settings: DataSettings,
        row_errors: RowErrors,
    ) -> None:
        self.kind = kind
        self.settings = settings
        self.row_errors = row_errors  # counts bad rows and repairs of the rows read so far
        self.layout: class_folders.Layout | None = None  # set if labels are names of files or folders
        self.known: tuple[str, ...] = ()  # labels of a model; (): the labels of the first split are known
        self._files = dict(parts)
        self._notes = tuple(notes)
        self.has_generated_dev = "train" in parts and "dev" not in parts and settings.dev_fraction > 0

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits: train, dev, test, then others."""
        names = [*self._files, *(["dev"] if self.has_generated_dev else [])]
        order = ("train", "dev", "dev-mismatched", "test")
        return tuple(sorted(names, key=lambda name: order.index(name) if name in order else len(order)))

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """Paths of files, or names of objects, of each split."""
        return {split: tuple(part.display_name for part in parts) for split, parts in self._files.items()}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels in order, from one pass over train: numbers by value, others sorted, of tags O first.

        Label names that come with the data keep their order. A generated dev split is part of train here.

        Raises:
            DataError: If there are too many different labels.
        """
        if self.kind is TaggedExample:
            return self._scheme.labels
        if self.kind not in (LabelledExample, MultiLabelExample):
            return ()
        if self._named:
            return self._named
        seen: set[str] = set()
        for example in self._in_iob2(self._first_split):
            assert isinstance(example, LabelledExample | MultiLabelExample)
            seen.update((example.label,) if isinstance(example, LabelledExample) else example.labels)
            if len(seen) > MANY:
                raise DataError(
                    f"{example.file}:{example.line}: more than {MANY:,} different labels: is that the label column? "
                    "Numbers are the task regress"
                )
        return sort_labels(seen)

    @cached_property
    def stated(self) -> tuple[str, ...]:
        """Sentences for the user about what was detected."""
        notes = list(self._notes)
        if self.kind is TaggedExample:
            notes.append(self._scheme.note)
        if labels := self.labels:
            more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
            notes.append(f"labels in order: {', '.join(map(shown, labels[:20]))}{more}")
        if self.has_generated_dev:
            share, seed = f"{100 * self.settings.dev_fraction:g} %", self.settings.seed
            notes.append(f"no dev split was given: {share} of train, chosen by a hash of the text and seed {seed}")
        return tuple(notes)

    def examples(self, split: str) -> Iterator[Kind]:
        """Yield the examples of a split in the order of its files; an unknown label makes a bad row."""
        if split not in self.splits:
            has = ", ".join(self.splits)
            raise DataError(f"there is no split {shown(split)}, but {has}{did_you_mean(split, self.splits)}")
        generated = self.has_generated_dev and split in ("train", "dev")
        fraction, seed = self.settings.dev_fraction, self.settings.seed
        first, named = self._first_split, self._named
        whole = "train" if generated else split
        known = frozenset(self.known or (self.labels if named or whole != first else ()))
        tags = self.kind is TaggedExample and bool(self.known)
        for number, example in enumerate(self._in_iob2(whole)):
            if unseen := unknown_labels(_labels(example), known, tags=tags) if known else []:
                where = f"among those that come with {first}:" if named else f"in {first}, which has"
                where = "one that the model knows:" if self.known else where
                reason = f"the label {shown(unseen[0])} is not {where} {_some(self.known or self.labels)}"
                text = example.texts[0][:200]
                bad = BadRow(file=example.file, line=example.line, column="", reason=reason, text=text)
                self.row_errors.reject(bad, number=number, stage="label")
            elif not generated or in_dev_split(example, fraction, seed) == (split == "dev"):
                yield example

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Column names of each role in the first file; "1", "2", ... without a header."""
        return dict(self._files[self._first_split][0].columns)

    @property
    def _first_split(self) -> str:
        return "train" if "train" in self._files else next(iter(self._files))

    @property
    def _named(self) -> tuple[str, ...]:
        """Label names that come with the data, or ()."""
        return self._files[self._first_split][0].labels if self.kind in (LabelledExample, MultiLabelExample) else ()

    @cached_property
    def _scheme(self) -> conll.TagScheme:
        return conll.detect_scheme(self._raw(self._first_split))

    def _in_iob2(self, split: str) -> Iterator[Kind]:
        """Yield the examples of a split before the dev split is separated, with tags in IOB2."""
        if self.kind is not TaggedExample or not self._scheme.name:
            yield from self._raw(split)
            return
        for example in self._raw(split):
            yield replace(example, tags=to_iob2(example.tags))

    def _raw(self, split: str) -> Iterator[Any]:
        rows = chain.from_iterable(part.read(self.row_errors) for part in self._files[split])
        return self.kind.merge_rows(rows)  # type: ignore[arg-type]


def _labels(example: Example) -> tuple[str, ...]:
    match example:
        case LabelledExample():
            return (example.label,)
        case MultiLabelExample():
            return example.labels
        case TaggedExample():
            return example.tags
    return ()


def _some(labels: Sequence[str]) -> str:
    return ", ".join(map(shown, labels[:8])) + (", …" if len(labels) > 8 else "")


def cut_labels(part: DataFile, mark: str | None) -> DataFile:
    """Cut the labels of a file at a mark (DataSettings.label_until)."""
    if mark is None or part.kind not in (LabelledExample, MultiLabelExample):
        return part

    def read(row_errors: RowErrors) -> Iterator[Example]:
        for example in part.read(row_errors):
            if isinstance(example, LabelledExample):
                yield replace(example, label=example.label.partition(mark)[0])
            elif isinstance(example, MultiLabelExample):
                yield replace(example, labels=tuple(dict.fromkeys(text.partition(mark)[0] for text in example.labels)))

    labels = tuple(dict.fromkeys(label.partition(mark)[0] for label in part.labels))
    return replace(part, read=read, labels=labels)


# ---------------------------------------------------------------------------------------------------- opening

DEFAULT = DataSettings()
STOP = Raise()


@overload
def read(
    data: object, kind: type[Kind], settings: DataSettings = DEFAULT, *, on_bad_row: BadRowPolicy = STOP
) -> Dataset[Kind]: ...


@overload
def read(
    data: object, kind: None = None, settings: DataSettings = DEFAULT, *, on_bad_row: BadRowPolicy = STOP
) -> Dataset[Example]: ...


def read(
    data: object,
    kind: type[Example] | None = None,
    settings: DataSettings = DEFAULT,
    *,
    on_bad_row: BadRowPolicy = STOP,
) -> Dataset[Example]:
    """Open a dataset; its examples are read when they are iterated.

    Args:
        data: a folder, a file, several files, a mapping from splits to files, or data in memory. Several files are
            assigned to splits by their names, or all to train if no name has a split.
        kind: class of the examples; None: detected from the columns.
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
            parts, notes = glue.open_task(folder, task, kind, settings, row_errors)
            return _source(parts, notes, settings, row_errors, corrections)
        if settings.format == "glue":
            raise DataError(
                f"{folder}: is no folder of a GLUE task: those hold train.tsv and are called {', '.join(glue.LAYOUTS)}"
            )
        places_by_split: dict[str, tuple[object, ...]] = {"train": (folder,)}
        classes, notes = class_folders.find_in_folder(folder, settings, kind), []
        if classes is None and settings.format not in class_folders.LAYOUTS:
            files, notes = find_split_files(folder)
            places_by_split = dict(files)
    else:
        places_by_split, notes = _splits(data)
        classes = class_folders.find_in_paths(places_by_split, settings, kind)
    if classes is not None:
        return _of_classes(classes, notes, settings, kind, row_errors, corrections)
    if settings.format in class_folders.LAYOUTS:
        raise DataError(
            f"{', '.join(str(place) for places in places_by_split.values() for place in places)}: has no "
            f"{(settings.format or '').removeprefix('class-')} of classes: give their folder, or leave format out"
        )
    files_by_split: dict[str, tuple[DataFile, ...]] = {}
    first: DataFile | None = None
    for split, places in places_by_split.items():
        opened: list[DataFile] = []
        for place in places:
            try:
                part = cut_labels(_open(split, place, kind, settings, row_errors), settings.label_until)
            except MissingColumnError as missing:
                if not (split.startswith("test") and len(places_by_split) > 1 and missing.role in TARGETS):
                    raise
                notes.append(f"{split}: has no {missing.role}, so it is left out")
                opened.clear()
                break
            kind = kind or part.kind
            first = first or part
            if differing := part.optional_roles ^ first.optional_roles:
                has, lacks = (part, first) if part.optional_roles & differing else (first, part)
                roles = " and ".join(sorted(differing & has.optional_roles))
                raise DataError(
                    f"{has.display_name} has a column for {roles}, and {lacks.display_name} has none: make "
                    "them alike, or set which column it is"
                )
            if opened and part.labels and opened[0].labels and {*part.labels} != {*opened[0].labels}:
                raise DataError(
                    f"{part.display_name} comes with the labels {_some(part.labels)}, but {opened[0].display_name} "
                    f"with {_some(opened[0].labels)}: name them alike, or give the files separately"
                )
            opened.append(part)
        if opened:
            files_by_split[split] = tuple(opened)
    assert kind is not None
    file_notes = [(split, text) for split, parts in files_by_split.items() for part in parts for text in part.notes]
    notes += dict.fromkeys(text for _, text in file_notes)
    return _source(files_by_split, notes, settings, row_errors, corrections)


def _of_classes(
    classes: class_folders.ClassLayout,
    notes: Sequence[str],
    settings: DataSettings,
    kind: type[Example] | None,
    row_errors: RowErrors,
    corrections: Corrections | None,
) -> Dataset[Example]:
    files_by_split = {
        split: tuple(cut_labels(part, settings.label_until) for part in parts)
        for split, parts in class_folders.open_classes(classes, settings, kind).items()
    }
    stated = dict.fromkeys(text for parts in files_by_split.values() for part in parts for text in part.notes)
    source = _source(files_by_split, [*notes, *stated], settings, row_errors, corrections)
    source.layout = classes.layout
    return source


def dataset_for_task(
    kind: type[Example], data: object, settings: DataSettings, on_bad_row: BadRowPolicy
) -> Dataset[Example]:
    """Open a dataset for a task; classification becomes multi-label if rows have lists of labels.

    Raises:
        DataError: As `read`; also if a setting would change nothing.
    """
    several = kind is LabelledExample and _have_several(data, settings)
    source = read(data, MultiLabelExample if several else kind, settings, on_bad_row=on_bad_row)
    _refuse_unused(source)
    return source


def _have_several(data: object, settings: DataSettings) -> bool:
    """Whether rows have lists of labels."""
    if "labels" in (settings.columns or {}):
        return True
    try:
        return read(data, None, replace(settings, corrections=None), on_bad_row=Skip()).kind is MultiLabelExample
    except HeedfulError:  # reported when the data is read for the task
        return False


def _refuse_unused(source: Dataset[Example]) -> None:
    settings = source.settings
    files = [Path(place) for places in source.places.values() for place in places if os.path.isfile(place)]
    forms = {settings.format or FORMAT_BY_SUFFIX.get(stem_and_suffix(file)[1], "conll") for file in files}
    forms |= {"text" for places in source.places.values() for place in places if os.path.isdir(place)}
    tables = forms & {"csv", "tsv", "glue"}
    columns = tables or (source.kind is TaggedExample and forms & {"conll", "text"})
    has_dev = "dev" in source.places
    has_labels = source.kind in (LabelledExample, MultiLabelExample)
    for name, asked, why in (
        ("dev_fraction", has_dev and settings.dev_fraction not in (0.0, DEFAULT.dev_fraction), "a dev split is given"),
        ("seed", has_dev and settings.seed != DEFAULT.seed, "a dev split is given"),
        ("header", settings.header is not None and not columns, "no file is CSV, TSV or CoNLL"),
        ("delimiter", settings.delimiter is not None and not tables, "no file is CSV or TSV"),
        ("quoting", settings.quoting is not None and not tables, "no file is CSV or TSV"),
        ("label_until", settings.label_until is not None and not has_labels, "the examples have no labels"),
        ("encoding", settings.encoding is not None and not forms - {"parquet"}, "no file is text"),
    ):
        if asked:
            raise DataError(f"--data.{name}={getattr(settings, name)} would change nothing: {why}; leave it out")


def _source(
    parts: Mapping[str, tuple[DataFile, ...]],
    notes: Sequence[str],
    settings: DataSettings,
    row_errors: RowErrors,
    corrections: Corrections | None,
) -> Dataset[Example]:
    kind = next(iter(parts.values()))[0].kind
    if corrections is not None:
        parts = apply_corrections(parts, corrections)
    return Dataset(kind, parts, [f"each example is {kind.about}", *notes], settings, row_errors)


def _splits(data: object) -> tuple[dict[str, tuple[object, ...]], list[str]]:
    if isinstance(data, str | Path) or is_in_memory(data):
        return {"train": (data,)}, []
    if isinstance(data, Mapping):
        named = {SPLIT_BY_WORD.get(str(name).casefold(), str(name)): name for name in data}
        if len(named) < len(data) or not data:
            raise DataError(f"splits are {', '.join(map(str, data)) or 'none'}, expected train, dev, test, each once")
        order = sorted(named, key=lambda split: split != "train")
        return {split: _places(data[named[split]]) for split in order}, []
    places = _places(data)
    paths = [Path(place) for place in places if isinstance(place, str | Path)]
    if len(places) == len(paths) > 1:
        files, notes = assign_splits(paths)
        return dict(files), notes
    return {"train": places}, []


def _places(data: object) -> tuple[object, ...]:
    places = (data,) if isinstance(data, str | Path) or is_in_memory(data) else data
    if (
        isinstance(places, Sequence)
        and places
        and all(isinstance(place, str | Path) or is_in_memory(place) for place in places)
    ):
        return tuple(places)
    raise DataError(
        f"data is {shown(data)}, expected a folder, files, a frame, a data set, a list of "
        "dicts, a pair (texts, labels), or a mapping from splits to any of these"
    )


def _open(
    split: str, place: object, kind: type[Example] | None, settings: DataSettings, row_errors: RowErrors
) -> DataFile:
    if isinstance(place, str | Path):
        return open_data_file(Path(place), kind, settings, row_errors)
    return from_object(f"{split} (data set)", to_dataset_object(place, kind), kind, settings, row_errors)
