"""Building, finding and loading the kernels.

They are built for this very processor, so what is kept goes by the source, the flags and the processor. The compiler is
not asked, so that what is there is used where there is none: whatever built it, its results are compared when it is
loaded. The file ends in a digest of what is before it, as loading one that was cut short ends the process. That says
nothing of who wrote it: `heedful.cache` does, and only what nobody else can change is loaded.

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
from pathlib import Path

import torch

from heedful import cache
from heedful.atomic_io import remove_stale, sync_folder, temporary_path
from heedful.csrc.abi import SIGNATURES, Kernels
from heedful.csrc.check import find_error
from heedful.csrc.scratch import Start, scratch_folder
from heedful.errors import HeedfulError, HeedfulWarning

KERNELS_VARIABLE = "HEEDFUL_KERNELS"  # "off": they are not used
COMPILERS = ("g++", "c++")  # with GNU's OpenMP, whose threads PyTorch has too
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-w")
SECONDS = 300  # a compiler has that long
DIGEST = 32  # bytes that a library ends in


def kernels() -> Kernels | None:
    """The library, built first where that has not been done on this machine; None: see `why`."""
    found = _found()
    return found if isinstance(found, Kernels) else None


def unavailable_reason() -> str:
    """Why there is none, in a few words; nothing where there is one."""
    found = _found()
    return found if isinstance(found, str) else ""


@functools.cache  # it is asked many times in each step
def _found() -> Kernels | str:
    said = os.environ.get(KERNELS_VARIABLE, "")
    if said == "off":
        return f"{KERNELS_VARIABLE} is off"
    if said not in ("", "on"):
        raise HeedfulError(f'{KERNELS_VARIABLE} is "{said}": say on or off')
    try:
        folder = cache.folder()
        if folder is None:
            return "HEEDFUL_CACHE is empty, so that nothing can be kept"
        found = load(build(folder))
        off = find_error(found)
        return f"what was built computes wrongly here: {off}" if off else found
    except (OSError, HeedfulError, subprocess.SubprocessError) as error:
        return str(error).splitlines()[0][:400]


def unused_note() -> str:
    """A sentence where there are none and nobody asked for that."""
    reason = unavailable_reason()
    return f"kernels in C++ are not used: {reason}" if reason and os.environ.get(KERNELS_VARIABLE) != "off" else ""


def sources() -> list[Path]:
    """The text they are made of."""
    return sorted(each for each in Path(__file__).parent.iterdir() if each.suffix in (".cpp", ".h"))


def build(folder: Path, flags: tuple[str, ...] = FLAGS, *, verify: bool = True) -> Path:
    """Return the library in a folder, compiled unless it is there and sound; of several processes, one compiles.

    `verify` loads what was compiled, and compares its results, before it is kept. Raises CacheError where others than
    this user and root may write to the folder, HeedfulError where compiling fails or there is no compiler, and OSError
    where the folder cannot be written to.
    """
    path = folder / f"kernels-{_digest(flags)}.so"
    if _is_sound(path):
        return path
    damaged = f"{path} is damaged: " if path.is_file() else ""
    try:
        found = compiler()
    except HeedfulError as error:
        raise HeedfulError(f"{damaged}{error}") from None
    with cache.lock(folder / "kernels.lock", "building the kernels"):
        if not _is_sound(path):
            warnings.warn(
                f"{damaged}building kernels for this processor with {shlex.join(found)}, once; {KERNELS_VARIABLE}=off does "
                "without them",
                HeedfulWarning,
                stacklevel=2,
            )
            _compile(found, flags, path, verify=verify)
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
    """Whether the file is there and as it was written; raises CacheError if others may have written it."""
    try:
        return _is_whole(cache.read_file(path))
    except FileNotFoundError:
        return False


def _is_whole(held: bytes) -> bool:
    return hashlib.sha256(held[:-DIGEST]).digest() == held[-DIGEST:]


def _compile(given: list[str], flags: tuple[str, ...], path: Path, *, verify: bool) -> None:
    """Compile each source by a process of its own, and link all into one file that appears whole."""
    remove_stale(path.parent, path.name)  # what was left when the machine stopped in a build
    scratch = temporary_path(path)
    with scratch_folder(scratch) as start:
        files = [(each, scratch / f"{each.stem}.o") for each in sources() if each.suffix == ".cpp"]
        _run_all(given, [[*flags, "-c", str(source), "-o", str(target)] for source, target in files], start)
        linking = [each for each in flags if each.startswith("-fsanitize")]
        made = scratch / path.name
        _run_all(given, [["-shared", *linking, *(str(target) for _, target in files), "-o", str(made)]], start)
        if not made.is_file():
            raise HeedfulError(f"{shlex.join(given)} could not build the kernels: it wrote no library")
        held = made.read_bytes()
        made.write_bytes(held + hashlib.sha256(held).digest())
        made.chmod(0o700)
        if verify:
            _verify(made, given)
        made.rename(path)
    sync_folder(path.parent)


def _verify(made: Path, given: list[str]) -> None:
    """Refuse a new library that cannot be loaded or computes wrongly, so that it is not kept."""
    try:
        off = find_error(load(made))
    except (OSError, HeedfulError) as error:
        raise HeedfulError(f"what {shlex.join(given)} built cannot be used: {error}") from None
    if off:
        raise HeedfulError(f"what {shlex.join(given)} built computes wrongly here: {off}")


def _run_all(given: list[str], words: list[list[str]], start: Start) -> None:
    """Run the compiler with each of these arguments, all at once, and raise HeedfulError at the first that fails."""
    ended = time.monotonic() + SECONDS
    for each in [start([*given, *more]) for more in words]:
        _, said = each.communicate(timeout=max(0.0, ended - time.monotonic()))
        if each.returncode:
            told = next((line for line in said.decode(errors="replace").splitlines() if "error" in line), "")
            told = told or f"status {each.returncode}"
            raise HeedfulError(f"{shlex.join(given)} could not build the kernels: {told}")


def load(path: Path) -> Kernels:
    """Load the functions of a library that was built here.

    It is loaded by the descriptor that was checked and read, so that it cannot be exchanged in between. Raises
    CacheError if others than this user and root may have written it, and HeedfulError if it is damaged or is no such
    library.
    """
    handle = cache.open_file(path)
    try:
        with open(handle, "rb", closefd=False) as file:
            if not _is_whole(file.read()):
                raise HeedfulError(f"{path} is damaged: remove it")
        library = ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError as error:
        os.close(handle)
        raise HeedfulError(f"{path} cannot be loaded: {error}") from None
    except BaseException:
        os.close(handle)
        raise
    # From here on the descriptor stays open. The loader knows a library by the name that it was loaded by, and would
    # give this one again for another file with the same number.
    functions = {}
    for name, (result, takes) in SIGNATURES.items():
        try:
            functions[name] = getattr(library, f"heedful_{name}")
        except AttributeError:
            raise HeedfulError(f"{path} is no library of these kernels, as it has no heedful_{name}") from None
        functions[name].restype, functions[name].argtypes = result, takes
    facts = {"half": bool(functions.pop("half")()), "bytes": bool(functions.pop("bytes")())}
    built_by = functions.pop("compiler")().decode(errors="replace")
    return Kernels(path=path, lanes=functions.pop("lanes")(), compiler=built_by, **facts, **functions)
