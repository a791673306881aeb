"""Safetensors files of a model folder, which is untrusted: headers are checked before tensors are read.

Files are not mapped into memory, so that the truncation of a file while it is read is an error and does not end the
process.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from heedful.checkpoint.folder_json import read_folder_json
from heedful.errors import ModelError, quoted
from heedful.untrusted_files import check_inside, check_name, parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 21  # bytes of a safetensors header, enough for some 16,000 tensors
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.joblib", "*.npy", "*.npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file, as the header describes it; its elements have not been read."""

    file: Path
    key: str  # name in the file
    shape: tuple[int, ...]
    dtype: str  # name of the dtype in safetensors: F32, BF16, ...
    start: int  # first byte in the file


def find_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a folder by name, from the header of model.safetensors or else of the files in its index.

    Raises:
        ModelError: If there are no weights, only pickles, or files that do not fit their index.
    """
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        check_inside(folder, WEIGHTS)
        return _read_header(folder / WEIGHTS)
    if (folder / INDEX).exists():
        shards = read_index(folder, INDEX)
        entries: dict[str, TensorEntry] = {}
        for file, listed in shards.items():
            shard = _read_header(folder / file)
            if shard.keys() != listed:
                raise ModelError(
                    f"{folder / file} holds {_shortened(shard.keys() - listed)} that {INDEX} does not place there, and "
                    f"lacks {_shortened(listed - shard.keys())}: the index and the shards are not of one save"
                )
            entries |= shard
        return entries
    raise _no_weights(folder)


def find_module_tensors(folder: Path, module: str) -> dict[str, TensorEntry]:
    """Return the tensors of a module of sentence-transformers, from the header of its weights.

    Args:
        folder: The model folder.
        module: Name of the module's subfolder.
    """
    return find_file_tensors(folder, str(Path(module, WEIGHTS)))


def find_file_tensors(folder: Path, name: str) -> dict[str, TensorEntry]:
    """Return the tensors in one file of the folder, from its header."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        raise _no_weights(path.parent, path.name)
    check_name(folder, name)
    return _read_header(path)


def _no_weights(folder: Path, expected: str = f"{WEIGHTS}, or {INDEX} and its shards") -> ModelError:
    """Return the error for a folder without weights, or only with pickled ones."""
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        return ModelError(
            f"{folder} has its weights in {', '.join(pickles[:3])}: such files can run code when they are read, so "
            f"Heedful reads only safetensors. Once, for a folder that you trust: heedful convert --pickle {folder} OUT "
            "reads its pytorch_model.bin in a child process with limited memory and writes a safe folder"
        )
    return ModelError(f"{folder} has no weights: expected {expected}")


def read_index(folder: Path, index: str) -> dict[str, set[str]]:
    """Return the names of the tensors in each shard that an index lists; all shards must be files in the folder."""
    weight_map = read_folder_json(folder / index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ModelError(f'{folder / index}: weight_map is missing or is not an object {{"tensor": "file"}}')
    shards: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        shards[file].add(name)
    for file in shards:
        check_inside(folder, file)
    return {file: shards[file] for file in sorted(shards)}


# dtype of safetensors -> bytes of an element
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2}
_BYTES |= {"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file; raises ModelError unless its tensors fill the file without overlaps."""
    with _open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise _broken(path, f"it has {size} bytes, and its header claims {length}")
        if length > MAX_HEADER_BYTES:
            raise _broken(path, f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
        header = parse_json(file.read(length), path)
    if not isinstance(header, dict):
        raise _broken(path, "its header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _broken(path, "its metadata is not text")
    base = 8 + length  # offsets of tensors are relative to the end of the header
    previous_stop = base
    entries = {}
    for start, stop, name, shape, dtype in sorted(_parse_entry(path, name, entry) for name, entry in header.items()):
        if base + start != previous_stop:
            problem = "an overlap" if base + start < previous_stop else "a hole"
            raise _broken(path, f"there is {problem} before {name}")
        entries[name] = TensorEntry(file=path, key=name, shape=shape, dtype=dtype, start=base + start)
        previous_stop = base + stop
    if previous_stop != size:
        raise _broken(path, f"its tensors end at byte {previous_stop}, but the file ends at {size}")
    return entries


def _parse_entry(path: Path, name: str, entry: object) -> tuple[int, int, str, tuple[int, ...], str]:
    """Return start, stop, name, shape and dtype of an entry of a header; raises ModelError if it is invalid."""
    if not name.isprintable() or len(name) > 1000:
        raise _broken(path, f"it names a tensor {quoted(name)}")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **rest} if not rest:
            if len(shape) <= 8 and all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
                if dtype not in _BYTES:
                    raise _broken(path, f"{quoted(name)} has the unknown type {quoted(dtype)}")
                if math.prod(shape) * _BYTES[dtype] != stop - start:
                    raise _broken(path, f"{quoted(name)} has a shape that does not fit its size")
                return start, stop, name, tuple(shape), dtype
    raise _broken(path, f"its header lacks the place, the shape or the type of {quoted(name)}")


def _broken(path: Path, reason: str) -> ModelError:
    """Return the error for a damaged file."""
    return ModelError(f"{path} is not a complete safetensors file: {reason}; fetch or save it again")


@contextmanager
def _open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a file; I/O errors become ModelErrors."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensors(entries: Mapping[str, TensorEntry], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read tensors and convert them to a dtype.

    Raises:
        ModelError: If a tensor is not of floating point, or has NaN or infinite elements.
    """
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS:
            raise ModelError(f"{entry.file}: {name} holds {entry.dtype}; expected one of {', '.join(_FLOATS)}")
        by_file[entry.file].append(name)
    tensors = {}
    for path, names in by_file.items():
        with _open_file(path) as file:
            for name in sorted(names, key=lambda name: entries[name].start):
                tensors[name] = _read(file, entries[name]).to(dtype)
                if not _is_finite(tensors[name]):
                    as_dtype = "" if _FLOATS[entries[name].dtype] == dtype else f" as {dtype}"
                    raise ModelError(
                        f"{path}: {name} holds NaN or infinite numbers{as_dtype}: the training that made it failed, or "
                        "the file is damaged"
                    )
    return tensors


def _read(file: BufferedReader, entry: TensorEntry) -> Tensor:
    """Read one tensor from its file, in the dtype that it has there."""
    try:
        flat = torch.empty(math.prod(entry.shape), dtype=_FLOATS[entry.dtype])
    except (RuntimeError, MemoryError):
        raise ModelError(f"{entry.file}: not enough memory for {entry.key}, {list(entry.shape)}") from None
    file.seek(entry.start)
    if flat.numel() and file.readinto(flat.view(torch.uint8).numpy().data) != flat.nbytes:
        raise _broken(entry.file, f"it ended inside {entry.key} while it was read")
    return flat.view(entry.shape)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite elements, without a second tensor of its size."""
    # if there is a NaN, minimum and maximum are NaN
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _shortened(names: Iterable[str], limit: int = 5) -> str:
    """List the first `limit` names, for error messages."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "") or "nothing"
