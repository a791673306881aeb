"""Compilation, caching and loading of the C++ kernels.

Kernels are compiled for this processor: the cache key is a digest of the sources, the flags and the processor. It does
not depend on the compiler, so a machine without a compiler can use a cached library. Whenever a library is loaded, its
results are compared with PyTorch's.

The file of a library ends in a digest of its contents, because loading a truncated library would end the process. The
digest does not prove who wrote the file; `heedful.cache` checks that no other user can change it.

The library uses the threads of PyTorch's OpenMP.
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

KERNELS_VARIABLE = "HEEDFUL_KERNELS"  # environment variable; "off" turns the kernels off
COMPILERS = ("g++", "c++")  # compilers with GNU's OpenMP, which PyTorch uses too; the first installed one is used
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-w")
COMPILE_SECONDS = 300  # time limit of the compiler, in seconds
DIGEST_BYTES = 32  # bytes of the digest at the end of a library


def kernels() -> Kernels | None:
    """Return the library, compiled first if it is not cached; None if it is unavailable (`unavailable_reason`)."""
    library = _library_or_reason()
    return library if isinstance(library, Kernels) else None


def unavailable_reason() -> str:
    """Return why `kernels` returns None, or an empty string."""
    reason = _library_or_reason()
    return reason if isinstance(reason, str) else ""


@functools.cache  # called many times in each training step
def _library_or_reason() -> Kernels | str:
    """Return the library, or the reason why it is unavailable; raises HeedfulError for a wrong HEEDFUL_KERNELS."""
    setting = os.environ.get(KERNELS_VARIABLE, "")
    if setting == "off":
        return f"{KERNELS_VARIABLE} is off"
    if setting not in ("", "on"):
        raise HeedfulError(f'{KERNELS_VARIABLE} is "{setting}": set it to on or off')
    try:
        folder = cache.folder()
        if folder is None:
            return "HEEDFUL_CACHE is empty, so that nothing can be cached"
        library = load_library(build(folder))
        problem = find_error(library)
        return f"the compiled library computes wrongly here: {problem}" if problem else library
    except (OSError, HeedfulError, subprocess.SubprocessError) as error:
        return str(error).splitlines()[0][:400]


def unused_note() -> str:
    """Return a note that the kernels are not used, with the reason; "" if they are used, or turned off."""
    reason = unavailable_reason()
    return f"the C++ kernels are not used: {reason}" if reason and os.environ.get(KERNELS_VARIABLE) != "off" else ""


def sources() -> list[Path]:
    """Return the C++ source files."""
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))


def build(folder: Path, flags: tuple[str, ...] = FLAGS, *, verify: bool = True) -> Path:
    """Return the path of the library in a folder; it is compiled first if it is missing or damaged.

    If several processes call `build`, one of them compiles, and the others wait.

    Args:
        folder: Folder of the cache.
        flags: Flags of the compiler.
        verify: Whether to load a new library and check its results before it is cached.

    Raises:
        CacheError: If others than this user and root may write to the folder.
        HeedfulError: If compiling fails, or there is no compiler.
        OSError: If the folder cannot be written to.
    """
    path = folder / f"kernels-{_digest(flags)}.so"
    if _is_intact(path):
        return path
    damaged = f"{path} is damaged: " if path.is_file() else ""
    try:
        command = compiler()
    except HeedfulError as error:
        raise HeedfulError(f"{damaged}{error}") from None
    with cache.lock(folder / "kernels.lock", "compiling the kernels"):
        if not _is_intact(path):
            warnings.warn(
                f"{damaged}compiling kernels for this processor with {shlex.join(command)}, once; "
                f"{KERNELS_VARIABLE}=off turns them off",
                HeedfulWarning,
                stacklevel=2,
            )
            _compile(command, flags, path, verify=verify)
    return path


def compiler() -> list[str]:
    """Return the command of the C++ compiler: the environment variable CXX, else the first installed one of COMPILERS.

    CXX may have arguments.

    Raises:
        HeedfulError: If there is no compiler, or the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise HeedfulError(f"kernels are compiled on Linux, not on {sys.platform}")
    setting = os.environ.get("CXX", "")
    try:
        words = shlex.split(setting)
    except ValueError as error:
        raise HeedfulError(f"CXX is {setting}: give a command, as a shell reads it ({error})") from None
    commands = [words] if words else [[name] for name in COMPILERS]
    command = next((command for command in commands if shutil.which(command[0])), None)
    if command is None:
        raise HeedfulError(f"no C++ compiler is installed ({setting or ', '.join(COMPILERS)})")
    return command


