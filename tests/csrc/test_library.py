"""The kernels are built once, by one process, and cached; if they cannot be used, `unavailable_reason` says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heedful.csrc import abi, check, kernels, library, unavailable_reason
from heedful.errors import HeedfulError, HeedfulWarning


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.delenv("HEEDFUL_KERNELS")
    monkeypatch.setattr(library, "_library_or_reason", library._library_or_reason.__wrapped__)


def make_compiler(folder: Path, script: str) -> str:
    """Write a shell script that is used as the compiler; returns its path."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_kernels_can_be_turned_off_and_unknown_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_KERNELS", "off")
    assert kernels() is None and unavailable_reason() == "HEEDFUL_KERNELS is off"
    monkeypatch.setenv("HEEDFUL_KERNELS", "fast")
    with pytest.raises(HeedfulError, match='HEEDFUL_KERNELS is "fast": set it to on or off'):
        kernels()


def test_nothing_is_built_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", "")
    assert kernels() is None and "HEEDFUL_CACHE is empty" in unavailable_reason()


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "there-is-no-such-thing")
    assert kernels() is None and unavailable_reason() == "no C++ compiler is installed (there-is-no-such-thing)"


@pytest.mark.filterwarnings("ignore::heedful.errors.HeedfulWarning")
def test_a_failing_compiler_is_the_reason_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", make_compiler(tmp_path, "echo 'x.cpp:1: error: no such luck' >&2; exit 1"))
    assert kernels() is None and "no such luck" in unavailable_reason()
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob(".kernels*"))


@pytest.mark.slow
def test_several_processes_build_it_once(tmp_path: Path, kernels_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler_path = make_compiler(
        tmp_path, f'echo x >> {calls}; sleep 0.2; for last; do :; done; cp {kernels_path} "$last"'
    )
    program = "from pathlib import Path; from heedful.csrc.library import build; build(Path.cwd())"
    environment = {**os.environ, "CXX": compiler_path, "PYTHONWARNINGS": "ignore"}
    running = [subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=tmp_path) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    files = [source for source in library.sources() if source.suffix == ".cpp"]
    assert len(calls.read_text().split()) == len(files) + 1  # one call for each source, and one that links
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_a_cached_library_is_used_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from heedful.cli.kernels import kernels as kernels_command

    (tmp_path / kernels_path.name).write_bytes(kernels_path.read_bytes())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HeedfulError, match="no C"):
        library.compiler()
    assert kernels() is not None and unavailable_reason() == ""
    kernels_command("show", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["used"] and report["compiler"].split()[-1][0].isdigit()  # name and version of the compiler


def test_the_cache_key_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = torch.cpu.get_capabilities()
    assert {"cpu_name", "avx2", "num_logical_cores"} <= capabilities.keys() or capabilities["architecture"] != "x86_64"

    def digest(**changes: object) -> str:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**capabilities, **changes})
        return library._digest(library.FLAGS)

    processors = ({}, {"avx2": not capabilities.get("avx2")}, {"cpu_name": "another"}, {"architecture": "z"})
    assert len({digest(**changes) for changes in processors}) == 4
    irrelevant = {"num_logical_cores": 99, "l2_cache_size": 1, "an_instruction_set_of_a_later_pytorch": False}
    assert digest(**irrelevant) == digest()


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[: len(x) // 4], lambda x: bytes(len(x))])
def test_a_damaged_library_is_built_again_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    (tmp_path / kernels_path.name).write_bytes(damage(kernels_path.read_bytes()))
    monkeypatch.setenv("CXX", "there-is-no-such-thing")
    reason = f"{kernels_path.name} is damaged: no C++ compiler is installed (there-is-no-such-thing)"
    assert kernels() is None and unavailable_reason().endswith(reason)
    compiler_path = make_compiler(
        tmp_path, f'echo x >> {tmp_path}/calls; for last; do :; done; cp {kernels_path} "$last"'
    )
    monkeypatch.setenv("CXX", compiler_path)
    with pytest.warns(HeedfulWarning, match=f"{kernels_path.name} is damaged: compiling kernels for this processor"):
        loaded = kernels()
    assert loaded is not None and check.find_error(loaded) == ""
    calls = (tmp_path / "calls").read_text()
    assert kernels() is not None and (tmp_path / "calls").read_text() == calls


@pytest.mark.filterwarnings("ignore::heedful.errors.HeedfulWarning")
def test_the_compiler_may_be_a_command_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler_path = make_compiler(tmp_path, f'echo "$1" >> {tmp_path}/calls; echo "error: no such luck" >&2; exit 1')
    monkeypatch.setenv("CXX", f"env '{compiler_path}' -pipe")
    assert kernels() is None
    assert unavailable_reason() == f"env {compiler_path} -pipe could not compile the kernels: error: no such luck"
    assert set((tmp_path / "calls").read_text().split()) == {"-pipe"}
    monkeypatch.setenv("CXX", "g++ '-O2")
    assert kernels() is None and unavailable_reason().startswith("CXX is g++ '-O2: give a command, as a shell reads it")


def test_the_cache_key_depends_on_sources_and_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels_path: Path
) -> None:
    digests = {library._digest(library.FLAGS)}
    header = tmp_path / "more.h"
    header.write_text("// more\n")
    sources = library.sources()
    monkeypatch.setattr(library, "sources", lambda: [*sources, header])
    digests |= {library._digest(flags) for flags in (library.FLAGS, (*library.FLAGS, "-O2"))}
    assert len(digests) == 3


