"""Safetensors files of a model folder, which is untrusted: headers are checked before tensors are read.

Nothing is mapped into memory, so that a file that is truncated while it is read is an error and does not end the
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
MAX_HEADER_BYTES = 1 << 21  # of a safetensors header or an index: some 16,000 tensors
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.joblib", "*.npy", "*.npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of a tensor that has not been read yet."""

    file: Path
    key: str  # its name in the file
    shape: tuple[int, ...]
    dtype: str  # as in safetensors: F32, BF16, ...
    start: int  # first byte in the file


def find_tensors(folder: Path) -> dict[str, Slot]:
    """Return name, shape and dtype of every tensor in the folder, from the headers; a single file precedes an index.

    Raises:
        ModelError: If there are no weights, only pickles, or files that do not fit their index.
    """
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        check_inside(folder, WEIGHTS)
        return _slots(folder / WEIGHTS)
    if (folder / INDEX).exists():
        shards = read_index(folder, INDEX)
        slots: dict[str, Slot] = {}
        for file, listed in shards.items():
            shard = _slots(folder / file)
            if shard.keys() != listed:
                raise ModelError(
                    f"{folder / file} holds {_shortened(shard.keys() - listed)} that {INDEX} does not place there, and "
                    f"lacks {_shortened(listed - shard.keys())}: the index and the shards are not of one save"
                )
            slots |= shard
        return slots
    raise _no_weights(folder)


def find_module_tensors(folder: Path, module: str) -> dict[str, Slot]:
    """Return the tensors in the weights of a module of sentence-transformers, from their header.

    Args:
        module: Its folder's name in the model's.
    """
    return find_file_tensors(folder, str(Path(module, WEIGHTS)))


def find_file_tensors(folder: Path, name: str) -> dict[str, Slot]:
    """Return the tensors in one file of the folder, from its header."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        raise _no_weights(path.parent, path.name)
    check_name(folder, name)
    return _slots(path)


def _no_weights(folder: Path, expected: str = f"{WEIGHTS}, or {INDEX} and its shards") -> ModelError:
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        return ModelError(
            f"{folder} has its weights in {', '.join(pickles[:3])}: such files can run code when they are read, so "
            f"Heedful reads only safetensors. Once, for a folder that you trust: heedful convert --pickle {folder} OUT "
            "reads its pytorch_model.bin in a child process with limited memory and writes a safe folder"
        )
    return ModelError(f"{folder} has no weights: expected {expected}")


def read_index(folder: Path, index: str) -> dict[str, set[str]]:
    """Return the shards that an index names, all of them in the folder, and the tensors that each should hold."""
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


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2}
_BYTES |= {"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


def _slots(path: Path) -> dict[str, Slot]:
    """Read the header of a safetensors file: its tensors must fill the rest of the file, without holes and overlaps."""
    with _reading(path) as file:
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
    end = base = 8 + length
    slots = {}
    for start, stop, name, shape, dtype in sorted(_entry(path, name, entry) for name, entry in header.items()):
        if base + start != end:
            raise _broken(path, f"there is {'an overlap' if base + start < end else 'a hole'} before {name}")
        slots[name] = Slot(file=path, key=name, shape=shape, dtype=dtype, start=base + start)
        end = base + stop
    if end != size:
        raise _broken(path, f"its tensors end at byte {end}, but the file ends at {size}")
    return slots


def _entry(path: Path, name: str, entry: object) -> tuple[int, int, str, tuple[int, ...], str]:
    if not name.isprintable() or len(name) > 1000:
        raise _broken(path, f"it names a tensor {quoted(name)}")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **rest} if not rest:
            if len(shape) <= 8 and all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                if dtype not in _BYTES:
                    raise _broken(path, f"{quoted(name)} has the unknown type {quoted(dtype)}")
                if math.prod(shape) * _BYTES[dtype] != stop - start:
                    raise _broken(path, f"{quoted(name)} has a shape that does not fit its size")
                return start, stop, name, tuple(shape), dtype
    raise _broken(path, f"its header lacks the place, the shape or the type of {quoted(name)}")


def _broken(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is not a complete safetensors file: {reason}; fetch or save it again")


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensors(slots: Mapping[str, Slot], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read tensors and convert them to a dtype; raises ModelError for NaN and infinite numbers."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, slot in slots.items():
        if slot.dtype not in _FLOATS:
            raise ModelError(f"{slot.file}: {name} holds {slot.dtype}; expected one of {', '.join(_FLOATS)}")
        by_file[slot.file].append(name)
    tensors = {}
    for path, names in by_file.items():
        with _reading(path) as file:
            for name in sorted(names, key=lambda name: slots[name].start):
                tensors[name] = _read(file, slots[name]).to(dtype)
                if not _finite(tensors[name]):
                    same = slots[name].dtype in _FLOATS and _FLOATS[slots[name].dtype] == dtype
                    raise ModelError(
                        f"{path}: {name} holds NaN or infinite numbers{'' if same else f' as {dtype}'}: "
                        "the training that made it failed, or the file is damaged"
                    )
    return tensors


def _read(file: BufferedReader, slot: Slot) -> Tensor:
    try:
        flat = torch.empty(math.prod(slot.shape), dtype=_FLOATS[slot.dtype])
    except (RuntimeError, MemoryError):
        raise ModelError(f"{slot.file}: not enough memory for {slot.key}, {list(slot.shape)}") from None
    file.seek(slot.start)
    if flat.numel() and file.readinto(flat.view(torch.uint8).numpy().data) != flat.nbytes:
        raise _broken(slot.file, f"it ended inside {slot.key} while it was read")
    return flat.view(slot.shape)


def _finite(tensor: Tensor) -> bool:
    # minimum and maximum suffice, without a second tensor: with a NaN, both are NaN
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _shortened(names: Iterable[str], most: int = 5) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "") or "nothing"
