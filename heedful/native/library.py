"""Building, finding and loading the kernels.

They are built for this very processor, so what is kept goes by the source, the flags and the processor. The compiler is
not asked, so that what is there is used where there is none: whatever built it, its results are compared when it is
loaded. The file ends in a digest of what is before it, as loading one that was cut short ends the process.

The library has no OpenMP of its own: it takes the threads of PyTorch, which are there already.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from heedful.durable import cache, put_folder, whole
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.native.check import wrong

OFF = "HEEDFUL_KERNELS"  # "off": they are not used
COMPILERS = ("g++", "c++")  # with GNU's OpenMP, whose threads PyTorch has too
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-w")
SECONDS = 300  # a compiler has that long
DIGEST = 32  # bytes that a library ends in

_P, _I, _N, _F, _D, _U = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_double,
    ctypes.c_uint64,
)
_CALL = [_I, _I, _I, _P, _P, _I, _P, _I, _P, _I, _F, _N, _I, _D, _U, _N]  # what both of attention's begin with
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "lanes": (_I, []),
    "half": (_N, []),
    "bytes": (_N, []),
    "compiler": (ctypes.c_char_p, []),
    "packed_words": (_I, [_I, _I, _I]),
    "pack": (None, [_P, _N, _I, _I, _N, _N, _P, _N]),
    "pack8": (None, [_P, _I, _I, _P, _N]),
    "round_rows": (None, [_P, _I, _I, _I, _N, _P, _P, _N]),
    "linear8": (None, [_P, _P, _I, _P, _I, _I, _P, _P, _P, _N, _N, _P, _N]),
    "linear": (None, [_P, _I, _I, _P, _I, _I, _P, _N, _N, _N, _P, _N]),
    "weight_gradient": (None, [_P, _I, _P, _I, _I, _I, _N, _P, _P, _P, _N]),
    "gelu": (None, [_P, _I, _N, _P, _N]),
    "gelu_gradient": (None, [_P, _P, _I, _N, _P, _N]),
    "add_norm": (None, [_I, _I, _F, _P, _P, _D, _U, _P, _N, _P, _N, _P, _N, _P, _P, _N]),
    "add_norm_gradient": (None, [_I, _I, _F, _P, _D, _U, _P, _P, _P, _P, _P, _N, _P, _P, _N]),
    "attention": (None, [*_CALL, _P, _I, _P, _N]),
    "attention_gradient": (None, [*_CALL, _P, _I, _P, _P, _I, _P, _P, _P, _I, _N]),
    "cross_entropy": (None, [_P, _I, _I, _P, _N, _P, _P, _N]),
    "block_space": (_I, [_P, _I]),
    "block": (None, [_P, _P, _I, _I, _P, _I, _P, _P, _N]),
    "adamw": (None, [_I, _P, _P, _F, _D, _D, _D, _N]),
    "adamw_rows": (None, [_P, _P, _P, _P, _I, _P, _I, _P, _I, _P, _F, _D, _D, _D, _N]),
}


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The library: its functions as attributes, by the names of SIGNATURES (see the sources for what they take)."""

    path: Path
    half: bool  # whether it multiplies bfloat16
    bytes: bool  # whether it multiplies bytes
    lanes: int  # widths are whole multiples of that
    compiler: str  # what built it, and its version
    pack: Any
    packed_words: Any
    linear: Any
    pack8: Any
    round_rows: Any
    linear8: Any
    weight_gradient: Any
    gelu: Any
    gelu_gradient: Any
    add_norm: Any
    add_norm_gradient: Any
    attention: Any
    attention_gradient: Any
    cross_entropy: Any
    block_space: Any
    block: Any
    adamw: Any
    adamw_rows: Any


def kernels() -> Kernels | None:
    """The library, built first where that has not been done on this machine; None: see `why`."""
    found = _found()
    return found if isinstance(found, Kernels) else None


def why() -> str:
    """Why there is none, in a few words; nothing where there is one."""
    found = _found()
    return found if isinstance(found, str) else ""


@functools.cache  # it is asked many times in each step
def _found() -> Kernels | str:
    said, folder = os.environ.get(OFF, ""), cache()
    if said == "off":
        return f"{OFF} is off"
    if said not in ("", "on"):
        raise HeedfulError(f'{OFF} is "{said}": say on or off')
    if folder is None:
        return "HEEDFUL_CACHE is empty, so that nothing can be kept"
    try:
        found = load(build(folder))
        off = wrong(found)
        return f"what was built computes wrongly here: {off}" if off else found
    except (OSError, HeedfulError, subprocess.SubprocessError) as error:
        return str(error).splitlines()[0][:200]