def test_a_library_with_wrong_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels_path: Path
) -> None:
    assert check.find_error(library.load_library(kernels_path)) == ""
    (tmp_path / kernels_path.name).write_bytes(kernels_path.read_bytes())
    assert kernels() is not None and unavailable_reason() == ""
    monkeypatch.setattr(check, "_gelu", lambda ops, x: x)
    assert kernels() is None and "gelu in float32 is off by" in unavailable_reason()


@pytest.mark.parametrize("name", [name for name, (result, _) in abi.SIGNATURES.items() if result is None])
def test_a_function_without_effect_is_detected(name: str, kernels_path: Path) -> None:
    loaded = library.load_library(kernels_path)
    if name in ("pack8", "linear8") and not loaded.has_int8:
        pytest.skip("this processor does not multiply int8")
    assert "is off by" in check.find_error(replace(loaded, **{name: lambda *arguments: None}))


def test_a_build_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", make_compiler(tmp_path, 'for last; do :; done; echo junk > "$last"'))
    with pytest.warns(HeedfulWarning, match="compiling kernels for this processor"):
        kernels()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # with sanitizers the compiler takes minutes
@pytest.mark.parametrize(
    "flags",
    [
        ("-O0",),
        ("-O2", "-mno-avx512f"),
        ("-O1", "-fsanitize=address,undefined"),
        ("-DFAST_BFLOAT16",),  # attention as on an AMD processor
    ],
    ids=str,
)
def test_other_flags_compute_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The tests of the kernels pass with a library that was compiled with other flags."""
    sanitized = "sanitize" in flags[-1]  # such a library can be loaded only if the process preloads the sanitizers
    with pytest.warns(HeedfulWarning):
        path = library.build(tmp_path, (*library.FLAGS, *flags, *(("-g1",) if sanitized else ())), verify=not sanitized)
    environment = {**os.environ, "HEEDFUL_TEST_KERNELS": str(path)}
    if sanitized:
        asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
        ubsan = asan.strip().replace("libasan", "libubsan")
        environment |= {"LD_PRELOAD": f"{asan.strip()} {ubsan}", "ASAN_OPTIONS": "detect_leaks=0"}
        environment["UBSAN_OPTIONS"] = "halt_on_error=1"
    folder = Path(__file__).parents[1]
    lazy_rows = folder / "train" / "test_lazy_embedding.py::test_the_kernel_writes_only_the_rows_that_it_updates"
    tests = [str(folder / "nn" / "test_cpu_ops.py"), str(lazy_rows)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
