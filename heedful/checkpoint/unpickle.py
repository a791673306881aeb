"""The way out of pickled weights: a child process reads them, with little memory and no network, and writes a folder.

A pickle is a program. Heedful reads none; this is for the one time that a folder has nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.checkpoint.atomic_folder import atomic_folder
from heedful.checkpoint.safetensors_files import INDEX, WEIGHTS, find_tensors, read_index
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.untrusted_files import check_inside, is_inside

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_COPIED = ("*.json", "*.txt", "*.model", "*/config.json")  # the last: of the modules of a sentence embedding
_MOST_COPIED = 1 << 29  # bytes of one such file
_CHILD = Path(__file__).with_name("unpickle_child.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpickled:
    """What was done."""

    tensors: int
    network: str  # why the child could not be cut off from the network; empty: it was

    def __str__(self) -> str:
        where = f"with the network in reach ({self.network})" if self.network else "without network"
        return f"{self.tensors} tensors were read in a child process {where}"


def convert_pickles(folder: Path, out: Path) -> Unpickled:
    """Make a safe folder of one that has its weights in pytorch_model.bin, or in shards of that name.

    The child refuses everything that is no plain table of tensors; its memory (four times the weights), its time and
    what it may write are limited, and where the system allows, it has no network. If it has, a warning says so. `out`
    holds the weights as safetensors, config.json and the tokenizer's files, and appears whole or not at all.
    """
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        raise HeedfulError(f"{folder} has safetensors already: there is nothing to convert")
    if (folder / PICKLE_INDEX).exists():
        placed = read_index(folder, PICKLE_INDEX)
    elif (folder / PICKLE).exists() or (folder / PICKLE).is_symlink():
        check_inside(folder, PICKLE)
        placed = {PICKLE: set()}
    else:
        raise HeedfulError(f"{folder} has neither {PICKLE} nor {PICKLE_INDEX}; no other kind of pickle is read")
    if not (folder / "config.json").is_file():
        raise HeedfulError(f"{folder} is not a model folder: it needs config.json beside its weights")
    renamed = _renamed(placed)
    with atomic_folder(out, overwrite=False) as temporary:
        done = _read_in_child([(folder / file, temporary / name) for file, name in renamed.items()])
        _copy(folder, temporary)
        if any(placed.values()):
            where = {name: renamed[file] for file, names in placed.items() for name in sorted(names)}
            (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2), "utf-8")
        find_tensors(temporary)
    if done.network:
        warnings.warn(f"{folder}: {done}", HeedfulWarning, stacklevel=2)
    return done


def _renamed(files: Iterable[str]) -> dict[str, str]:
    """A safe name for each pickled file."""
    every = sorted(files)
    if every == [PICKLE]:
        return {PICKLE: WEIGHTS}
    count = len(every)
    return {file: f"model-{number:05}-of-{count:05}.safetensors" for number, file in enumerate(every, 1)}


def _read_in_child(files: list[tuple[Path, Path]]) -> Unpickled:
    most = sum(source.stat().st_size for source, _ in files)
    seconds = 60 + most // (10 << 20)
    job = {"files": [(os.path.abspath(a), os.path.abspath(b)) for a, b in files], "most": most, "seconds": seconds}
    keep = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    with tempfile.TemporaryFile() as said:
        try:
            code = subprocess.run(
                [sys.executable, "-I", str(_CHILD), json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                cwd=files[0][1].parent,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **keep},
                timeout=2 * seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise HeedfulError(
                f"{files[0][0].parent}: reading took more than {2 * seconds} s and was stopped"
            ) from None
        said.seek(0)
        answer = _answer(said.read(1 << 16))
    if code or "error" in answer or not all(target.is_file() and not target.is_symlink() for _, target in files):
        why = answer.get("error") or f"the child process ended with {code}"
        name = answer.get("file") or files[0][0].name
        text = "".join(sign if sign.isprintable() else "?" for sign in str(why)[:500])
        raise HeedfulError(f"{files[0][0].parent}: {name} could not be converted: {text}")
    return Unpickled(tensors=int(answer.get("tensors", 0)), network=str(answer.get("network", "unknown")))


def _answer(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _copy(folder: Path, target: Path) -> None:
    for path in sorted(path for pattern in _COPIED for path in folder.glob(pattern)):
        if path.name.endswith(".index.json") or not path.is_file():
            continue
        if not is_inside(folder, path):
            raise HeedfulError(f"{path} is a link to a place outside the folder, and was not copied")
        if path.stat().st_size > _MOST_COPIED:
            raise HeedfulError(f"{path} has {path.stat().st_size} bytes; at most {_MOST_COPIED} are copied")
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
