"""Read files of a model folder from the internet, which nobody has to trust: names, links, sizes and JSON are checked.

A file must be a regular file in the folder, within its size limit, and JSON is parsed strictly. `checkpoint` and
`tokenizer` read model folders with these functions.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from heedful.errors import ModelError, quoted

MIB = 1 << 20
LIMITS = {  # file name -> maximum size in bytes; OTHER for names that are not listed
    "model.safetensors.index.json": 2 * MIB,
    "pytorch_model.bin.index.json": 2 * MIB,
    "tokenizer.json": 64 * MIB,
    "vocab.json": 64 * MIB,
    "vocab.txt": 64 * MIB,
    "merges.txt": 64 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": 16 * MIB,
    "added_tokens.json": 16 * MIB,
}
SENTENCEPIECE = 64 * MIB  # maximum size of *.model and *.spm, in bytes
OTHER = MIB  # maximum size of other files, in bytes
MAX_VALUES = 4_000_000  # JSON values in one file, estimated by counting separators
MAX_NAME_LENGTH = 200  # characters of a path inside the folder


def size_limit(name: str) -> int:
    """Return the maximum size of a file with this name, in bytes."""
    return SENTENCEPIECE if name.endswith((".model", ".spm")) else LIMITS.get(Path(name).name, OTHER)


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether a path, with links followed, is in the folder.

    In the cache of the hub, files of a snapshot, and of its subfolders, may be links to the blobs of the model.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [parent.parent.parent / "blobs" for parent in (root, root.parent) if parent.parent.name == "snapshots"]
    return any(target.is_relative_to(allowed) for allowed in (root, *blobs))


def check_name(folder: Path, name: str) -> None:
    """Raise ModelError for a name of a file outside the folder, as written or with links followed."""
    if not _is_plain(name) or not is_inside(folder, folder / name):
        raise _outside(folder, name)


def _is_plain(name: str) -> bool:
    """Return whether a name is a normalised, printable and short relative path without "..", such as "a/b.json"."""
    path = Path(name)
    is_normalised = not path.is_absolute() and ".." not in path.parts and str(path) == name != "."
    return is_normalised and name.isprintable() and len(name) <= MAX_NAME_LENGTH


def _outside(folder: Path, name: str) -> ModelError:
    """Return the error for a file outside the folder."""
    return ModelError(
        f"{folder}: the file {quoted(name)} lies outside the folder or has no plain name; "
        "put a copy of it into the folder"
    )


def check_inside(folder: Path, file: str) -> None:
    """Raise ModelError unless a name is that of a file directly in the folder."""
    if Path(file).name != file:
        raise _outside(folder, file)
    check_name(folder, file)
    if not os.path.isfile(folder / file):
        raise ModelError(f"{folder}: the file {quoted(file)} is missing")


def read_bytes(folder: Path, name: str, *, max_bytes: int | None = None) -> bytes:
    """Read a file of the folder, of at most `max_bytes` bytes.

    Args:
        max_bytes: Maximum size. If None, the limit in LIMITS for files with this name.

    Raises:
        FileNotFoundError, NotADirectoryError: If the file is missing.
        ModelError: If it is no regular file, too large, outside the folder, or cannot be read.
    """
    path, max_bytes = folder / name, size_limit(name) if max_bytes is None else max_bytes
    if not _is_plain(name):
        raise _outside(folder, name)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is no plain file")
        check_name(folder, name)
        if status.st_size > max_bytes:
            raise ModelError(f"{path} has {status.st_size} bytes; at most {max_bytes} are read")
        with path.open("rb") as file:
            return file.read(status.st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_json(folder: Path, name: str, *, max_bytes: int | None = None) -> Any:
    """Parse a JSON file of the folder, which may begin with a byte order mark; raises the errors of `read_bytes`."""
    return parse_json(read_bytes(folder, name, max_bytes=max_bytes).removeprefix(b"\xef\xbb\xbf"), folder / name)


def parse_json(raw: bytes, path: Path) -> Any:
    """Parse JSON in UTF-8; raises ModelError for duplicate keys, numbers that are not finite, and deep nesting."""

    def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            (duplicate, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ModelError(f"{path} gives the key {quoted(duplicate)} twice: remove one")
        return values

    def finite_number(literal: str) -> float:
        if not math.isfinite(value := float(literal)):
            refuse(literal)
        return value

    def refuse(literal: str) -> NoReturn:
        raise ModelError(f"{path} holds {literal[:40]}, which is not a number in JSON")

    count = sum(map(raw.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise ModelError(f"{path} holds about {count} JSON values; at most {MAX_VALUES} are read")
    try:
        text = str(raw, "utf-8")
        return json.loads(text, object_pairs_hook=unique_keys, parse_float=finite_number, parse_constant=refuse)
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON in UTF-8: {error}; write it again from its source") from None
