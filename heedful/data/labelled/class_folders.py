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
    FORMAT_BY_SUFFIX,
    DataFile,
    DataSettings,
    check_column_roles,
    read_texts,
    stem_and_suffix,
)
from heedful.data.labelled.split_files import IGNORED, SPLIT_BY_WORD, parse_split_name
from heedful.errors import DataError, HeedfulError

Layout = Literal["class-files", "class-folders"]
LAYOUTS: tuple[Layout, ...] = ("class-files", "class-folders")
UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}  # folders of unlabelled texts beside those of classes
MAX_CLASS_FILES = 1000
PathsBySplit = dict[str, list[tuple[str, Path]]]  # (label, file or folder) of each class, by split


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassLayout:
    """Files or folders of each class, by split."""

    layout: Layout
    splits: PathsBySplit
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- detection


def find_in_folder(folder: Path, settings: DataSettings, kind: type[Example] | None) -> ClassLayout | None:
    """Find class files or class folders in a folder, or in its folders for train, dev and test.

    Returns:
        None if the folder has neither layout, or has one file for each split.
    """
    if not _is_class_layout_allowed(settings, kind):
        return None
    folders, files = _list_folder(folder)
    split_files: dict[str, list[Path]] = {}
    for file in files if settings.format != "class-folders" else ():
        if _may_be_text(file) or not settings.format:
            split_files.setdefault(parse_split_name(file)[0], []).append(file)
    if named := {split: members for split, members in split_files.items() if split}:
        if not all(
            len(files) > 1 and all(map(_may_be_text, files)) for files in named.values()
        ) or not _has_unlabelled_lines(named):
            return None
        return ClassLayout(layout="class-files", splits=_label_by_file_name(named))
    split_folders: dict[str, list[Path]] = {}
    for path in folders:
        split_folders.setdefault(parse_split_name(path)[0], []).append(path)
    others = split_folders.pop("", [])
    if split_folders and ("train" in split_folders or not others):
        classes = find_in_paths({split: tuple(members) for split, members in split_folders.items()}, settings, kind)
        return None if classes is None else replace(classes, notes=(*classes.notes, *_unused([*others, *files])))
    return find_in_paths({"train": (folder,)}, settings, kind)


def find_in_paths(
    places_by_split: Mapping[str, Sequence[object]], settings: DataSettings, kind: type[Example] | None
) -> ClassLayout | None:
    """Find class files or class folders among the paths of each split; None if they have neither layout."""
    paths = {
        split: [Path(place) for place in places if isinstance(place, str | Path)]
        for split, places in places_by_split.items()
    }
    if not _is_class_layout_allowed(settings, kind) or any(
        len(paths[split]) < len(places) for split, places in places_by_split.items()
    ):
        return None
    files = [path for some in paths.values() for path in some]
    directories = [os.path.isdir(path) for path in files]
    if all(directories):
        return _detect_in_folders(paths, settings)
    if any(directories):
        return None
    wanted = settings.format == "class-files"
    if not wanted and (
        any(len(paths_of_split) < 2 for paths_of_split in paths.values())
        or not all(map(_may_be_text, files))
        or (kind is None and any(stem_and_suffix(path)[1] for path in files))
        or not _has_unlabelled_lines(paths)
    ):
        return None
    return (
        ClassLayout(layout="class-files", splits=_label_by_file_name(paths))
        if settings.format != "class-folders"
        else None
    )


def _is_class_layout_allowed(settings: DataSettings, kind: type[Example] | None) -> bool:
    return settings.format in LAYOUTS or (settings.format is None and kind in (None, LabelledExample))


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the folders and files in a folder, sorted, without hidden ones and those that describe the data."""
    try:
        with os.scandir(folder) as entries:
            paths = sorted((Path(entry.path), entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    files = [path for path, is_folder in paths if not is_folder and path.name.casefold() not in IGNORED]
    return [path for path, is_folder in paths if is_folder], files


def _may_be_text(file: Path) -> bool:
    """Whether a file's suffix is not that of another format: ".txt", any unknown one, or none."""
    return FORMAT_BY_SUFFIX.get(stem_and_suffix(file)[1]) in (None, "text")


