"""Checkpoints of a run: each is there whole or not at all, and the newest valid one is found again.

A checkpoint is a folder, `step-00000123`, of three files: `tensors.safetensors`, `values.json`, and `manifest.json`
with the size and the SHA-256 of the other two. It is valid if the manifest is, byte for byte, the one that they give.
The order of a commit makes a crash or a power cut harmless wherever it falls: all is written under a temporary name and
synced, the manifest last; then the folder gets its name; then `latest` names it; only then do older ones go.

The tensors are written here and not by the library, which does not sync: one at a time, without a second copy of them
all, and hashed as they are written. Nothing is mapped into memory. Where each rank has a part of the tensors, there are
as many files of them, and a `layout.json`, which the manifest names too (see parts.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.atomic_io import Chunk, as_bytes, atomic_path, checksum, make_folder, remove, remove_stale, write_synced
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.train.ranks import Ranks

FORMAT = 1
TENSORS, VALUES, MANIFEST, LATEST = "tensors.safetensors", "values.json", "manifest.json", "latest"
LAYOUT, PART = "layout.json", r"part-[0-9]{5}-of-[0-9]{5}\.safetensors"
LOCK = "run.lock"
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
_TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_TYPES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


class Checkpoint(NamedTuple):
    """A checkpoint that was read back."""

    step: int
    folder: Path
    tensors: dict[str, Tensor]  # as they were given, bit for bit, on the CPU; each has its own memory
    values: dict[str, Any]


class _Place(NamedTuple):
    """Where a checkpoint lies, valid or not; the later one is the greater one."""

    step: int
    turn: int  # 1; more where something else, or something damaged, was there for that step
    path: Path


class _DamageError(Exception):
    """What is wrong with a checkpoint."""


class CheckpointManager:
    """The checkpoints of one run, in a folder of their own; only the process that holds the run commits to it."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise HeedfulError(f"keep is {keep}; expected 1 or more: so many checkpoints stay")
        self.folder = folder.absolute()
        self.keep = keep
        self._damaged: set[Path] = set()  # as far as they were seen

    def commit(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        """Save; when this returns, a power cut does not undo it.

        A step that is there already stays if it is valid and the same; otherwise the new one goes beside it, and only
        then does the old one go. Where a valid later one is there, so that `load` would not give this one: an error.
        """
        assert step >= 0
        parts: dict[str, list[Chunk]] = {TENSORS: safetensors_chunks(tensors), VALUES: [_text(values)]}
        with self._told(step):
            turns = self._turns(step)
            if not turns or not _holds(turns[-1], parts):
                turns.append(self._next(step, turns))
                with atomic_path(turns[-1].path, folder=True) as part:
                    files = {name: write_synced(part / name, chunks) for name, chunks in parts.items()}
                    write_synced(part / MANIFEST, [_manifest(step, files)])
            self._name_latest(turns[-1])
        return turns[-1].path

    def commit_parts(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], ranks: Ranks) -> None:
        """The same where each rank has a part of the tensors; all ranks call it, and the first one commits."""
        from heedful.train.checkpoint_sharded import write_shards

        text, place = _text(values), None
        with self._told(step), ExitStack() as stack:
            part = Path()
            if ranks.first:
                place = self._next(step, self._turns(step))
                part = stack.enter_context(atomic_path(place.path, folder=True))
            part = Path(ranks.gather(str(part))[0])
            files = write_shards(part, tensors, ranks)
            if place is not None:
                files[VALUES] = write_synced(part / VALUES, [text])
                write_synced(part / MANIFEST, [_manifest(step, files)])
        with self._told(step):
            if place is not None:
                self._name_latest(place)
        ranks.wait()

    def load(self, like: Mapping[str, Tensor] | None = None) -> Checkpoint | None:
        """The newest valid checkpoint, with a warning for each newer one, which is damaged; None if there is none.

        Newest is by its step: `latest` is a hint for people, and no clock is asked. All damaged, or lost: an error. Of
        tensors that are parted over ranks in `like`, only this rank's part is read.
        """
        damage: list[str] = []
        self._damaged.clear()
        try:
            found = self._found()
            promised = (self.folder / LATEST).exists()
        except OSError as error:
            raise HeedfulError(f"{self.folder} cannot be read: {error.strerror or error}") from None
        for place in reversed(found):
            try:
                saved = _load(place, like or {})
            except _DamageError as error:
                self._damaged.add(place.path)
                damage.append(f"{place.path.name} is damaged: {error}")
                continue
            for each in damage:
                warnings.warn(f"{self.folder}: {each}; step {saved.step} is used instead", HeedfulWarning, stacklevel=2)
            return saved
        if damage or promised:
            what = "; ".join(damage[:5]) if damage else f"{LATEST} names one, but there is none"
            raise HeedfulError(
                f"{self.folder} has no valid checkpoint: {what}. Bring one back from a copy, or begin anew in another "
                "folder"
            )
        return None

    def need(self, bytes: int) -> None:
        """Refuse to begin without room for checkpoints of that many bytes: those that stay, and one in the making."""
        try:
            remove_stale(self.folder)
            copies = self.keep + 1 - min(len(self._found()), self.keep)
            free = shutil.disk_usage(next(at for at in (self.folder, *self.folder.parents) if at.exists())).free
        except OSError as error:
            raise HeedfulError(f"{self.folder} cannot be used: {error.strerror or error}") from None
        if free < bytes * copies:
            raise HeedfulError(
                f"{self.folder}: {free:,} bytes are free there, expected {bytes * copies:,}: {copies} checkpoints of "
                f"{bytes:,}, since {self.keep} stay while the next is written. Make room, or save elsewhere"
            )

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HeedfulError(
                f"{self.folder}: step {step} could not be saved: {error.strerror or error}; the checkpoints before it "
                "are as they were. Make room there, or let the run save elsewhere, and start it again"
            ) from None

    def _turns(self, step: int) -> list[_Place]:
        """What is there for that step; what would be newer is refused."""
        make_folder(self.folder)
        remove_stale(self.folder)
        found = self._found()
        self._refuse_older(found, step)
        return [place for place in found if place.step == step]

    def _next(self, step: int, turns: list[_Place]) -> _Place:
        turn = turns[-1].turn + 1 if turns else 1
        return _Place(step, turn, self.folder / _name(step, turn))

    def _name_latest(self, place: _Place) -> None:
        with atomic_path(self.folder / LATEST) as part:
            write_synced(part, [f"{place.path.name}\n".encode()])
        self._rotate(place)

    def _found(self) -> list[_Place]:
        """What has the name of a checkpoint, oldest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise  # there may be some where it leads
            return []
        matches = [re.fullmatch(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?", name) for name in names]
        places = [_Place(int(each[1]), int(each[2] or 1), self.folder / each[0]) for each in matches if each]
        return sorted(place for place in places if place.path.name == _name(place.step, place.turn))

    def _refuse_older(self, found: list[_Place], step: int) -> None:
        for place in found:
            if place.step > step and place.path not in self._damaged:
                try:
                    _check(place)
                except _DamageError:
                    self._damaged.add(place.path)
                    continue
                raise HeedfulError(
                    f"{self.folder}: step {step} cannot be saved, since {place.path.name} is there and valid: resume "
                    "from it, remove it, or give the run another folder"
                )

    def _rotate(self, newest: _Place) -> None:
        """Remove what is older than the `keep` newest; later ones, which are damaged, wait until they are overtaken."""
        until = [place for place in self._found() if place <= newest]
        sound = {place.step: place for place in until if place == newest or place.path not in self._damaged}
        stay = list(sound.values())[-self.keep :]
        for place in until:
            if place not in stay:
                remove(place.path)


def _name(step: int, turn: int) -> str:
    return f"step-{step:08d}" + (f"-{turn}" if turn > 1 else "")


# -- what is written -----------------------------------------------------------------------------------------------


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """A safetensors file: its header, and the tensors in the order of their bytes."""
    entries, end = {}, 0
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each is aligned
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.is_meta or name == "__metadata__":
            raise HeedfulError(
                f"the tensor {name!r}, {tensor.dtype}, {tensor.layout}, on {tensor.device}, cannot be saved; expected "
                f"a dense one of {', '.join(_CODES.values())}, not named __metadata__"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(tensors[name] for name in names)]


def _text(values: Mapping[str, Any]) -> bytes:
    """JSON from which every value comes back as it was; NaN and the infinities as Python writes them."""
    _refuse_unplain(dict(values), "values")
    return json.dumps(dict(values), indent=1).encode() + b"\n"


def _refuse_unplain(value: Any, at: str) -> None:
    if type(value) is dict and all(type(key) is str for key in value):
        for key, each in value.items():
            _refuse_unplain(each, f"{at}[{key!r}]")
    elif type(value) is list:
        for number, each in enumerate(value):
            _refuse_unplain(each, f"{at}[{number}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise HeedfulError(
            f"{at} is {value!r:.80}, a {type(value).__name__}, which JSON would not give back; expected None, a bool, "
            "an int, a float, a str, or a list of such, or a dict of such under texts"
        )


def _manifest(step: int, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1, allow_nan=False).encode() + b"\n"


# -- what is read --------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    try:
        if not path.is_file():
            raise _DamageError(f"{path.name} is missing")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise _DamageError(f"{path.name} cannot be read: {error.strerror or error}") from None


def _check(place: _Place) -> bytes:
    """The manifest, if it is the one that the files beside it give."""
    with _reading(place.path / MANIFEST) as file:
        told = file.read(1 << 22)
    files = {}
    for name in _named(told) if (place.path / LAYOUT).exists() else (TENSORS, VALUES):
        with _reading(place.path / name) as file:
            files[name] = checksum(iter(partial(file.read, 1 << 20), b""))
    if told != _manifest(place.step, files):
        raise _DamageError(_difference(told, place.step, files))
    return told


def _named(told: bytes) -> list[str]:
    """The files of a checkpoint in parts, of which there are as many as the manifest says."""
    with suppress(ValueError, RecursionError, LookupError, TypeError):
        names = list(json.loads(told)["files"])
        if all(type(name) is str and re.fullmatch(f"{PART}|{LAYOUT}|{VALUES}", name) for name in names):
            return names
    raise _DamageError(f"{MANIFEST} is not as it was written")


def _difference(told: bytes, step: int, files: Mapping[str, Mapping[str, Any]]) -> str:
    """In words, what a manifest says otherwise."""
    try:
        manifest = json.loads(told)
        if manifest["format"] != FORMAT:
            return f"it has the format {manifest['format']!r:.80}; this version reads {FORMAT}"
        if manifest["step"] != step:
            return f"{MANIFEST} is of step {manifest['step']!r:.80}"
        for name, about in files.items():
            for what, found in about.items():
                if (expected := manifest["files"][name][what]) != found:
                    return f"the {what} of {name}: {found} found, {expected!r:.80} expected"
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return f"{MANIFEST} is not as it was written"


def _holds(place: _Place, parts: Mapping[str, list[Chunk]]) -> bool:
    """Whether a checkpoint is valid and the same as would be written now."""
    with suppress(_DamageError):
        return _check(place) == _manifest(place.step, {name: checksum(chunks) for name, chunks in parts.items()})
    return False


def _load(place: _Place, like: Mapping[str, Tensor]) -> Checkpoint:
    _check(place)  # so that what follows is what was written
    with _reading(place.path / VALUES) as file:
        values = json.loads(file.read())
    if like or (place.path / LAYOUT).exists():
        from heedful.train.checkpoint_sharded import read_shards

        return Checkpoint(place.step, place.path, read_shards(place.path, _slots(place), like), values)
    tensors = {}
    with _reading(place.path / TENSORS) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            tensors[name] = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]])
            if file.readinto(as_bytes(tensors[name])) != tensors[name].nbytes:
                raise _DamageError(f"{TENSORS} ended inside {name} while it was read")
    return Checkpoint(place.step, place.path, tensors, values)


def _slots(place: _Place) -> dict[str, Any]:
    """Where each tensor lies, in one file or in parts."""
    from heedful.train.checkpoint_sharded import TensorChunk, TensorLayout

    if (place.path / LAYOUT).exists():
        with _reading(place.path / LAYOUT) as file:
            layout = json.load(file)
    else:
        with _reading(place.path / TENSORS) as file:
            size = int.from_bytes(file.read(8), "little")
            layout = json.loads(file.read(size))
        for entry in layout.values():
            shape, begin = entry["shape"], 8 + size + entry["data_offsets"][0]
            entry["rows"] = [{"offsets": [0] * len(shape), "shape": shape, "file": TENSORS, "begin": begin}]
    found = {}
    for name, entry in layout.items():
        pieces = entry["rows"]
        rows = (
            TensorChunk(tuple(each["offsets"]), tuple(each["shape"]), each["file"], each["begin"]) for each in pieces
        )
        found[name] = TensorLayout(_TYPES[entry["dtype"]], tuple(entry["shape"]), tuple(rows))
    return found


# -- one run in a folder -------------------------------------------------------------------------------------------

_held: set[int] = set()


def _let_go() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)  # a forked worker that outlives its run must not hold the lock


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the folder of a run, made where it is missing: a second run is refused; the lock dies with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise HeedfulError(f"{folder} cannot hold a run: {error.strerror}") from None
    _held.add(handle)
    try:
        _lock(handle, folder)
        yield
    finally:
        if handle in _held:
            _held.remove(handle)
            os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.pread(handle, 300, 0).decode(errors="replace").strip()
        raise HeedfulError(
            f"another run, {who if who.isprintable() else repr(who)}, holds {folder}: wait for it, stop it, or give "
            "this one a folder of its own"
        ) from None
    except OSError as error:
        what = f"{folder} cannot be locked: {error.strerror}; a second run in it would not be noticed"
        warnings.warn(what, HeedfulWarning, stacklevel=2)
        return
    with suppress(OSError):  # it is only for the message
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}, host {socket.gethostname()}\n".encode(), 0)
