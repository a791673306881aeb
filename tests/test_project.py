"""The project as a whole: what importing costs, public names, the wheel, requirements, the Makefile and scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import heedful

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*command: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_heedful_imports_no_large_library() -> None:
    code = "import sys, heedful; print([m for m in ('torch', 'numpy', 'pydantic', 'typer') if m in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_settings_import_no_torch_and_are_quick() -> None:
    code = "import sys, heedful.settings; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_public_names() -> None:
    predictions = ["Classification", "Embedding", "Entity", "FillMask", "GeneratedText", "MultiLabelClassification"]
    predictions += ["MultipleChoice", "NextSentence", "Prediction", "Regression", "Similarity", "Span"]
    settings = ["DistilSettings", "FinetuneSettings", "PretrainSettings"]
    others = [
        "Engine",
        "Evaluated",
        "HeedfulError",
        "HeedfulWarning",
        "LabelErrors",
        "ModelBundle",
        "Packed",
        "RunResult",
        "SearchHit",
        "SearchIndex",
        "SelectedTexts",
        "Tokenizer",
    ]
    functions = ["distil", "evaluate", "find_label_errors", "finetune", "load", "look", "predict", "pretrain", "save"]
    functions += ["select_texts", "tune"]
    expected = sorted([*predictions, "TokenClassification", *settings, *others]) + functions
    assert [name for name in dir(heedful) if not name.startswith("_")] == expected
    for name in expected:
        assert getattr(heedful, name).__name__ in (name, f"heedful.{name}")  # `look` is a module that can be called
    assert heedful.__version__
    with pytest.raises(AttributeError, match="module 'heedful' has no attribute 'laod'"):
        heedful.laod  # noqa: B018


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['heedful', '--help']\n"
        "try: runpy.run_module('heedful', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    assert "Usage" in run(sys.executable, "-c", code)
    assert time.monotonic() - start < 5  # it takes 0.3 s on an idle machine


def test_a_settings_error_imports_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['heedful', 'tokenizer', 'x', '--output', 'y', '--vocabluary=3']\n"
        "try: runpy.run_module('heedful', run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code)\n"
        "assert not {'torch', 'tokenizers'} & set(sys.modules)"
    )
    assert run(sys.executable, "-c", code).strip() == "2"


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    (wheel,) = tmp_path.glob("heedful-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"heedful/__init__.py", "heedful/py.typed", "heedful/assets/intents/test.csv"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"heedful", f"heedful-{heedful.__version__}.dist-info"}
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name or "/test_" in name]


def test_files_named_in_the_source_archive_exist() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert [name for name in build["targets"]["sdist"]["include"] if not (ROOT / name[1:]).exists()] == []


@pytest.mark.parametrize("target", ["quickstart", "test", "test-slow", "check", "sbom", "clean"])
def test_makefile(target: str) -> None:
    assert run("make", "-n", target)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN_VULNERABLE = {  # the newest version with a known vulnerability
    "h11": "0.14.0",
    "onnx": "1.20.1",
    "orjson": "3.11.5",
    "pyarrow": "23.0.0",
    "ray": "2.54.0",
    "starlette": "0.49.0",
    "torch": "2.9.1",
}


def requirements(*extras: str) -> list[Requirement]:
    """The requirements in pyproject.toml, and those of extras."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *lines]]


def test_lower_bounds_are_above_known_vulnerabilities() -> None:
    every = requirements(*PROJECT["optional-dependencies"])
    for name, newest in KNOWN_VULNERABLE.items():
        matching = [requirement for requirement in every if requirement.name == name]
        assert matching and not any(requirement.specifier.contains(newest) for requirement in matching), name


def test_constraints_satisfy_every_requirement() -> None:
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    pinned = {canonicalize_name(line.name): next(iter(line.specifier)) for line in lines}
    assert all(specifier.operator == "==" for specifier in pinned.values())
    assert pinned["torch"].version == "2.13.0" and len(pinned) == len(lines)
    for requirement in requirements("serve", "export", "translate", "notebook", "test", "dev"):
        if requirement.name != "heedful":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)].version), requirement


def test_the_bill_of_materials_lists_what_heedful_runs_with() -> None:
    document = run(sys.executable, "scripts/sbom.py")
    bill = json.loads(document)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/heedful@{heedful.__version__}"
    components = {component["name"]: component for component in bill["components"]}
    for requirement in requirements():
        assert components[canonicalize_name(requirement.name)]["scope"] == "required"
    for requirement in requirements("serve", "export"):
        assert components[canonicalize_name(requirement.name)]["version"] == version(requirement.name)
    assert components["uvicorn"]["scope"] == "optional"
    assert {"pillow", "httpcore2"} & components.keys(), "those of dependencies too"
    assert not {"pytest", "mypy", "ruff", "heedful"} & components.keys()
    refs = {"heedful", *(component["bom-ref"] for component in bill["components"])}
    assert {dependency["ref"] for dependency in bill["dependencies"]} == refs
    assert all(set(dependency["dependsOn"]) <= refs for dependency in bill["dependencies"])
    assert document == run(sys.executable, "scripts/sbom.py")


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", "scripts/fmt", ".ci/run"])
def test_scripts(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK), "not executable"
    assert path.read_text().count("\n") <= 15
    run("sh", "-n", script)


def test_an_old_python_is_refused_clearly(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "pyproject.toml").touch()
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "test", "PYTHON=false"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert 'Heedful needs Python 3.11 or newer, and "false" is not' in done.stderr
    assert not (tmp_path / ".venv").exists()