def _digest(flags: tuple[str, ...]) -> str:
    """Return the cache key of a library: a digest of the flags, the sources, and the processor and its instructions."""
    capabilities = torch.cpu.get_capabilities().items()
    processor = sorted((name, value) for name, value in capabilities if value is True or isinstance(value, str))
    digest = hashlib.sha256(json.dumps([flags, processor]).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _is_intact(path: Path) -> bool:
    """Return whether the file exists and is undamaged; raises CacheError if others may have written it."""
    try:
        return _ends_in_digest(cache.read_file(path))
    except FileNotFoundError:
        return False


def _ends_in_digest(contents: bytes) -> bool:
    """Return whether the last bytes of a file are the digest of the others."""
    return hashlib.sha256(contents[:-DIGEST_BYTES]).digest() == contents[-DIGEST_BYTES:]


def _compile(command: list[str], flags: tuple[str, ...], path: Path, *, verify: bool) -> None:
    """Compile each source in a process of its own and link them; the file at `path` appears complete or not at all."""
    remove_stale(path.parent, path.name)  # temporary folders of interrupted builds
    scratch = temporary_path(path)
    with scratch_folder(scratch) as start:
        objects = [(path, scratch / f"{path.stem}.o") for path in sources() if path.suffix == ".cpp"]
        _run_all(command, [[*flags, "-c", str(source), "-o", str(target)] for source, target in objects], start)
        link_flags = [flag for flag in flags if flag.startswith("-fsanitize")]
        library = scratch / path.name
        _run_all(
            command, [["-shared", *link_flags, *(str(target) for _, target in objects), "-o", str(library)]], start
        )
        if not library.is_file():
            raise HeedfulError(f"{shlex.join(command)} could not compile the kernels: it wrote no library")
        contents = library.read_bytes()
        library.write_bytes(contents + hashlib.sha256(contents).digest())
        library.chmod(0o700)
        if verify:
            _verify(library, command)
        library.rename(path)
    sync_folder(path.parent)


def _verify(library: Path, command: list[str]) -> None:
    """Raise HeedfulError if a new library cannot be loaded or its results are wrong; it is not cached then."""
    try:
        problem = find_error(load_library(library))
    except (OSError, HeedfulError) as error:
        raise HeedfulError(f"the library that {shlex.join(command)} compiled cannot be used: {error}") from None
    if problem:
        raise HeedfulError(f"the library that {shlex.join(command)} compiled computes wrongly here: {problem}")


def _run_all(command: list[str], argument_lists: list[list[str]], start: Start) -> None:
    """Run the compiler with each list of arguments, all in parallel; raises HeedfulError if one fails."""
    deadline = time.monotonic() + COMPILE_SECONDS
    for process in [start([*command, *arguments]) for arguments in argument_lists]:
        _, stderr = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        if process.returncode:
            lines = stderr.decode(errors="replace").splitlines()
            reason = next((line for line in lines if "error" in line), f"status {process.returncode}")
            raise HeedfulError(f"{shlex.join(command)} could not compile the kernels: {reason}")


def load_library(path: Path) -> Kernels:
    """Load a compiled library.

    The check and the loader use the same file descriptor, so that nobody can exchange the file in between.

    Raises:
        CacheError: If others than this user and root may have written the file.
        HeedfulError: If the file is damaged, or is another library.
    """
    handle = cache.open_checked_file(path)
    try:
        with open(handle, "rb", closefd=False) as file:
            if not _ends_in_digest(file.read()):
                raise HeedfulError(f"{path} is damaged: remove it")
        library = ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError as error:
        os.close(handle)
        raise HeedfulError(f"{path} cannot be loaded: {error}") from None
    except BaseException:
        os.close(handle)
        raise
    # The descriptor stays open: the loader identifies a library by its path, and would return this library again for
    # another file with the same descriptor number.
    functions = {}
    for name, (result, arguments) in SIGNATURES.items():
        try:
            functions[name] = getattr(library, f"heedful_{name}")
        except AttributeError:
            raise HeedfulError(f"{path} is another library: it has no heedful_{name}") from None
        functions[name].restype, functions[name].argtypes = result, arguments
    return Kernels(
        path=path,
        has_bfloat16=bool(functions.pop("half")()),
        has_int8=bool(functions.pop("bytes")()),
        has_tiles=bool(functions.pop("tiles")()),
        lanes=functions.pop("lanes")(),
        compiler=functions.pop("compiler")().decode(errors="replace"),
        **functions,
    )