def is_named_as_text(file: Path) -> bool:
    """Whether a file has a suffix of plain text, or no suffix."""
    return not file.suffix or (bool(stem_and_suffix(file)[1]) and _may_be_text(file))


def _has_unlabelled_lines(files: Mapping[str, Sequence[Path]]) -> bool:
    """Whether the first file of each split has no labels, columns or tags inside."""
    for paths in files.values():
        try:
            file, _ = detect_encoding(paths[0])
            labelled = label_text.is_label_text(file, strict=False) or label_text.is_tab_separated(file)
        except NoRowsError:
            continue
        head = read_head(file)
        if labelled or conll.is_conll(head) or conll.has_header(head, blank_lines=True):
            return False
    return True


def _detect_in_folders(paths: Mapping[str, list[Path]], settings: DataSettings) -> ClassLayout | None:
    splits: PathsBySplit = {}
    files: dict[str, list[Path]] = {}
    notes: list[str] = []
    for split, folders in paths.items():
        contents = {folder: _list_folder(folder) for folder in folders}
        if len(folders) > 1 and not any(subfolders for subfolders, _ in contents.values()):  # each folder is a class
            splits[split] = [(folder.absolute().name, folder) for folder in folders]
            continue
        for subfolders, members in contents.values():
            classes = [
                path for path in subfolders if path.name.casefold() not in UNLABELLED and _holds_texts(path, settings)
            ]
            if classes and settings.format != "class-files":
                splits.setdefault(split, []).extend((path.name, path) for path in classes)
                notes += _unused([path for path in (*subfolders, *members) if path not in classes])
            elif settings.format != "class-folders":
                files.setdefault(split, []).extend(filter(_may_be_text, members))
                notes += _unused([*subfolders, *(path for path in members if not _may_be_text(path))])
    if splits and not files and sum(map(len, splits.values())) > 1:
        return ClassLayout(layout="class-folders", splits=splits, notes=tuple(notes))
    if splits or not all(files.values()) or not files:
        return None
    if settings.format is None and (
        any(len(members) < 2 for members in files.values()) or not _look_like_class_files(files)
    ):
        return None
    return ClassLayout(layout="class-files", splits=_label_by_file_name(files), notes=tuple(notes))


def _look_like_class_files(files: Mapping[str, list[Path]]) -> bool:
    """Whether the files of a folder are plain text, and share the suffix of text or words in their names."""
    names = [_words(stem_and_suffix(path)[0]) for paths in files.values() for path in paths]
    common = _shared(names) + _shared([name[::-1] for name in names])
    suffixes = {stem_and_suffix(path)[1] for paths in files.values() for path in paths}
    return (common > 0 or "" not in suffixes) and _has_unlabelled_lines(files)


def _holds_texts(folder: Path, settings: DataSettings) -> bool:
    """Whether some file in a folder is named like a text; any name counts if the format is set."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file():
                    return (_may_be_text if settings.format else is_named_as_text)(Path(entry.path))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    return False


def _unused(paths: Sequence[Path]) -> list[str]:
    names = [path.name for path in paths]
    return [f"not used: {', '.join(names[:10])}{' and more' if len(names) > 10 else ''}"] if names else []


def _label_by_file_name(files: Mapping[str, Sequence[Path]]) -> PathsBySplit:
    """Label files by their names, without split names and without the first and last words that all names share."""
    if (count := sum(map(len, files.values()))) > MAX_CLASS_FILES:
        raise DataError(f"{count:,} files, each with the texts of a class; expected at most {MAX_CLASS_FILES:,}")
    words = {path: _words(stem_and_suffix(path)[0]) for paths in files.values() for path in paths}
    shortest = min(map(len, words.values()))
    start = min(_shared(words.values()), shortest - 1)
    stop = min(_shared([words_of_name[::-1] for words_of_name in words.values()]), shortest - 1 - start)
    splits: PathsBySplit = {}
    for split, paths in files.items():
        labels: dict[str, Path] = {}
        for path in paths:
            distinct = words[path][start : len(words[path]) - stop]
            label = "".join(f"{separator}{word}" for separator, word in distinct)[len(distinct[0][0]) :]
            if label in labels:
                raise DataError(f"{labels[label]} and {path}: both would be the class {shown(label)}")
            labels[label] = path
        splits[split] = list(labels.items())
    return splits


def _shared(sequences: Collection[Sequence[object]]) -> int:
    """Return the length of the common prefix of all sequences."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((index for index, values in columns if len({*values}) > 1), min(map(len, sequences)))


