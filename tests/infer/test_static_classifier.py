"""StaticClassifier answers as Engine does, without torch, and leaves every other model to Engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from heedful.checkpoint import BundleConfig, ModelBundle, create, load, save
from heedful.checkpoint.new_head import with_head
from heedful.cli import main
from heedful.infer.engine import Engine
from heedful.infer.static_classifier import BIAS, TABLE, WEIGHTS, StaticClassifier
from heedful.model.classic_config import AttentionPooling, BagPooling, ClassicConfig, PoolingConfigs
from heedful.model.config import EmbeddingConfig
from heedful.runs.distil.settings import StaticStudent
from heedful.runs.distil.static import static_student
from tests.support.model_folders import make

TEXTS = ["the cat sat on the mat", "", "Ada wrote the first program!", "Ünknown 猫 " * 60, "the dog " * 300, "[MASK]"]
LABELS = ("bad", "fair", "good")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    """A static student, with the vectors of a tiny random teacher, and without a head."""
    teacher = load(make(tmp_path_factory.mktemp("teacher"), "bare"))
    return static_student(teacher, StaticStudent(width=8), TEXTS, lambda text: None)


def saved(student: ModelBundle, folder: Path, labels: tuple[str, ...] = LABELS, **more: Any) -> Path:
    """A classifier with random weights, so that answers differ."""
    model = with_head(student, "sequence_classification", labels=labels, **more)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * (4 if name.startswith("head") else 1))
    if more.get("problem_type") == "multi_label_classification":
        model.thresholds = {labels[0]: 0.05, labels[1]: 0.95}
    save(model, folder)
    return folder


def pooled(student: ModelBundle, reader: PoolingConfigs) -> ModelBundle:
    """A classic model with the words of the student and another pooling."""
    size = student.tokenizer.size
    config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=size, width=8), reader=reader)
    return create(BundleConfig(family="heedful-classic", model=config), student.tokenizer)


def assert_close(actual: Any, expected: Any) -> None:
    """Equal data, but for rounding."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_close(actual[name], value)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=2e-6)
    else:
        assert actual == expected


@pytest.mark.parametrize("problem", ["one of three", "any number", "one score for two labels"])
def test_answers_are_those_of_the_engine(problem: str, student: ModelBundle, tmp_path: Path) -> None:
    match problem:
        case "any number":
            folder = saved(student, tmp_path / "model", problem_type="multi_label_classification")
        case "one score for two labels":
            folder = saved(pooled(student, BagPooling(binary="sigmoid")), tmp_path / "model", ("no", "yes"))
        case _:
            folder = saved(student, tmp_path / "model")
    classifier, engine = StaticClassifier.open(folder), Engine(folder)
    assert classifier is not None and classifier.parameters == engine.parameters
    expected = engine(TEXTS)
    assert len({json.dumps(answer) for answer in expected}) > 3
    for actual, answer in zip(classifier(TEXTS), expected, strict=True):
        assert_close(actual, answer)


def test_the_model_of_a_run_is_read(student: ModelBundle, tmp_path: Path) -> None:
    saved(student, tmp_path / "run" / "model")
    classifier = StaticClassifier.open(tmp_path / "run")
    assert classifier is not None
    assert classifier.facts["read"] == str(tmp_path / "run")
    assert classifier.facts["head"] == "sequence_classification head"


def change_json(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_weights(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: change(tensors[name])}, folder / WEIGHTS)

    return apply


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another tokenizer": change_json("heedful.json", tokenizer="sha256:0"),
    "thresholds are no numbers": change_json("heedful.json", thresholds={"bad": "x"}),
    "another family": change_json("config.json", model_type="bert"),
    "another architecture": change_json("config.json", architectures=["HeedfulClassicForTokenClasses"]),
    "no model": change_json("config.json", model=3),
    "no labels": change_json("config.json", head={"kind": "sequence_classification", "bias": True}),
    "a limit": change_json("tokenizer_config.json", model_max_length=12),
    "not finite": change_weights(BIAS, lambda tensor: tensor + np.float32("nan")),
    "half precision": change_weights(TABLE, lambda tensor: tensor.astype(np.float16)),
    "other rows": change_weights(TABLE, lambda tensor: tensor[:-1]),
    "a damaged file": lambda folder: (folder / WEIGHTS).write_bytes(b"no tensors"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_expected_is_left_to_the_engine(damage: str, student: ModelBundle, tmp_path: Path) -> None:
    folder = saved(student, tmp_path / "model")
    assert StaticClassifier.open(folder) is not None
    DAMAGES[damage](folder)
    assert StaticClassifier.open(folder) is None


def test_other_models_are_left_to_the_engine(student: ModelBundle, tmp_path: Path) -> None:
    others = {
        "attention": pooled(student, AttentionPooling()),
        "sum": pooled(student, BagPooling(how="sum")),
    }
    for name, model in others.items():
        assert StaticClassifier.open(saved(model, tmp_path / name)) is None
    assert StaticClassifier.open(saved(student, tmp_path / "regress", ("stars",), problem_type="regression")) is None
    assert StaticClassifier.open(make(tmp_path / "bert", "single")) is None
    assert StaticClassifier.open(tmp_path / "nowhere") is None and StaticClassifier.open("org/name") is None
    scaled = replace(student.config.model.embedding, scale=2.0)
    config = replace(student.config.model, embedding=scaled)
    bundle = create(BundleConfig(family="heedful-classic", model=config), student.tokenizer)
    assert StaticClassifier.open(saved(bundle, tmp_path / "scaled")) is None


def test_the_command_answers_without_torch(
    student: ModelBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(student, tmp_path / "model")
    code = (
        "import sys; from heedful.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pydantic')))"
    )
    command = [sys.executable, "-c", code, "predict", str(folder), *TEXTS[2:4], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = Engine(folder)(TEXTS[2:4])
    for line, text, answer in zip(done.stdout.splitlines(), TEXTS[2:4], expected, strict=True):
        assert_close(json.loads(line), {"input": text} | answer)
    monkeypatch.setattr("heedful.infer.engine.Engine", None)  # would raise
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(folder), TEXTS[0]])
    shown = capsys.readouterr()
    assert "the cat sat on the mat" in shown.out and "predicted" in shown.out
    parameters = 111 * 8 + 3 * 8 + 3
    assert f"{folder}: heedful-classic, sequence_classification head, {parameters:,} parameters" in shown.err
    with pytest.raises(TypeError):
        main(["predict", str(folder), TEXTS[0], "--min-confidence", "0.5"])
