"""StaticClassifier: the answers of Engine, without torch; None for every other model."""

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
from tests.support.model_folders import make_model_dir

TEXTS = ["the cat sat on the mat", "", "Ada wrote the first program!", "Ünknown 猫 " * 60, "the dog " * 300, "[MASK]"]
LABELS = ("bad", "fair", "good")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    """A static student without a head, whose token vectors come from a tiny random teacher."""
    teacher = load(make_model_dir(tmp_path_factory.mktemp("teacher"), "bare"))
    return static_student(teacher, StaticStudent(width=8), TEXTS, lambda text: None)


def save_classifier(student: ModelBundle, folder: Path, labels: tuple[str, ...] = LABELS, **options: Any) -> Path:
    """Save the student as a classifier with random weights, so that answers differ; return the folder."""
    model = with_head(student, "sequence_classification", labels=labels, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (4 if name.startswith("head") else 1))
    if options.get("problem_type") == "multi_label_classification":
        model.thresholds = {labels[0]: 0.05, labels[1]: 0.95}
    save(model, folder)
    return folder


def classic_model(student: ModelBundle, reader: PoolingConfigs) -> ModelBundle:
    """Make a classic model with the student's vocabulary and this pooling."""
    size = student.tokenizer.size
    config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=size, width=8), reader=reader)
    return create(BundleConfig(family="heedful-classic", model=config), student.tokenizer)


def assert_close(actual: Any, expected: Any) -> None:
    """Assert that data is equal up to rounding errors."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_close(actual[name], value)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=2e-6)
    else:
        assert actual == expected


@pytest.mark.parametrize("problem", ["single label", "multi label", "binary with one logit"])
def test_answers_equal_those_of_the_engine(problem: str, student: ModelBundle, tmp_path: Path) -> None:
    match problem:
        case "multi label":
            folder = save_classifier(student, tmp_path / "model", problem_type="multi_label_classification")
        case "binary with one logit":
            folder = save_classifier(
                classic_model(student, BagPooling(binary="sigmoid")), tmp_path / "model", ("no", "yes")
            )
        case _:
            folder = save_classifier(student, tmp_path / "model")
    classifier, engine = StaticClassifier.open(folder), Engine(folder)
    assert classifier is not None and classifier.parameters == engine.parameters
    expected = engine(TEXTS)
    assert len({json.dumps(answer) for answer in expected}) > 3
    for actual, answer in zip(classifier(TEXTS), expected, strict=True):
        assert_close(actual, answer)


def test_the_model_of_a_run_folder_is_opened(student: ModelBundle, tmp_path: Path) -> None:
    save_classifier(student, tmp_path / "run" / "model")
    classifier = StaticClassifier.open(tmp_path / "run")
    assert classifier is not None
    assert classifier.facts["read"] == str(tmp_path / "run")
    assert classifier.facts["head"] == "sequence_classification head"


def change_json(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a function that sets values in a JSON file of a folder."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_weights(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return a function that changes a tensor in the weights of a folder."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: change(tensors[name])}, folder / WEIGHTS)

    return apply


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another tokenizer": change_json("heedful.json", tokenizer="sha256:0"),
    "thresholds that are no numbers": change_json("heedful.json", thresholds={"bad": "x"}),
    "another family": change_json("config.json", model_type="bert"),
    "another architecture": change_json("config.json", architectures=["HeedfulClassicForTokenClasses"]),
    "an invalid model": change_json("config.json", model=3),
    "no labels": change_json("config.json", head={"kind": "sequence_classification", "bias": True}),
    "a bias that is not finite": change_weights(BIAS, lambda tensor: tensor + np.float32("nan")),
    "half precision": change_weights(TABLE, lambda tensor: tensor.astype(np.float16)),
    "a missing row": change_weights(TABLE, lambda tensor: tensor[:-1]),
    "damaged weights": lambda folder: (folder / WEIGHTS).write_bytes(b"no tensors"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "invalid JSON": lambda folder: (folder / "config.json").write_text("{"),
    "invalid JSON of the thresholds": lambda folder: (folder / "heedful.json").write_text("{"),
    "a list instead of thresholds": lambda folder: (folder / "heedful.json").write_text("[]"),
}


def test_texts_up_to_the_maximum_length_are_read(student: ModelBundle, tmp_path: Path) -> None:
    folder = save_classifier(student, tmp_path / "model")
    change_json("tokenizer_config.json", model_max_length=12)(folder)
    classifier, engine = StaticClassifier.open(folder), Engine(folder)
    assert classifier is not None
    longest, too_long = " ".join(["cat"] * 10), " ".join(["cat"] * 11)  # with [CLS] and [SEP]
    assert classifier.reads([longest, "cat"]) and not classifier.reads([longest, too_long])
    assert not classifier.reads(None), "texts on stdin may be longer"
    (answer,), (expected,) = classifier([longest]), engine([longest])
    assert answer["windows"] == expected["windows"] == 1
    assert answer["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)
    assert engine([too_long])[0]["windows"] == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_changed_folders_are_left_to_the_engine(damage: str, student: ModelBundle, tmp_path: Path) -> None:
    folder = save_classifier(student, tmp_path / "model")
    assert StaticClassifier.open(folder) is not None
    DAMAGES[damage](folder)
    assert StaticClassifier.open(folder) is None


def test_other_models_are_left_to_the_engine(student: ModelBundle, tmp_path: Path) -> None:
    models = {
        "attention": classic_model(student, AttentionPooling()),
        "sum": classic_model(student, BagPooling(how="sum")),
    }
    for name, model in models.items():
        assert StaticClassifier.open(save_classifier(model, tmp_path / name)) is None
    assert (
        StaticClassifier.open(save_classifier(student, tmp_path / "regress", ("stars",), problem_type="regression"))
        is None
    )
    assert StaticClassifier.open(make_model_dir(tmp_path / "bert", "single")) is None
    assert StaticClassifier.open(tmp_path / "nowhere") is None and StaticClassifier.open("org/name") is None
    scaled = replace(student.config.model.embedding, scale=2.0)
    config = replace(student.config.model, embedding=scaled)
    bundle = create(BundleConfig(family="heedful-classic", model=config), student.tokenizer)
    assert StaticClassifier.open(save_classifier(bundle, tmp_path / "scaled")) is None


def test_the_command_answers_without_torch(
    student: ModelBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_classifier(student, tmp_path / "model")
    code = (
        "import sys; from heedful.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pydantic')))"
    )
    command = [sys.executable, "-c", code, "predict", str(folder), *TEXTS[2:4], "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = Engine(folder)(TEXTS[2:4])
    for line, text, answer in zip(process.stdout.splitlines(), TEXTS[2:4], expected, strict=True):
        assert_close(json.loads(line), {"input": text} | answer)
    monkeypatch.setattr("heedful.infer.engine.Engine", None)  # opening an engine would raise an error
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(folder), TEXTS[0]])
    output = capsys.readouterr()
    assert "the cat sat on the mat" in output.out and "predicted" in output.out
    parameters = 111 * 8 + 3 * 8 + 3
    assert f"{folder}: heedful-classic, sequence_classification head, {parameters:,} parameters" in output.err
    with pytest.raises(TypeError):
        main(["predict", str(folder), TEXTS[0], "--min-confidence", "0.5"])
