"""Libraries that other users put into the cache are not loaded: none of their code runs, and one line says why."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heedful import cache
from heedful.cli.kernels import kernels as kernels_command
from heedful.csrc import kernels, library, unavailable_reason
from heedful.errors import HeedfulError
from tests.support.other_user import OTHER_USER, change_owner, needs_root, run_as_user, shared_folder

# C code that runs when the library is loaded, and makes the file CANARY
CODE = '__attribute__((constructor)) static void run(void) { FILE *f = fopen(CANARY, "w"); if (f) fclose(f); }'
USER = 54321


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "there-is-no-such-thing")  # so that no library is built instead
    monkeypatch.delenv("HEEDFUL_KERNELS")
    monkeypatch.setattr(library, "_library_or_reason", library._library_or_reason.__wrapped__)


def compile_planted(folder: Path, canary: Path) -> bytes:
    """Return a library with a digest, as in the cache; when it is loaded, it makes the file `canary`."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    source, target = folder / "planted.c", folder / "planted.so"
    source.write_text(f'#include <stdio.h>\n#define CANARY "{canary}"\n{CODE}\n')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    contents = target.read_bytes()
    return contents + hashlib.sha256(contents).digest()


def plant(folder: Path, planted: bytes) -> Path:
    """Write a library to the path of this machine's library in a cache folder; returns the path."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    path = folder / f"kernels-{library._digest(library.FLAGS)}.so"
    path.write_bytes(planted)
    path.chmod(0o700)
    return path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Path of the file that the planted library makes."""
    return tmp_path / "it ran"


@pytest.fixture
def path(tmp_path: Path, canary: Path) -> Path:
    """Path of a planted library in a cache with the right permissions."""
    return plant(tmp_path / "cache", compile_planted(tmp_path, canary))


def test_a_library_that_only_this_user_can_write_is_loaded(path: Path, canary: Path) -> None:
    """The planted library is loaded where it is trusted: its code runs, and the reason is that it has no kernels."""
    assert run_as_user(None, unavailable_reason) == f"{path} is another library: it has no heedful_lanes"
    assert canary.exists()


def link_file(path: Path) -> None:
    """Replace the library by a link."""
    path.rename(path.with_name("elsewhere.so"))
    path.symlink_to("elsewhere.so")


def link_folder(path: Path) -> None:
    """Replace the cache folder by a link to a folder that everybody may write to."""
    folder = path.parent
    folder.rename(folder.with_name("other"))
    folder.symlink_to("other")
    folder.with_name("other").chmod(0o777)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.parent.chmod(0o1777), "cache can be written by everybody (mode 1777): run chmod go-w"),
        (lambda path: path.parent.chmod(0o775), "cache can be written by its group (mode 775)"),
        (lambda path: path.chmod(0o775), ".so can be written by its group"),
        (link_file, ".so is a link"),
        (link_folder, "other can be written by everybody"),
        pytest.param(
            lambda path: change_owner(path.parent), f"cache belongs to user {OTHER_USER}, but this is", marks=needs_root
        ),
        pytest.param(change_owner, f".so belongs to user {OTHER_USER}, but this is", marks=needs_root),
    ],
)
def test_a_library_that_others_can_write_is_not_loaded(
    path: Path, canary: Path, change: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(path)
    assert kernels() is None and message in unavailable_reason() and "\n" not in unavailable_reason()
    kernels_command("show", as_json=True)
    assert message in json.loads(capsys.readouterr().out)["why_not"]
    with pytest.raises(HeedfulError, match="the kernels were not built: "):
        kernels_command("build")
    assert not canary.exists()


@pytest.mark.parametrize(
    "environment",
    [{"XDG_CACHE_HOME": "planted", "HOME": ""}, {"HEEDFUL_CACHE": "planted/heedful"}, {"HOME": "planted"}],
    ids=str,
)
def test_no_library_is_loaded_from_the_working_directory(
    tmp_path: Path, canary: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = compile_planted(tmp_path, canary)
    for folder in ("planted/heedful", "planted/.cache/heedful", "~/.cache/heedful"):
        plant(tmp_path / folder, planted)
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert kernels() is None
    assert re.search("no home folder|give an absolute path", unavailable_reason())
    assert not canary.exists()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that the user USER can read."""
    with shared_folder(USER) as path:
        yield path


@needs_root
def test_a_user_loads_only_libraries_of_its_own_and_of_root(shared: Path, tmp_path: Path, kernels_path: Path) -> None:
    shared.chmod(0o1777)
    caches = {"root": (0, 0), "mine": (USER, USER), "theirs": (OTHER_USER, OTHER_USER), "mixed": (USER, OTHER_USER)}
    for name, (folder_owner, file_owner) in caches.items():
        path = plant(shared / name, b"")
        path.write_bytes(kernels_path.read_bytes())
        path.chmod(0o755)
        path.parent.chmod(0o755)
        change_owner(path, file_owner)
        change_owner(path.parent, folder_owner)

    def reason(name: str) -> str:
        os.environ["HEEDFUL_CACHE"] = str(shared / name)
        return unavailable_reason()

    reasons = {name: run_as_user(USER, lambda name=name: reason(name)) for name in caches}
    assert (reasons["root"], reasons["mine"]) == ("", "")
    assert f"theirs belongs to user {OTHER_USER}, but this is user {USER}" in reasons["theirs"]
    assert f".so belongs to user {OTHER_USER}" in reasons["mixed"]


def test_the_checked_file_is_loaded(kernels_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is exchanged between the check and the loader is not loaded."""
    path = plant(tmp_path / "cache", kernels_path.read_bytes())
    open_checked_file = cache.open_checked_file

    def exchange_after_check(path: Path, flags: int = os.O_RDONLY) -> int:
        handle = open_checked_file(path, flags)
        path.rename(path.with_name("away"))
        path.write_bytes(b"junk")
        return handle

    monkeypatch.setattr(cache, "open_checked_file", exchange_after_check)
    assert library.load_library(path).lanes > 0
    monkeypatch.setattr(cache, "open_checked_file", open_checked_file)
    with pytest.raises(HeedfulError, match="is damaged"):
        library.load_library(path)


def test_two_libraries_can_be_loaded_in_one_process(kernels_path: Path, tmp_path: Path, canary: Path) -> None:
    """The loader identifies libraries by their paths, so each must be loaded by a path of its own."""
    assert library.load_library(kernels_path).lanes > 0
    path = plant(tmp_path / "cache", compile_planted(tmp_path, canary))
    for _ in range(2):
        with pytest.raises(HeedfulError, match="has no heedful_lanes"):
            library.load_library(path)
    assert library.load_library(kernels_path).lanes > 0


def test_a_file_that_is_not_a_library_is_the_reason(tmp_path: Path) -> None:
    path = plant(tmp_path / "cache", b"junk" + hashlib.sha256(b"junk").digest())
    assert kernels() is None and unavailable_reason().startswith(f"{path} cannot be loaded: ")
