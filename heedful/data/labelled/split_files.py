"""Find the files of the train, dev and test splits by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from heedful.data.labelled.data_file import stem_and_suffix
from heedful.errors import DataError

SPLITS: dict[str, str] = {  # word in a file's name to its split
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
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


def find_split_files(folder: Path) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Return the files of each split in a folder, and notes for the user.

    "train.csv" is preferred to "my-train.csv"; shards are called "train-00000-of-00002.parquet".

    Raises:
        DataError: If no file belongs to a split, or several files could be the same split.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    files_by_split: dict[str, dict[str, list[Path]]] = {}  # split, name without shard, files
    for path in files:
        if path.name.casefold() in IGNORED:
            continue
        split, rank = parse_split_name(path)
        if split:
            files_by_split.setdefault(split, {}).setdefault(rank, []).append(path)
    if not files_by_split:
        raise DataError(
            f"{folder}: has no file for train, dev or test: call them train.csv, dev.csv and test.csv "
            "(or .tsv, .jsonl, .json, .parquet, .txt, .conll), or give the file itself; where each class is "
            "a folder with a text in each file, or a file, say --data.format=class-folders or class-files"
        )
    order = [split for split in dict.fromkeys(SPLITS.values()) if split in files_by_split]
    chosen = {split: _chosen(folder, split, files_by_split[split]) for split in order}
    used = {path for paths in chosen.values() for path in paths}
    notes = [f"{split}: {', '.join(path.name for path in paths)}" for split, paths in chosen.items()]
    others = [path.name for path in files if path not in used]
    if others:
        notes.append(f"not used: {', '.join(others[:10])}{' and more' if len(others) > 10 else ''}")
    return chosen, notes


def parse_split_name(path: Path) -> tuple[str, str]:
    """Return the split in a file's name ("" if none), and the name ("" if it is the split only).

    >>> names = "my-train.csv", "dev-00000-of-00002.parquet", "constraint.csv"
    >>> [parse_split_name(Path(name)) for name in names]
    [('train', 'my-train'), ('dev', ''), ('', 'constraint')]
    """
    stem = stem_and_suffix(path)[0]
    shard = SHARD.fullmatch(stem)
    name = shard.group(1) if shard else stem
    whole = SPLITS.get(name.casefold())
    parts = {SPLITS[word] for word in _name_words(name) if word in SPLITS}
    return whole or (parts.pop() if len(parts) == 1 else ""), "" if whole else name


def _name_words(name: str) -> list[str]:
    """Split a file's name into lower-case words, at non-letters and before capitals ("myTrain").

    A run of letters that is the name of a split ("testA") is not split.
    """
    runs = re.findall(r"[^\W\d_]+", name)
    parts = [[run] if run.casefold() in SPLITS else re.split(r"(?<=[a-z])(?=[A-Z])", run) for run in runs]
    return [word.casefold() for words in parts for word in words]


def assign_splits(files: Sequence[Path]) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Assign files to splits by their names, or all to train if no name has a split; with notes for the user."""
    splits = [parse_split_name(path)[0] for path in files]
    if {*splits} <= {"", "train"} or len({*splits}) == 1:
        return {"train": tuple(files)}, [f"all {len(files)} files are train"]
    if unclear := [path.name for path, split in zip(files, splits, strict=True) if not split]:
        raise DataError(
            f"{', '.join(unclear)}: the name does not say whether it is train, dev or test, as those of other files "
            "do: say it of each, as train=FILE dev=FILE"
        )
    order = [split for split in dict.fromkeys(SPLITS.values()) if split in splits]
    assigned = {split: tuple(path for path, of in zip(files, splits, strict=True) if of == split) for split in order}
    return assigned, [f"{split}: {', '.join(path.name for path in paths)}" for split, paths in assigned.items()]


def parse_data_arguments(words: Sequence[Path]) -> Path | Sequence[Path] | Mapping[str, Sequence[Path]]:
    """Parse the data arguments of a command: one or more files or folders, or all as SPLIT=FILE.

    >>> parse_data_arguments([Path("a.csv")]), parse_data_arguments([Path("train=a.csv"), Path("valid=b.csv")])
    (PosixPath('a.csv'), {'train': [PosixPath('a.csv')], 'dev': [PosixPath('b.csv')]})
    """
    files_by_split: dict[str, list[Path]] = {}
    for word in words:
        name, equals, file = str(word).partition("=")
        if equals and file and name.casefold() in SPLITS and not os.path.exists(word):
            files_by_split.setdefault(SPLITS[name.casefold()], []).append(Path(file))
    if not files_by_split:
        return words[0] if len(words) == 1 else words
    if sum(map(len, files_by_split.values())) < len(words):
        raise DataError("some files are given as SPLIT=FILE, some are not: say it of each, as train=FILE dev=FILE")
    return files_by_split


def _chosen(folder: Path, split: str, names: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    paths = names[""] if "" in names else next(iter(names.values()))
    shards = [SHARD.fullmatch(stem_and_suffix(path)[0]) for path in paths]
    of = {shard.group(3) for shard in shards if shard}
    if ("" not in names and len(names) > 1) or (len(paths) > 1 and (len(of) != 1 or not all(shards))):
        shown = ", ".join(path.name for some in names.values() for path in some)
        raise DataError(f"{folder}: {shown} could each be the {split} split: give the files, as train=FILE dev=FILE")
    if of and int(of.pop()) != len(paths):
        raise DataError(f"{folder}: {len(paths)} shards of the {split} split are there, but they speak of more")
    return tuple(paths)
