"""Task specifications: they fit their tasks, are registered once, and import without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from heedful.errors import HeedfulError
from heedful.tasks.specs import QA, SPECS, register, spec_of_head, specs_named, task_names
from heedful.tasks.task import Task


def test_specifications_import_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = "import sys, heedful.tasks.specs; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SPECS)
def test_a_specification_and_its_task_agree(name: str) -> None:
    spec = SPECS[name]
    assert issubclass(spec.task, Task) and spec.task.example is spec.example
    assert spec.settings().kind == name and spec.task.answerers


def test_task_names() -> None:
    assert task_names() == ("classify", "rank", "regress", "tag", "qa", "multiple-choice", "embed", "seq2seq")
    assert [spec.name for spec in specs_named("classify")] == ["classify", "multiple"]
    assert spec_of_head(None) is None


def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(HeedfulError, match='a task named "qa" is registered already'):
        register(QA)
