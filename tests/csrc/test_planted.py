"""Libraries that others put into the cache: none of their code runs, and a line says why there are no kernels."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heedful import cache
from heedful.cli.kernels import kernels as shown
from heedful.csrc import kernels, library, unavailable_reason
from heedful.errors import HeedfulError
from tests.support.other_user import OTHER_USER, change_owner, needs_root, run_as_user, shared_folder

CODE = '__attribute__((constructor)) static void run(void) { FILE *f = fopen(CANARY, "w"); if (f) fclose(f); }'
USER = 54321


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "there-is-no-such-thing")  # nothing is built in its place
    monkeypatch.delenv("HEEDFUL_KERNELS")
    monkeypatch.setattr(library, "_library_or_reason", library._library_or_reason.__wrapped__)


def compiled(folder: Path, canary: Path) -> bytes:
    """A library as Heedful keeps them; when it is loaded, it makes a file."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    source, target = folder / "planted.c", folder / "planted.so"
    source.write_text(f'#include <stdio.h>\n#define CANARY "{canary}"\n{CODE}\n')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    held = target.read_bytes()
    return held + hashlib.sha256(held).digest()


def plant(folder: Path, planted: bytes) -> Path:
    """Put it where this machine's library is looked for."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    path = folder / f"kernels-{library._digest(library.FLAGS)}.so"
    path.write_bytes(planted)
    path.chmod(0o700)
    return path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def path(tmp_path: Path, canary: Path) -> Path:
    """A planted library in a cache that is as it should be."""
    return plant(tmp_path / "cache", compiled(tmp_path, canary))


def test_a_library_that_only_this_user_can_write_is_loaded(path: Path, canary: Path) -> None:
    """A trusted library is loaded, unlike in the other tests; a missing function is reported as the reason."""
    assert run_as_user(None, unavailable_reason) == f"{path} is another library: it has no heedful_lanes"
    assert canary.exists()


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere.so"))
    path.symlink_to("elsewhere.so")


def moved(path: Path) -> None:
    """The folder is a link into one that everybody may write to."""
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
        (linked, ".so is a link"),
        (moved, "other can be written by everybody"),
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
    shown("show", as_json=True)
    assert message in json.loads(capsys.readouterr().out)["why_not"]
    with pytest.raises(HeedfulError, match="the kernels were not built: "):
        shown("build")
    assert not canary.exists()


@pytest.mark.parametrize(
    "environment",
    [{"XDG_CACHE_HOME": "planted", "HOME": ""}, {"HEEDFUL_CACHE": "planted/heedful"}, {"HOME": "planted"}],
    ids=str,
)
def test_no_library_is_loaded_from_the_working_directory(
    tmp_path: Path, canary: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = compiled(tmp_path, canary)
    for folder in ("planted/heedful", "planted/.cache/heedful", "~/.cache/heedful"):
        plant(tmp_path / folder, planted)
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert kernels() is None and (
        "no home folder" in unavailable_reason() or "give an absolute path" in unavailable_reason()
    )
    assert not canary.exists()


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder(USER) as path:
        yield path


@needs_root
def test_another_user_loads_its_own_and_those_of_root(shared: Path, tmp_path: Path, kernels_path: Path) -> None:
    shared.chmod(0o1777)
    caches = {"root": (0, 0), "mine": (USER, USER), "theirs": (OTHER_USER, OTHER_USER), "mixed": (USER, OTHER_USER)}
    for name, (of_folder, of_file) in caches.items():
        path = plant(shared / name, b"")
        path.write_bytes(kernels_path.read_bytes())
        path.chmod(0o755)
        path.parent.chmod(0o755)
        change_owner(path, of_file)
        change_owner(path.parent, of_folder)

    def reason(name: str) -> str:
        os.environ["HEEDFUL_CACHE"] = str(shared / name)
        return unavailable_reason()

    reasons = {name: run_as_user(USER, lambda name=name: reason(name)) for name in caches}
    assert (reasons["root"], reasons["mine"]) == ("", "")
    assert f"theirs belongs to user {OTHER_USER}, but this is user {USER}" in reasons["theirs"]
    assert f".so belongs to user {OTHER_USER}" in reasons["mixed"]


def test_what_is_loaded_is_what_was_checked(
    kernels_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is exchanged between the check and loading it, and is not taken."""
    path = plant(tmp_path / "cache", kernels_path.read_bytes())
    checked = cache.open_checked_file

    def exchanged(path: Path, flags: int = os.O_RDONLY) -> int:
        handle = checked(path, flags)
        path.rename(path.with_name("away"))
        path.write_bytes(b"junk")
        return handle

    monkeypatch.setattr(cache, "open_checked_file", exchanged)
    assert library.load_library(path).lanes > 0
    monkeypatch.setattr(cache, "open_checked_file", checked)
    with pytest.raises(HeedfulError, match="is damaged"):
        library.load_library(path)


def test_two_libraries_in_one_process_are_two(kernels_path: Path, tmp_path: Path, canary: Path) -> None:
    """The loader takes what was loaded by an equal name for the same library."""
    assert library.load_library(kernels_path).lanes > 0
    path = plant(tmp_path / "cache", compiled(tmp_path, canary))
    for _ in range(2):
        with pytest.raises(HeedfulError, match="has no heedful_lanes"):
            library.load_library(path)
    assert library.load_library(kernels_path).lanes > 0


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    path = plant(tmp_path / "cache", b"junk" + hashlib.sha256(b"junk").digest())
    assert kernels() is None and unavailable_reason().startswith(f"{path} cannot be loaded: ")
