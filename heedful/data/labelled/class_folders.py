"""Labels from names: class files with a text on each line, and class folders with a text in each file.

`heedful.data.read` looks for these layouts before it looks for files of splits.
"""

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
UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}  # names of folders that are not classes
MAX_CLASS_FILES = 1000  # maximum class files in a dataset
ClassesBySplit = dict[str, list[tuple[str, Path]]]  # (label, file or folder) of each class, by split


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassLayout:
    """The files or folders of each class, by split."""

    layout: Layout
    splits: ClassesBySplit
    notes: tuple[str, ...] = ()  # sentences for the user


# ---------------------------------------------------------------------------------------------------- detection


def find_in_folder(folder: Path, settings: DataSettings, kind: type[Example] | None) -> ClassLayout | None:
    """Find class files or class folders in a folder, or in its folders for train, dev and test.

    Args:
        folder: the folder.
        settings: settings, whose format decides on the layout if it is set.
        kind: class of the examples. Only LabelledExample has such layouts. If None, it is detected.

    Returns:
        The layout, or None if the folder has neither layout, or has one file for each split.
    """
    if not _is_class_layout_allowed(settings, kind):
        return None
    folders, files = _list_folder(folder)
    files_by_split: dict[str, list[Path]] = {}  # files with the name of a split
    for file in files if settings.format != "class-folders" else ():
        split, _ = parse_split_name(file)
        if split and (_may_be_text(file) or not settings.format):
            files_by_split.setdefault(split, []).append(file)
    if files_by_split:
        have_classes = all(len(paths) > 1 and all(map(_may_be_text, paths)) for paths in files_by_split.values())
        if not have_classes or not _has_unlabelled_lines(files_by_split):
            return None
        return ClassLayout(layout="class-files", splits=_label_by_file_name(files_by_split))
    folders_by_split: dict[str, list[Path]] = {}
    for path in folders:
        folders_by_split.setdefault(parse_split_name(path)[0], []).append(path)
    other_folders = folders_by_split.pop("", [])
    if folders_by_split and ("train" in folders_by_split or not other_folders):
        classes = find_in_paths(folders_by_split, settings, kind)
        if classes is None:
            return None
        return replace(classes, notes=(*classes.notes, *_unused_note([*other_folders, *files])))
    return find_in_paths({"train": (folder,)}, settings, kind)


def find_in_paths(
    sources_by_split: Mapping[str, Sequence[object]], settings: DataSettings, kind: type[Example] | None
) -> ClassLayout | None:
    """Find class files or class folders among the paths of each split.

    Args:
        sources_by_split: paths, or data in memory, of each split.
        settings: settings, whose format decides on the layout if it is set.
        kind: class of the examples. If None, it is detected.

    Returns:
        The layout, or None if the paths have neither layout.
    """
    if not _is_class_layout_allowed(settings, kind):
        return None
    paths_by_split: dict[str, list[Path]] = {}
    for split, sources in sources_by_split.items():
        paths_by_split[split] = [Path(source) for source in sources if isinstance(source, str | Path)]
        if len(paths_by_split[split]) < len(sources):
            return None
    all_paths = [path for paths in paths_by_split.values() for path in paths]
    are_folders = [os.path.isdir(path) for path in all_paths]
    if all(are_folders):
        return _detect_in_folders(paths_by_split, settings)
    if any(are_folders):
        return None
    if settings.format != "class-files" and not _may_be_class_files(paths_by_split, kind):
        return None
    if settings.format == "class-folders":
        return None
    return ClassLayout(layout="class-files", splits=_label_by_file_name(paths_by_split))


def _may_be_class_files(paths_by_split: Mapping[str, Sequence[Path]], kind: type[Example] | None) -> bool:
    """Whether files that the user lists are class files, though no format says so.

    Each split must have several files of plain text without labels. If the class of the examples is unknown, files with
    a known suffix are not class files.
    """
    all_paths = [path for paths in paths_by_split.values() for path in paths]
    if any(len(paths) < 2 for paths in paths_by_split.values()) or not all(map(_may_be_text, all_paths)):
        return False
    if kind is None and any(stem_and_suffix(path)[1] for path in all_paths):
        return False
    return _has_unlabelled_lines(paths_by_split)


