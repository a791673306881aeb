"""Labels from names: a file per class with one text per line, or a folder per class with one text per file."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from heedful.data.bad_rows import BadRow, RowErrors, shown
from heedful.data.examples import Example, LabelledExample, sort_labels
from heedful.data.formats import conll, label_text
from heedful.data.formats.text_files import NoRowsError, TextFile, all_lines, detect_encoding, read_head
from heedful.data.labelled.data_file import (
    SUFFIXES,
    DataFile,
    DataSettings,
    check_no_columns,
    read_texts,
    stem_and_suffix,
)
from heedful.data.labelled.split_files import IGNORED, SPLITS, parse_split_name
from heedful.errors import DataError, HeedfulError

Layout = Literal["class-files", "class-folders"]
LAYOUTS: tuple[Layout, ...] = ("class-files", "class-folders")
UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}  # folders of unlabelled texts beside those of classes
MOST_FILES = 1000  # classes as files, at most
Classes = dict[str, list[tuple[str, Path]]]  # (label, file or folder) of each class, by split


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassLayout:
    """Files or folders of each class, by split."""

    layout: Layout
    splits: Classes
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- detection


def find_in_folder(folder: Path, settings: DataSettings, kind: type[Example] | None) -> ClassLayout | None:
    """Find class files or class folders in a folder, or in its folders for train, dev and test.

    Returns:
        None if the folder has neither layout, or its files are named like splits.
    """
    if not _may_be(settings, kind):
        return None
    folders, files = _inside(folder)
    split_files: dict[str, list[Path]] = {}
    for file in files if settings.format != "class-folders" else ():
        if _is_text(file) or not settings.format:
            split_files.setdefault(parse_split_name(file)[0], []).append(file)
    if named := {split: members for split, members in split_files.items() if split}:
        if not all(len(files) > 1 and all(map(_is_text, files)) for files in named.values()) or not _is_plain(named):
            return None
        return ClassLayout(layout="class-files", splits=_by_file(named))
    split_folders: dict[str, list[Path]] = {}
    for path in folders:
        split_folders.setdefault(parse_split_name(path)[0], []).append(path)
    others = split_folders.pop("", [])
    if split_folders and ("train" in split_folders or not others):
        classes = find_in_paths({split: tuple(members) for split, members in split_folders.items()}, settings, kind)
        return classes and replace(classes, notes=(*classes.notes, *_unused([*others, *files])))
    return find_in_paths({"train": (folder,)}, settings, kind)


def find_in_paths(
    places_by_split: Mapping[str, Sequence[object]], settings: DataSettings, kind: type[Example] | None
) -> ClassLayout | None:
    """Find class files or class folders among the paths of each split; None if they have neither layout."""
    paths = {
        split: [Path(place) for place in places if isinstance(place, str | Path)]
        for split, places in places_by_split.items()
    }
    if not _may_be(settings, kind) or any(len(paths[split]) < len(places) for split, places in places_by_split.items()):
        return None
    files = [path for some in paths.values() for path in some]
    directories = [os.path.isdir(path) for path in files]
    if all(directories):
        return _of_folders(paths, settings)
    if any(directories):
        return None
    wanted = settings.format == "class-files"
    if not wanted and (
        any(len(paths_of_split) < 2 for paths_of_split in paths.values())
        or not all(map(_is_text, files))
        or (kind is None and any(stem_and_suffix(path)[1] for path in files))
        or not _is_plain(paths)
    ):
        return None
    return ClassLayout(layout="class-files", splits=_by_file(paths)) if settings.format != "class-folders" else None


def _may_be(settings: DataSettings, kind: type[Example] | None) -> bool:
    return settings.format in LAYOUTS or (settings.format is None and kind in (None, LabelledExample))


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the folders and files in a folder, sorted, without hidden ones and those that describe the data."""
    try:
        with os.scandir(folder) as entries:
            paths = sorted((Path(entry.path), entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    files = [path for path, is_folder in paths if not is_folder and path.name.casefold() not in IGNORED]
    return [path for path, is_folder in paths if is_folder], files


def _is_text(file: Path) -> bool:
    """Whether a file's suffix is that of plain text, or unknown."""
    return SUFFIXES.get(stem_and_suffix(file)[1]) in (None, "text")


def is_named_as_text(file: Path) -> bool:
    """Whether a file has a suffix of plain text, or no suffix."""
    return not file.suffix or (bool(stem_and_suffix(file)[1]) and _is_text(file))


def _is_plain(files: Mapping[str, Sequence[Path]]) -> bool:
    """Whether the first file of each split has no labels, columns or tags inside."""
    for several in files.values():
        try:
            file, _ = detect_encoding(several[0])
            labelled = label_text.is_label_text(file, sure=False) or label_text.is_tab_separated(file)
        except NoRowsError:
            continue
        head = read_head(file)
        if labelled or conll.is_conll(head) or conll.has_header(head, blank_lines=True):
            return False
    return True


def _of_folders(paths: Mapping[str, list[Path]], settings: DataSettings) -> ClassLayout | None:
    splits: Classes = {}
    files: dict[str, list[Path]] = {}
    notes: list[str] = []
    for split, folders in paths.items():
        inside = {folder: _inside(folder) for folder in folders}
        if len(folders) > 1 and not any(within for within, _ in inside.values()):  # each folder is a class
            splits[split] = [(folder.absolute().name, folder) for folder in folders]
            continue
        for within, beside in inside.values():
            classes = [
                path for path in within if path.name.casefold() not in UNLABELLED and _holds_texts(path, settings)
            ]
            if classes and settings.format != "class-files":
                splits.setdefault(split, []).extend((path.name, path) for path in classes)
                notes += _unused([path for path in (*within, *beside) if path not in classes])
            elif settings.format != "class-folders":
                files.setdefault(split, []).extend(filter(_is_text, beside))
                notes += _unused([*within, *(path for path in beside if not _is_text(path))])
    if splits and not files and sum(map(len, splits.values())) > 1:
        return ClassLayout(layout="class-folders", splits=splits, notes=tuple(notes))
    if splits or not all(files.values()) or not files:
        return None
    if settings.format is None and (any(len(members) < 2 for members in files.values()) or not _are_alike(files)):
        return None
    return ClassLayout(layout="class-files", splits=_by_file(files), notes=tuple(notes))


def _are_alike(files: Mapping[str, list[Path]]) -> bool:
    """Whether the files of a folder are plain text, and share the suffix of text or words in their names."""
    names = [_words(stem_and_suffix(path)[0]) for several in files.values() for path in several]
    common = _shared(names) + _shared([name[::-1] for name in names])
    suffixes = {stem_and_suffix(path)[1] for several in files.values() for path in several}
    return (common > 0 or "" not in suffixes) and _is_plain(files)


def _holds_texts(folder: Path, settings: DataSettings) -> bool:
    """Whether the first file in a folder is named like a text; any name counts if the format is set."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file():
                    return (_is_text if settings.format else is_named_as_text)(Path(entry.path))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    return False


def _unused(paths: Sequence[Path]) -> list[str]:
    names = [path.name for path in paths]
    return [f"not used: {', '.join(names[:10])}{' and more' if len(names) > 10 else ''}"] if names else []


def _by_file(files: Mapping[str, Sequence[Path]]) -> Classes:
    """Label files by their names, without split names and without the first and last words that all names share."""
    if (count := sum(map(len, files.values()))) > MOST_FILES:
        raise DataError(f"{count:,} files, each the texts of a class: more than {MOST_FILES:,} classes are not read")
    words = {path: _words(stem_and_suffix(path)[0]) for several in files.values() for path in several}
    shortest = min(map(len, words.values()))
    start = min(_shared(words.values()), shortest - 1)
    stop = min(_shared([words_of_name[::-1] for words_of_name in words.values()]), shortest - 1 - start)
    splits: Classes = {}
    for split, several in files.items():
        labels: dict[str, Path] = {}
        for path in several:
            distinct = words[path][start : len(words[path]) - stop]
            label = "".join(f"{mark}{word}" for mark, word in distinct)[len(distinct[0][0]) :]
            if label in labels:
                raise DataError(f"{labels[label]} and {path}: both would be the class {shown(label)}")
            labels[label] = path
        splits[split] = list(labels.items())
    return splits


def _shared(several: Collection[Sequence[object]]) -> int:
    """Length of the common prefix of all sequences."""
    columns = enumerate(zip(*several, strict=False))
    return next((place for place, values in columns if len({*values}) > 1), min(map(len, several)))


def _words(name: str) -> list[tuple[str, str]]:
    """Split a file's name into (separator, word), without the names of splits."""
    parts = re.findall(r"([._\-\s]*)([^._\-\s]+)", name)
    return [(mark, word) for mark, word in parts if word.casefold() not in SPLITS] or [("", name)]


# ---------------------------------------------------------------------------------------------------- reading


def open_classes(
    places: ClassLayout, settings: DataSettings, kind: type[Example] | None
) -> dict[str, tuple[DataFile, ...]]:
    """Open each class as a data file of its split."""
    name = next(path for classes in places.splits.values() for _, path in classes).parent
    if kind not in (None, LabelledExample):
        assert kind is not None
        raise DataError(f"{name}: labels are the names of classes, but this task needs {kind.about} in each example")
    check_no_columns(str(name), "texts whose labels are names of files or folders", settings)
    read = _lines_of if places.layout == "class-files" else _files_of
    files_by_split: dict[str, tuple[DataFile, ...]] = {}
    for split, classes in places.splits.items():
        labels = sort_labels({label for label, _ in classes})
        files_by_split[split] = tuple(
            DataFile(
                shown=str(path),
                kind=LabelledExample,
                read=partial(read, path, label, settings),
                notes=(SAID[places.layout], *places.notes),
                labels=labels,
            )
            for label, path in classes
        )
    return files_by_split


SAID: dict[Layout, str] = {
    "class-files": "a text on each line, its label the name of the file (format=class-files)",
    "class-folders": "a text in each file, its label the name of the folder (format=class-folders)",
}


def _lines_of(path: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    file, _ = detect_encoding(path, encoding=settings.encoding, longest=settings.max_row_bytes)
    for example in read_texts(file, row_errors):
        yield LabelledExample(file=example.file, line=example.line, text=example.text, label=label)


def _files_of(folder: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    for path, text in read_text_files(folder, settings, row_errors):
        yield LabelledExample(file=str(path), line=1, text=text, label=label)


def read_text_files(folder: Path, settings: DataSettings, row_errors: RowErrors) -> Iterator[tuple[Path, str]]:
    """Yield each file of a folder as one text; an unreadable file is a bad row."""
    folders, files = _inside(folder)
    if folders:
        raise DataError(f"{folder}: holds the folder {folders[0].name}, expected files alone, a text in each")
    for path in files:
        if (text := read_text_file(path, settings, row_errors)) is not None:
            yield path, text


def list_text_files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the text files in the leaf folders below a folder; files beside folders are skipped.

    A link to a parent folder is skipped too.
    """
    if (real := folder.resolve()) in above:
        return
    folders, files = _inside(folder)
    for within in folders:
        yield from list_text_files(within, (*above, real))
    if not folders:
        yield from filter(_is_text, files)


def read_text_file(path: Path, settings: DataSettings, row_errors: RowErrors) -> str | None:
    """Read a file as one text, without line ends at its end; None if it is a bad row."""
    try:
        file, _ = detect_encoding(path, encoding=settings.encoding, longest=settings.max_row_bytes)
    except NoRowsError:
        return ""
    except HeedfulError as error:
        if not str(error).startswith(f"{path}: "):  # an unknown encoding is wrong for every file
            raise
        reason = str(error).removeprefix(f"{path}: ")
        row_errors.reject(BadRow(file=str(path), line=1, column="", reason=reason, text=""))
        return None
    lines: list[str] = []
    size = 0
    for _, line, bad in all_lines(file):
        size += len(line)
        if bad is None and size > settings.max_row_bytes:
            bad = _too_long(file, settings.max_row_bytes, line)
        if bad is not None:
            row_errors.reject(bad)
            return None
        lines.append(line)
    return "".join(lines).replace("\r\n", "\n").rstrip("\n")


def _too_long(file: TextFile, longest: int, line: str) -> BadRow:
    reason = f"the file is longer than {longest:,} characters, the most that a text may have"
    return BadRow(file=file.shown, line=1, column="", reason=reason, text=line[:200])
