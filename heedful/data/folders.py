"""Folders with files for train, dev and test, found by the parts of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from heedful.data.parts import bare_name
from heedful.errors import HeedfulError

SPLITS: dict[str, str] = {  # a part of a file's name to the split it is
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
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


def split_files(folder: Path) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """The files of each split in a folder, and what should be said.

    "train.csv" goes before "my-train.csv"; shards are called "train-00000-of-00002.parquet".
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise HeedfulError(f"{folder}: cannot be read: {error.strerror}") from None
    found: dict[str, dict[str, list[Path]]] = {}  # split, name without shard, files
    for path in files:
        stem = bare_name(path)[0]
        if path.name.casefold() in ("license", "license.txt", "readme.md", "readme.txt"):
            continue
        shard = SHARD.fullmatch(stem)
        name = shard.group(1) if shard else stem
        whole = SPLITS.get(name.casefold())
        parts = {SPLITS[part] for part in re.split(r"[._\-\s]+", name.casefold()) if part in SPLITS}
        if whole or len(parts) == 1:
            split = whole or parts.pop()
            rank = "" if whole else name
            found.setdefault(split, {}).setdefault(rank, []).append(path)
    if not found:
        raise HeedfulError(
            f"{folder}: has no file for train, dev or test: call them train.csv, dev.csv and test.csv "
            "(or .tsv, .jsonl, .json, .parquet, .txt, .conll), or give the file itself"
        )
    order = [split for split in dict.fromkeys(SPLITS.values()) if split in found]
    chosen = {split: _chosen(folder, split, found[split]) for split in order}
    used = {path for paths in chosen.values() for path in paths}
    said = [f"{split}: {', '.join(path.name for path in paths)}" for split, paths in chosen.items()]
    others = [path.name for path in files if path not in used]
    if others:
        said.append(f"not used: {', '.join(others[:10])}{' and more' if len(others) > 10 else ''}")
    return chosen, said


def _chosen(folder: Path, split: str, names: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    paths = names[""] if "" in names else next(iter(names.values()))
    shards = [SHARD.fullmatch(bare_name(path)[0]) for path in paths]
    of = {shard.group(3) for shard in shards if shard}
    if ("" not in names and len(names) > 1) or (len(paths) > 1 and (len(of) != 1 or not all(shards))):
        each = ", ".join(path.name for some in names.values() for path in some)
        raise HeedfulError(f"{folder}: {each} could each be the {split} split: give the files, as train=…, dev=…")
    if of and int(of.pop()) != len(paths):
        raise HeedfulError(f"{folder}: {len(paths)} shards of the {split} split are there, but they speak of more")
    return tuple(paths)
