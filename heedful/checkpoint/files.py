"""The files of a model folder: JSON read strictly, tensors read only from where they should be, folders written whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heedful.errors import HeedfulError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.joblib", "*.npy", "*.npz")


# -- JSON -----------------------------------------------------------------------------------------------------


def read_json(path: Path, *, most: int = 1 << 20) -> dict[str, Any]:
    """The object in a JSON file of at most that many bytes; duplicate keys, NaN and endless nesting are refused."""
    try:
        if path.stat().st_size > most:
            raise HeedfulError(f"{path} has {path.stat().st_size} bytes; at most {most} are read")
        value = json.loads(
            path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique(path), parse_constant=_constant(path)
        )
    except FileNotFoundError:
        raise HeedfulError(f"{path} does not exist: a model folder holds config.json and {WEIGHTS}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeedfulError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise HeedfulError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise HeedfulError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _unique(path: Path) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise HeedfulError(f"{path} gives the key {twice!r} twice")
        return dict(found)

    return pairs


def _constant(path: Path) -> Any:
    def refuse(word: str) -> NoReturn:
        raise HeedfulError(f"{path} holds {word}, which is not a number in JSON")

    return refuse


# -- tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A tensor that has not been read yet."""

    file: Path
    key: str  # its name in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, ...


def find_tensors(folder: Path) -> dict[str, Slot]:
    """Name, shape and type of every tensor in the folder, from the headers alone."""
    if (folder / INDEX).exists():
        named = read_json(folder / INDEX, most=1 << 25).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise HeedfulError(f'{folder / INDEX}: weight_map is missing or is not an object {{"tensor": "file"}}')
        files = {file: _inside(folder, file) for file in sorted(set(named.values()))}
        slots: dict[str, Slot] = {}
        for file, path in files.items():
            found = _slots(path)
            listed = {name for name, where in named.items() if where == file}
            if found.keys() != listed:
                raise HeedfulError(
                    f"{path} holds {_some(found.keys() - listed)} that {INDEX} does not place there, and lacks "
                    f"{_some(listed - found.keys())}: the index and the shards are not of one save"
                )
            slots |= found
        return slots
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        return _slots(_inside(folder, WEIGHTS))
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise HeedfulError(
            f"{folder} has its weights in {', '.join(pickles[:3])}: such files can run code when they are read, so "
            f"Heedful reads only safetensors. Once, for a folder that you trust: heedful convert --pickle {folder} OUT "
            "reads it in a child process without network and with limited memory, and writes a safe folder"
        )
    raise HeedfulError(f"{folder} has no weights: expected {WEIGHTS}, or {INDEX} and its shards")


def _inside(folder: Path, file: str) -> Path:
    """The path of a file that must lie in the folder; the hub's cache keeps files in a folder beside snapshots."""
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    path = folder / file
    if Path(file).name != file or not path.resolve().is_relative_to(root):
        raise HeedfulError(f"{folder}: the shard {file!r} lies outside the folder; shards must lie beside config.json")
    if not path.is_file():
        raise HeedfulError(f"{folder}: the shard {file!r} is missing")
    return path


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, HeedfulError):
            raise
        raise HeedfulError(f"{path} is not a whole safetensors file: {error}; fetch or save it again") from None


def _slots(path: Path) -> dict[str, Slot]:
    with _opened(path) as file:
        # the library lets a later tensor of the same name win
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            json.loads(raw.read(length), object_pairs_hook=_unique(path))
        slots = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            slots[name] = Slot(file=path, key=name, shape=tuple(part.get_shape()), dtype=part.get_dtype())
        return slots


_FLOATS = {"F64", "F32", "F16", "BF16"}


def read_tensors(slots: Mapping[str, Slot], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors themselves, copied out of the file; numbers that are not finite are refused."""
    by_file: dict[Path, list[str]] = {}
    for name, slot in slots.items():
        if slot.dtype not in _FLOATS:
            raise HeedfulError(f"{slot.file}: {name} holds {slot.dtype}; expected one of {', '.join(sorted(_FLOATS))}")
        by_file.setdefault(slot.file, []).append(name)
    tensors = {}
    for path, names in by_file.items():
        with _opened(path) as file:
            for name in names:
                tensors[name] = file.get_tensor(slots[name].key).to(dtype, copy=True)
                if not bool(tensors[name].isfinite().all()):
                    raise HeedfulError(
                        f"{path}: {name} holds NaN or infinite numbers"
                        f"{' as ' + str(dtype) if slots[name].dtype != 'F32' or dtype != torch.float32 else ''}"
                    )
    return tensors


def _some(names: Any, most: int = 5) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "") or "nothing"


# -- writing --------------------------------------------------------------------------------------------------


@contextmanager
def whole_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes the target when everything in it has been written, or disappears."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise HeedfulError(f"{target} exists and is not empty: give another folder, or overwrite=True to replace it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise HeedfulError(f"{target} cannot be written: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        _sync(temporary)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
        _sync_one(target.parent)
    except (OSError, SafetensorError) as error:
        raise HeedfulError(f"{target} could not be written, and nothing of it was kept: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
