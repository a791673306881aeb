"""The folder for a GPU machine (scripts/gpu_bundle.py): its packages, unpacking them, and running its parts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """Import a script of the project."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packages_come_with_what_they_need_and_without_what_the_machine_has() -> None:
    bundle = script("gpu_bundle")
    needed = bundle.closure(["pydantic", "not-installed-anywhere"])
    assert {"pydantic", "pydantic-core", "annotated-types", "typing-extensions"} <= needed.keys()
    assert "not-installed-anywhere" not in needed
    on_machine = bundle.closure(["torch"])
    assert "sympy" in on_machine and "mpmath" in on_machine
    less = bundle.closure(["pydantic", "torch"], ["Pydantic_Core", *on_machine])
    assert "pydantic" in less and not {"pydantic-core", "torch", "sympy"} & less.keys()


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exists: name a new folder"):
        script("gpu_bundle").main([str(tmp_path)])


def test_packages_are_unpacked_once(tmp_path: Path) -> None:
    run_gpu = script("run_gpu")
    (tmp_path / "there/one").mkdir(parents=True)
    (tmp_path / "there/one/__init__.py").write_text("VALUE = 1")
    with tarfile.open(tmp_path / "site.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "there", "site")
    run_gpu.unpack_packages(tmp_path / "site.tar.xz", tmp_path / "site")
    assert (tmp_path / "site/one/__init__.py").read_text() == "VALUE = 1"
    (tmp_path / "site/one/__init__.py").unlink()
    run_gpu.unpack_packages(tmp_path / "site.tar.xz", tmp_path / "site")
    assert not (tmp_path / "site/one/__init__.py").exists()


def test_a_part_runs_in_the_folder_and_keeps_its_output(tmp_path: Path) -> None:
    (tmp_path / "run_gpu.py").write_bytes((ROOT / "scripts/run_gpu.py").read_bytes())
    (tmp_path / "code/benchmarks").mkdir(parents=True)
    (tmp_path / "code/benchmarks/gpu.py").write_text("import sys; print(*sys.argv[1:]); raise SystemExit(3)")
    command = [sys.executable, str(tmp_path / "run_gpu.py"), "--part", "serving", "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "serving: exit status 3" in done.stdout, done.stderr
    assert (tmp_path / "results/serving.txt").read_text().split() == [
        "--only",
        "serving",
        "--minutes",
        "7.75",
        "--rehearse",
    ]
