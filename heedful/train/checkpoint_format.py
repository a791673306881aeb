"""Files of a checkpoint: their names, the safetensors layout, and the manifest that decides whether it is valid.

A checkpoint is a folder, `step-00000123`, of three files: `tensors.safetensors`, `values.json`, and `manifest.json`
with the size and the SHA-256 of the other two. It is valid if a manifest made from the files equals the one in the
folder, byte for byte. A sharded checkpoint has one file of shards for each rank instead of `tensors.safetensors`, and
`layout.json`, which lists the file and the position of each tensor's rows; the manifest includes these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.atomic_io import Chunk, checksum
from heedful.errors import RunError

FORMAT = 1
TENSORS, VALUES, MANIFEST = "tensors.safetensors", "values.json", "manifest.json"
LAYOUT, SHARD = "layout.json", r"part-[0-9]{5}-of-[0-9]{5}\.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FileDigests = dict[str, dict[str, int | str]]  # size and SHA-256 by file name


class DamageError(Exception):
    """A damaged or incomplete checkpoint."""


class TensorChunk(NamedTuple):
    """Rows of a tensor in a file."""

    offsets: tuple[int, ...]  # index of the first number in the full tensor
    shape: tuple[int, ...]  # shape of these rows
    file: str
    begin: int  # first byte in the file


class TensorLayout(NamedTuple):
    """Type, shape and chunks of a tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


# -- writing -------------------------------------------------------------------------------------------------------


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Return the content of a safetensors file: its header, and the tensors in the order in which they are written.

    Raises:
        RunError: If the type or layout of a tensor cannot be saved.
    """
    entries, end = {}, 0
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each tensor is aligned
    for name in names:
        tensor = tensors[name]
        if (
            tensor.dtype not in DTYPE_NAMES
            or tensor.layout != torch.strided
            or tensor.is_meta
            or name == "__metadata__"
        ):
            raise RunError(
                f"the tensor {name!r} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; expected a dense one of "
                f"{', '.join(DTYPE_NAMES.values())}, not named __metadata__"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, *(tensors[name] for name in names)]


def values_json(values: Mapping[str, object]) -> bytes:
    """Return JSON from which every value is restored exactly; NaN and infinities are written as Python writes them.

    Raises:
        RunError: If JSON would not restore a value.
    """
    _check_plain(dict(values), "values")
    return json.dumps(dict(values), indent=1).encode() + b"\n"


def _check_plain(value: object, path: str) -> None:
    """Raise a RunError unless JSON restores a value exactly; `path` is for the message."""
    if type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            _check_plain(item, f"{path}[{key!r}]")
    elif type(value) is list:
        for number, item in enumerate(value):
            _check_plain(item, f"{path}[{number}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise RunError(
            f"{path} is {value!r:.80}, a {type(value).__name__}, which JSON does not restore; expected None, a bool, "
            "an int, a float, a str, or lists and dicts of them"
        )


def manifest_json(step: int, files: Mapping[str, Mapping[str, object]]) -> bytes:
    """Return the manifest of a checkpoint with these files."""
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1, allow_nan=False).encode() + b"\n"


# -- reading -------------------------------------------------------------------------------------------------------


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint; I/O errors become DamageErrors."""
    try:
        if not path.is_file():
            raise DamageError(f"{path.name} is missing")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read: {error.strerror or error}") from None


def check_manifest(folder: Path, step: int) -> bytes:
    """Return the manifest of a checkpoint, or raise a DamageError if the files do not match it."""
    with open_file(folder / MANIFEST) as file:
        manifest = file.read(1 << 22)
    files: FileDigests = {}
    for name in _shard_files(manifest) if (folder / LAYOUT).exists() else (TENSORS, VALUES):
        with open_file(folder / name) as file:
            files[name] = checksum(iter(partial(file.read, 1 << 20), b""))
    if manifest != manifest_json(step, files):
        raise DamageError(_difference(manifest, step, files))
    return manifest


def _shard_files(manifest: bytes) -> list[str]:
    """Return the names of the files of a sharded checkpoint that its manifest lists."""
    with suppress(ValueError, RecursionError, LookupError, TypeError):
        names = list(json.loads(manifest)["files"])
        if all(type(name) is str and re.fullmatch(f"{SHARD}|{LAYOUT}|{VALUES}", name) for name in names):
            return names
    raise DamageError(f"{MANIFEST} is not as it was written")


def _difference(text: bytes, step: int, files: FileDigests) -> str:
    """Describe the difference between a manifest and the files, for an error message."""
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"it has the format {manifest['format']!r:.80}; this version reads {FORMAT}"
        if manifest["step"] != step:
            return f"{MANIFEST} is of step {manifest['step']!r:.80}"
        for name, digest in files.items():
            for field, actual in digest.items():
                if (expected := manifest["files"][name][field]) != actual:
                    return f"the {field} of {name} is {actual}; expected {expected!r:.80}"
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return f"{MANIFEST} is not as it was written"


def tensor_layouts(folder: Path) -> dict[str, TensorLayout]:
    """Return the layout of each tensor of a valid checkpoint, sharded or not."""
    if (folder / LAYOUT).exists():
        with open_file(folder / LAYOUT) as file:
            layout = json.load(file)
    else:
        with open_file(folder / TENSORS) as file:
            size = int.from_bytes(file.read(8), "little")
            layout = json.loads(file.read(size))
        for entry in layout.values():
            shape, begin = entry["shape"], 8 + size + entry["data_offsets"][0]
            entry["rows"] = [{"offsets": [0] * len(shape), "shape": shape, "file": TENSORS, "begin": begin}]
    return {
        name: TensorLayout(
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            chunks=tuple(
                TensorChunk(tuple(chunk["offsets"]), tuple(chunk["shape"]), chunk["file"], chunk["begin"])
                for chunk in entry["rows"]
            ),
        )
        for name, entry in layout.items()
    }
