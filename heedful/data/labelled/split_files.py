"""Recognition of the files of the train, dev and test splits by their names, and of SPLIT=FILE arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from heedful.data.labelled.data_file import stem_and_suffix
from heedful.errors import DataError

SPLIT_BY_WORD: dict[str, str] = {  # split by lower-case word in a file's name
    "train": "train",
    "training": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "testa": "dev",
    "test": "test",
    "testb": "test",
}
IGNORED = {"license", "license.txt", "readme", "readme.md", "readme.txt"}  # files that describe the data
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # stem of a shard: name, index of the shard, how many shards


def find_split_files(folder: Path) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Find the files of each split in a folder.

    "train.csv" is preferred to "my-train.csv". A split may have shards such as "train-00000-of-00002.parquet".

    Returns:
        The files of each split, train first, and notes for the user.

    Raises:
        DataError: If no file belongs to a split, or several files could be the same split.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    candidates: dict[str, dict[str, list[Path]]] = {}  # files by split and by the name from `parse_split_name`
    for path in files:
        if path.name.casefold() in IGNORED:
            continue
        split, name = parse_split_name(path)
        if split:
            candidates.setdefault(split, {}).setdefault(name, []).append(path)
    if not candidates:
        raise DataError(
            f"{folder}: has no file for train, dev or test: call them train.csv, dev.csv and test.csv "
            "(or .tsv, .jsonl, .json, .parquet, .txt, .conll), or give the file itself; where each class is "
            "a folder with a text in each file, or a file, say --data.format=class-folders or class-files"
        )
    order = [split for split in dict.fromkeys(SPLIT_BY_WORD.values()) if split in candidates]
    files_by_split = {split: _files_of_split(folder, split, candidates[split]) for split in order}
    used = {path for paths in files_by_split.values() for path in paths}
    notes = [f"{split}: {', '.join(path.name for path in paths)}" for split, paths in files_by_split.items()]
    unused = [path.name for path in files if path not in used]
    if unused:
        notes.append(f"not used: {', '.join(unused[:10])}{' and more' if len(unused) > 10 else ''}")
    return files_by_split, notes


def parse_split_name(path: Path) -> tuple[str, str]:
    """Return (split, name) of a file: "" as split if the name has none, and "" as name if it is only the split.

    The name is without the suffixes and the index of the shard.

    >>> names = "my-train.csv", "dev-00000-of-00002.parquet", "constraint.csv"
    >>> [parse_split_name(Path(name)) for name in names]
    [('train', 'my-train'), ('dev', ''), ('', 'constraint')]
    """
    stem = stem_and_suffix(path)[0]
    shard = SHARD.fullmatch(stem)
    name = shard.group(1) if shard else stem
    if split := SPLIT_BY_WORD.get(name.casefold()):
        return split, ""
    splits = {SPLIT_BY_WORD[word] for word in _name_words(name) if word in SPLIT_BY_WORD}
    return splits.pop() if len(splits) == 1 else "", name


def _name_words(name: str) -> list[str]:
    """Divide a file's name into lower-case words, at non-letters and before capitals ("myTrain").

    A run of letters that names a split ("testA") is one word.
    """
    words: list[str] = []
    for letters in re.findall(r"[^\W\d_]+", name):
        if letters.casefold() in SPLIT_BY_WORD:
            words.append(letters)
        else:
            words += re.split(r"(?<=[a-z])(?=[A-Z])", letters)
    return [word.casefold() for word in words]


def assign_splits(files: Sequence[Path]) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Assign files to splits by their names, or all to train if no name has a split.

    Returns:
        The files of each split, train first, and notes for the user.

    Raises:
        DataError: If some names have a split and others have none.
    """
    splits = [parse_split_name(path)[0] for path in files]
    if {*splits} <= {"", "train"} or len({*splits}) == 1:
        return {"train": tuple(files)}, [f"all {len(files)} files are train"]
    if unclear := [path.name for path, split in zip(files, splits, strict=True) if not split]:
        raise DataError(
            f"{', '.join(unclear)}: the name does not say whether it is train, dev or test, as those of other files "
            "do: say it for each file, as train=FILE dev=FILE"
        )
    assigned: dict[str, tuple[Path, ...]] = {}
    for split in dict.fromkeys(SPLIT_BY_WORD.values()):
        if split in splits:
            assigned[split] = tuple(path for path, its_split in zip(files, splits, strict=True) if its_split == split)
    return assigned, [f"{split}: {', '.join(path.name for path in paths)}" for split, paths in assigned.items()]


def parse_data_arguments(words: Sequence[Path]) -> Path | Sequence[Path] | Mapping[str, Sequence[Path]]:
    """Parse the data arguments of a command: files and folders, or SPLIT=FILE for all files.

    Returns:
        A single path, a sequence of paths, or the files of each split.

    Raises:
        DataError: If some arguments are SPLIT=FILE and some are not.

    >>> parse_data_arguments([Path("a.csv")]), parse_data_arguments([Path("train=a.csv"), Path("valid=b.csv")])
    (PosixPath('a.csv'), {'train': [PosixPath('a.csv')], 'dev': [PosixPath('b.csv')]})
    """
    files_by_split: dict[str, list[Path]] = {}
    for word in words:
        name, equals, file = str(word).partition("=")
        if equals and file and name.casefold() in SPLIT_BY_WORD and not os.path.exists(word):
            files_by_split.setdefault(SPLIT_BY_WORD[name.casefold()], []).append(Path(file))
    if not files_by_split:
        return words[0] if len(words) == 1 else words
    if sum(map(len, files_by_split.values())) < len(words):
        raise DataError("some files are given as SPLIT=FILE, some are not: say it for each, as train=FILE dev=FILE")
    return files_by_split


def _files_of_split(folder: Path, split: str, files_by_name: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    """Choose the files of a split: the files named exactly like the split, else the files of the only other name."""
    paths = files_by_name[""] if "" in files_by_name else next(iter(files_by_name.values()))
    shards = [SHARD.fullmatch(stem_and_suffix(path)[0]) for path in paths]
    shard_counts = {shard.group(3) for shard in shards if shard}
    has_several_names = "" not in files_by_name and len(files_by_name) > 1
    are_shards_of_one_file = len(shard_counts) == 1 and all(shards)
    if has_several_names or (len(paths) > 1 and not are_shards_of_one_file):
        listed = ", ".join(path.name for same_name in files_by_name.values() for path in same_name)
        raise DataError(f"{folder}: {listed} could each be the {split} split: give the files, as train=FILE dev=FILE")
    if shard_counts and int(shard_counts.pop()) != len(paths):
        raise DataError(f"{folder}: holds {len(paths)} shards of the {split} split, but their names say more")
    return tuple(paths)