def _is_class_layout_allowed(settings: DataSettings, kind: type[Example] | None) -> bool:
    """Whether labels may be names of files or folders, by the format setting and the class of the examples."""
    return settings.format in LAYOUTS or (settings.format is None and kind in (None, LabelledExample))


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the folders and the files in a folder, sorted, without hidden ones and files that describe the data."""
    try:
        with os.scandir(folder) as entries:
            paths = sorted((Path(entry.path), entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    files = [path for path, is_folder in paths if not is_folder and path.name.casefold() not in IGNORED]
    return [path for path, is_folder in paths if is_folder], files


def _may_be_text(file: Path) -> bool:
    """Whether a file may be plain text by its suffix, which is ".txt", unknown or missing."""
    return FORMAT_BY_SUFFIX.get(stem_and_suffix(file)[1]) in (None, "text")


def is_named_as_text(file: Path) -> bool:
    """Whether a file has a suffix of plain text, or no suffix."""
    return not file.suffix or (bool(stem_and_suffix(file)[1]) and _may_be_text(file))


def _has_unlabelled_lines(files: Mapping[str, Sequence[Path]]) -> bool:
    """Whether the first file of each split has no labels, columns or tags in its lines."""
    for paths in files.values():
        try:
            file, _ = detect_encoding(paths[0])
            has_labels = label_text.is_label_text(file, strict=False) or label_text.is_tab_separated(file)
        except NoRowsError:
            continue
        head = read_head(file)
        if has_labels or conll.is_conll(head) or conll.has_header(head, blank_lines=True):
            return False
    return True


def _detect_in_folders(folders_by_split: Mapping[str, list[Path]], settings: DataSettings) -> ClassLayout | None:
    """Find class files or class folders in the folders of each split. Return None if they have neither or both."""
    class_folders: ClassesBySplit = {}
    class_files: dict[str, list[Path]] = {}
    notes: list[str] = []
    for split, folders in folders_by_split.items():
        contents = {folder: _list_folder(folder) for folder in folders}
        if len(folders) > 1 and not any(subfolders for subfolders, _ in contents.values()):  # each folder is a class
            class_folders[split] = [(folder.absolute().name, folder) for folder in folders]
            continue
        for subfolders, files in contents.values():
            classes = [
                path for path in subfolders if path.name.casefold() not in UNLABELLED and _holds_texts(path, settings)
            ]
            if classes and settings.format != "class-files":
                class_folders.setdefault(split, []).extend((path.name, path) for path in classes)
                notes += _unused_note([path for path in (*subfolders, *files) if path not in classes])
            elif settings.format != "class-folders":
                class_files.setdefault(split, []).extend(filter(_may_be_text, files))
                notes += _unused_note([*subfolders, *(path for path in files if not _may_be_text(path))])
    if class_folders and not class_files and sum(map(len, class_folders.values())) > 1:
        return ClassLayout(layout="class-folders", splits=class_folders, notes=tuple(notes))
    if class_folders or not class_files or not all(class_files.values()):
        return None
    if settings.format is None:
        have_classes = all(len(files) > 1 for files in class_files.values())
        if not have_classes or not _look_like_class_files(class_files):
            return None
    return ClassLayout(layout="class-files", splits=_label_by_file_name(class_files), notes=tuple(notes))


def _look_like_class_files(files: Mapping[str, list[Path]]) -> bool:
    """Whether files are class files if no format is set: plain text, with similar names or a suffix of text."""
    names = [_split_name(stem_and_suffix(path)[0]) for paths in files.values() for path in paths]
    common_words = _common_prefix_length(names) + _common_prefix_length([name[::-1] for name in names])
    suffixes = {stem_and_suffix(path)[1] for paths in files.values() for path in paths}
    return (common_words > 0 or "" not in suffixes) and _has_unlabelled_lines(files)


def _holds_texts(folder: Path, settings: DataSettings) -> bool:
    """Whether the first file in a folder is named like a text. If a format is set, any unknown suffix is accepted."""
    is_text = _may_be_text if settings.format else is_named_as_text
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file():
                    return is_text(Path(entry.path))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    return False


def _unused_note(paths: Sequence[Path]) -> list[str]:
    """Return the note that paths are not used, as a list, or [] if there are no such paths."""
    names = [path.name for path in paths]
    return [f"not used: {', '.join(names[:10])}{' and more' if len(names) > 10 else ''}"] if names else []


def _label_by_file_name(files: Mapping[str, Sequence[Path]]) -> ClassesBySplit:
    """Label files by their names, without names of splits and without the first and last words that all names share.

    Raises:
        DataError: If there are too many files, or if two files of a split have the same label.
    """
    if (count := sum(map(len, files.values()))) > MAX_CLASS_FILES:
        raise DataError(f"{count:,} files, each with the texts of a class; expected at most {MAX_CLASS_FILES:,}")
    words_by_path = {path: _split_name(stem_and_suffix(path)[0]) for paths in files.values() for path in paths}
    names = list(words_by_path.values())
    min_words = min(map(len, names))
    # words that all names share at their beginning and end; at least one word remains as label
    num_first = min(_common_prefix_length(names), min_words - 1)
    num_last = min(_common_prefix_length([name[::-1] for name in names]), min_words - 1 - num_first)
    splits: ClassesBySplit = {}
    for split, paths in files.items():
        path_by_label: dict[str, Path] = {}
        for path in paths:
            words = words_by_path[path]
            words = words[num_first : len(words) - num_last]
            first_separator = words[0][0]
            label = "".join(separator + word for separator, word in words).removeprefix(first_separator)
            if label in path_by_label:
                raise DataError(f"{path_by_label[label]} and {path}: both would be the class {shown(label)}")
            path_by_label[label] = path
        splits[split] = list(path_by_label.items())
    return splits


def _common_prefix_length(sequences: Collection[Sequence[object]]) -> int:
    """Return the length of the common prefix of all sequences."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((index for index, values in columns if len({*values}) > 1), min(map(len, sequences)))


