"""Convert pickled weights to safetensors, in a child process with limited memory and no network.

A pickle is a program, so `load` reads none. `heedful convert --pickle` calls `convert_pickles` for a folder whose
pickles the user trusts.
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
from heedful.errors import HeedfulWarning, ModelError
from heedful.untrusted_files import check_inside, check_name, is_inside

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_COPIED = ("*.json", "*.txt", "*.model", "*/config.json")  # files to copy; the last are of sentence-transformers
_MAX_COPIED_BYTES = 1 << 29  # size limit of a file that is copied
_CHILD = Path(__file__).with_name("unpickle_child.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpickled:
    """The result of a conversion."""

    tensors: int  # how many tensors were converted
    network: str  # why the child process could not be cut off from the network, or "" if it was

    def __str__(self) -> str:
        network = f"with the network in reach ({self.network})" if self.network else "without network"
        return f"{self.tensors} tensors were read in a child process {network}"


def convert_pickles(folder: Path, out: Path) -> Unpickled:
    """Convert a folder with weights in pytorch_model.bin, or in shards of it, to a folder with safetensors.

    Pickled weights of Dense modules of sentence-transformers are converted too, even if other weights are safetensors.

    The child process reads only plain tables of tensors. Its memory (four times the weights), its time and the size of
    its files are limited. It has no network if the system allows that; otherwise there is a warning.

    Args:
        folder: Folder with pickled weights.
        out: New folder, with the weights, config.json and the tokenizer's files; it appears complete or not at all.

    Raises:
        ModelError: If the folder has safetensors or no pickles, or the child process rejects them.
    """
    # subfolders of Dense modules with pickled weights
    modules = [path.parent.name for path in sorted(folder.glob(f"*/{PICKLE}")) if not (path.parent / WEIGHTS).exists()]
    for module in modules:
        check_name(folder, f"{module}/{PICKLE}")
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        if not modules:
            raise ModelError(f"{folder} has safetensors already: nothing to convert")
        shards = {}
    else:
        shards = _find_pickles(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it needs config.json beside its weights")
    safe_names = _safe_names(shards) | {f"{module}/{PICKLE}": f"{module}/{WEIGHTS}" for module in modules}
    with atomic_folder(out, overwrite=False) as temporary:
        for module in modules:
            (temporary / module).mkdir()
        result = _read_in_child([(folder / file, temporary / name) for file, name in safe_names.items()])
        _copy(folder, temporary, _COPIED, _MAX_COPIED_BYTES)
        _copy(folder, temporary, ("*.safetensors", f"*/{WEIGHTS}"), None)
        if any(shards.values()):
            weight_map = {name: safe_names[file] for file, names in shards.items() for name in sorted(names)}
            (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2), "utf-8")
        find_tensors(temporary)
    if result.network:
        warnings.warn(f"{folder}: {result}", HeedfulWarning, stacklevel=2)
    return result


def _find_pickles(folder: Path) -> dict[str, set[str]]:
    """Return the pickled files of a folder with the tensor names that an index lists, or no names without an index."""
    if (folder / PICKLE_INDEX).exists():
        return read_index(folder, PICKLE_INDEX)
    if (folder / PICKLE).exists() or (folder / PICKLE).is_symlink():
        check_inside(folder, PICKLE)
        return {PICKLE: set()}
    raise ModelError(f"{folder} has neither {PICKLE} nor {PICKLE_INDEX}; no other kind of pickle is read")


def _safe_names(files: Iterable[str]) -> dict[str, str]:
    """Return the name of the safetensors file for each pickled file."""
    pickles = sorted(files)
    if pickles == [PICKLE]:
        return {PICKLE: WEIGHTS}
    count = len(pickles)
    return {file: f"model-{index:05}-of-{count:05}.safetensors" for index, file in enumerate(pickles, 1)}


def _read_in_child(files: list[tuple[Path, Path]]) -> Unpickled:
    """Convert files in a child process.

    Args:
        files: Pickled file and new safetensors file, for each file.

    Raises:
        ModelError: If the child process fails or takes too long.
    """
    max_bytes = sum(source.stat().st_size for source, _ in files)
    seconds = 60 + max_bytes // (10 << 20)
    job = {
        "files": [(os.path.abspath(source), os.path.abspath(target)) for source, target in files],
        "max_bytes": max_bytes,
        "seconds": seconds,
    }
    inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                [sys.executable, "-I", str(_CHILD), json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=files[0][1].parent,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **inherited},
                timeout=2 * seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ModelError(f"{files[0][0].parent}: reading took more than {2 * seconds} s and was stopped") from None
        output.seek(0)
        answer = _parse_answer(output.read(1 << 16))
    if code or "error" in answer or not all(target.is_file() and not target.is_symlink() for _, target in files):
        reason = answer.get("error") or f"the child process ended with {code}"
        name = answer.get("file") or files[0][0].name
        text = "".join(char if char.isprintable() else "?" for char in str(reason)[:500])
        raise ModelError(f"{files[0][0].parent}: {name} could not be converted: {text}")
    return Unpickled(tensors=int(answer.get("tensors", 0)), network=str(answer.get("network", "unknown")))


def _parse_answer(line: bytes) -> dict[str, Any]:
    """Return the JSON object that the child process printed, or {} if it printed anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _copy(folder: Path, target: Path, patterns: tuple[str, ...], max_bytes: int | None) -> None:
    """Copy files of a folder; raises ModelError for links out of it, and for files of more than `max_bytes`."""
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if path.name == PICKLE_INDEX or not path.is_file():
            continue
        if not is_inside(folder, path):
            raise ModelError(f"{path} is a link to a place outside the folder, and was not copied")
        if max_bytes is not None and path.stat().st_size > max_bytes:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; at most {max_bytes} are copied")
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