def unused() -> str:
    """A sentence where there are none and nobody asked for that."""
    reason = why()
    return f"kernels in C++ are not used: {reason}" if reason and os.environ.get(OFF) != "off" else ""


def sources() -> list[Path]:
    """The text they are made of."""
    return sorted(each for each in Path(__file__).parent.iterdir() if each.suffix in (".cpp", ".h"))


def build(folder: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library in that folder, compiled unless it is there and sound; several processes that want it wait for one.

    Raises HeedfulError where it has to be compiled and there is no compiler, or that fails; OSError where the folder
    cannot be written to.
    """
    path = folder / f"kernels-{_digest(flags)}.so"
    if _is_sound(path):
        return path
    damaged = f"{path} is damaged: " if path.is_file() else ""
    try:
        found = compiler()
    except HeedfulError as error:
        raise HeedfulError(f"{damaged}{error}") from None
    put_folder(folder)
    with _alone(folder / "kernels.lock"):
        if not _is_sound(path):
            warnings.warn(
                f"{damaged}building kernels for this processor with {shlex.join(found)}, once; {OFF}=off does "
                "without them",
                HeedfulWarning,
                stacklevel=2,
            )
            _compile(found, flags, path)
    return path


def compiler() -> list[str]:
    """The C++ compiler that is here: a command, and what it is given before all else."""
    if not sys.platform.startswith("linux"):
        raise HeedfulError(f"kernels are built on Linux, not on {sys.platform}")
    given = os.environ.get("CXX", "")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise HeedfulError(f"CXX is {given}: give a command, as a shell reads it ({error})") from None
    found = next(
        (each for each in ([words] if words else [[name] for name in COMPILERS]) if shutil.which(each[0])), None
    )
    if found is None:
        raise HeedfulError(f"there is no C++ compiler here ({given or ', '.join(COMPILERS)})")
    return found


def _digest(flags: tuple[str, ...]) -> str:
    """What a library depends on; of the processor its name and what it can do, not how many there are."""
    can = {name: each for name, each in torch.cpu.get_capabilities().items() if each is True or isinstance(each, str)}
    digest = hashlib.sha256(json.dumps([flags, sorted(can.items())]).encode())
    for each in sources():
        digest.update(each.name.encode() + b"\0" + each.read_bytes())
    return digest.hexdigest()[:24]


def _is_sound(path: Path) -> bool:
    """Whether it is there, as it was written."""
    held = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(held[:-DIGEST]).digest() == held[-DIGEST:]


def _compile(given: list[str], flags: tuple[str, ...], path: Path) -> None:
    """Each source by a process of its own, and all together into one file that appears whole."""
    with whole(path) as made, TemporaryDirectory(prefix="heedful-kernels-") as objects:
        files = [(each, Path(objects, f"{each.stem}.o")) for each in sources() if each.suffix == ".cpp"]
        _run_all(given, [[*flags, "-c", str(source), "-o", str(target)] for source, target in files])
        linking = [each for each in flags if each.startswith("-fsanitize")]
        _run_all(given, [["-shared", *linking, *(str(target) for _, target in files), "-o", str(made)]])
        held = made.read_bytes()
        made.write_bytes(held + hashlib.sha256(held).digest())


def _run_all(given: list[str], words: list[list[str]]) -> None:
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    running = [subprocess.Popen([*given, *each], **quiet) for each in words]
    ended = time.monotonic() + SECONDS
    try:
        for each in running:
            _, said = each.communicate(timeout=max(0.0, ended - time.monotonic()))
            if each.returncode:
                told = next((line for line in said.decode(errors="replace").splitlines() if "error" in line), "")
                told = told or f"status {each.returncode}"
                raise HeedfulError(f"{shlex.join(given)} could not build the kernels: {told}")
    finally:
        for each in running:
            each.kill()
            each.communicate()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    import fcntl  # not on every system, and there is no building there

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load(path: Path) -> Kernels:
    """The functions of a library that was built here."""
    library = ctypes.CDLL(str(path))
    functions = {}
    for name, (result, takes) in SIGNATURES.items():
        functions[name] = getattr(library, f"heedful_{name}")
        functions[name].restype, functions[name].argtypes = result, takes
    facts = {"half": bool(functions.pop("half")()), "bytes": bool(functions.pop("bytes")())}
    built_by = functions.pop("compiler")().decode(errors="replace")
    return Kernels(path=path, lanes=functions.pop("lanes")(), compiler=built_by, **facts, **functions)