def _words(name: str) -> list[tuple[str, str]]:
    """Split a file's name into (separator, word), without the names of splits."""
    parts = re.findall(r"([._\-\s]*)([^._\-\s]+)", name)
    return [(separator, word) for separator, word in parts if word.casefold() not in SPLIT_BY_WORD] or [("", name)]


# ---------------------------------------------------------------------------------------------------- reading


def open_classes(
    layout: ClassLayout, settings: DataSettings, kind: type[Example] | None
) -> dict[str, tuple[DataFile, ...]]:
    """Open each class as a data file of its split."""
    name = next(path for classes in layout.splits.values() for _, path in classes).parent
    if kind not in (None, LabelledExample):
        assert kind is not None
        raise DataError(f"{name}: labels are the names of classes, but this task needs {kind.about} in each example")
    check_column_roles(str(name), "texts whose labels are names of files or folders", settings)
    read = _lines_of if layout.layout == "class-files" else _files_of
    files_by_split: dict[str, tuple[DataFile, ...]] = {}
    for split, classes in layout.splits.items():
        labels = sort_labels({label for label, _ in classes})
        files_by_split[split] = tuple(
            DataFile(
                display_name=str(path),
                kind=LabelledExample,
                read=partial(read, path, label, settings),
                notes=(LAYOUT_NOTES[layout.layout], *layout.notes),
                labels=labels,
            )
            for label, path in classes
        )
    return files_by_split


LAYOUT_NOTES: dict[Layout, str] = {
    "class-files": "a text on each line, its label the name of the file (format=class-files)",
    "class-folders": "a text in each file, its label the name of the folder (format=class-folders)",
}


def _lines_of(path: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    for example in read_texts(file, row_errors):
        yield LabelledExample(file=example.file, line=example.line, text=example.text, label=label)


def _files_of(folder: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    for path, text in read_text_files(folder, settings, row_errors):
        yield LabelledExample(file=str(path), line=1, text=text, label=label)


def read_text_files(folder: Path, settings: DataSettings, row_errors: RowErrors) -> Iterator[tuple[Path, str]]:
    """Yield each file of a folder as one text; an unreadable file is a bad row."""
    folders, files = _list_folder(folder)
    if folders:
        raise DataError(f"{folder}: holds the folder {folders[0].name}; expected only files, each with one text")
    for path in files:
        if (text := read_text_file(path, settings, row_errors)) is not None:
            yield path, text


def list_text_files(folder: Path, ancestors: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the text files in the leaf folders below a folder; files beside folders are skipped.

    A link to a parent folder is skipped too.
    """
    if (real := folder.resolve()) in ancestors:
        return
    folders, files = _list_folder(folder)
    for subfolder in folders:
        yield from list_text_files(subfolder, (*ancestors, real))
    if not folders:
        yield from filter(_may_be_text, files)


def read_text_file(path: Path, settings: DataSettings, row_errors: RowErrors) -> str | None:
    """Read a file as one text, without line ends at its end; "" if it is empty, None if it is a bad row."""
    try:
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    except NoRowsError:
        return ""
    except HeedfulError as error:
        if not str(error).startswith(f"{path}: "):  # not about this file: a wrong setting, such as an unknown encoding
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
    return BadRow(file=file.display_name, line=1, column="", reason=reason, text=line[:200])