def _split_name(name: str) -> list[tuple[str, str]]:
    """Split a file's name into (separator before the word, word), without names of splits."""
    parts = re.findall(r"([._\-\s]*)([^._\-\s]+)", name)
    return [(separator, word) for separator, word in parts if word.casefold() not in SPLIT_BY_WORD] or [("", name)]


# ---------------------------------------------------------------------------------------------------- reading


def open_classes(
    layout: ClassLayout, settings: DataSettings, kind: type[Example] | None
) -> dict[str, tuple[DataFile, ...]]:
    """Open each class as a data file of its split.

    Raises:
        DataError: If the task needs examples of another class, or if columns are set.
    """
    folder = next(path for classes in layout.splits.values() for _, path in classes).parent
    if kind not in (None, LabelledExample):
        assert kind is not None
        raise DataError(f"{folder}: labels are the names of classes, but this task needs {kind.about} in each example")
    check_column_roles(str(folder), "texts whose labels are names of files or folders", settings)
    read = _read_class_file if layout.layout == "class-files" else _read_class_folder
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


def _read_class_file(path: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    for example in read_texts(file, row_errors):
        yield LabelledExample(file=example.file, line=example.line, text=example.text, label=label)


def _read_class_folder(folder: Path, label: str, settings: DataSettings, row_errors: RowErrors) -> Iterator[Example]:
    for path, text in read_text_files(folder, settings, row_errors):
        yield LabelledExample(file=str(path), line=1, text=text, label=label)


def read_text_files(folder: Path, settings: DataSettings, row_errors: RowErrors) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) for each file in a folder. An unreadable file is a bad row."""
    folders, files = _list_folder(folder)
    if folders:
        raise DataError(f"{folder}: holds the folder {folders[0].name}; expected only files, each with one text")
    for path in files:
        if (text := read_text_file(path, settings, row_errors)) is not None:
            yield path, text


def list_text_files(folder: Path, ancestors: tuple[Path, ...] = (), *, exclude: Path | None = None) -> Iterator[Path]:
    """Yield the text files in the leaf folders below a folder. Files beside folders are skipped.

    Args:
        folder: the folder.
        ancestors: resolved paths of the folders above. A link to one of them is skipped.
        exclude: a folder of results, which is treated as missing. If None, no folder is excluded.
    """
    resolved = folder.resolve()
    if resolved in ancestors:
        return
    folders, files = _list_folder(folder)
    if exclude is not None:
        folders = [subfolder for subfolder in folders if subfolder.resolve() != exclude.resolve()]
    for subfolder in folders:
        yield from list_text_files(subfolder, (*ancestors, resolved), exclude=exclude)
    if not folders:
        yield from filter(_may_be_text, files)


def read_text_file(path: Path, settings: DataSettings, row_errors: RowErrors) -> str | None:
    """Read a file as one text, without line ends at its end.

    Returns:
        The text, which is "" if the file is empty, or None if the file is unreadable and was rejected as a bad row.
    """
    try:
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
    except NoRowsError:
        return ""
    except HeedfulError as error:
        if not str(error).startswith(f"{path}: "):  # the error is in a setting, such as an unknown encoding
            raise
        reason = str(error).removeprefix(f"{path}: ")
        row_errors.reject(BadRow(file=str(path), line=1, column="", reason=reason, text=""))
        return None
    lines: list[str] = []
    size = 0
    for _, line, bad in all_lines(file):
        size += len(line)
        if bad is None and size > settings.max_row_bytes:
            bad = _too_long_text(file, settings.max_row_bytes, line)
        if bad is not None:
            row_errors.reject(bad)
            return None
        lines.append(line)
    return "".join(lines).replace("\r\n", "\n").rstrip("\n")


def _too_long_text(file: TextFile, max_chars: int, line: str) -> BadRow:
    reason = f"the file is longer than {max_chars:,} characters, the most that a text may have"
    return BadRow(file=file.display_name, line=1, column="", reason=reason, text=line[:200])
