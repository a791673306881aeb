"""/metrics has the distance of the last texts from the training texts, from vectors that the answers compute anyway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful.checkpoint import load
from heedful.checkpoint.notes import VECTOR_SAMPLE, TrainingVectors
from heedful.infer.engine import Engine
from heedful.serve.run import RunningServer, background
from heedful.serve.vector_drift import VectorDrift
from tests.support.generated_data import classification_rows, finetune_tiny, write_splits
from tests.support.http_client import ask

SIZES = {"train": 200, "dev": 150}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier that was trained for a few steps."""
    folder = tmp_path_factory.mktemp("drift")
    finetune_tiny("classify", write_splits("single", folder / "data", SIZES), folder / "run", {"train.epochs": 4})
    return folder / "run"


def gauges(server: RunningServer, name: str) -> dict[str, float]:
    """Return the values of a metric by its labels, as /metrics writes them."""
    lines = ask(server.port, "/metrics").body.decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line.startswith(name + "{")]
    return {labels.removeprefix(name): float(value) for labels, value in samples}


def classify(server: RunningServer, texts: Sequence[str]) -> list[Any]:
    """Classify texts in requests of 64; returns the best label of each."""
    answers: list[Any] = []
    for first in range(0, len(texts), 64):
        inputs = [[text] for text in texts[first : first + 64]]
        answers += [labels[0] for labels in ask(server.port, "/predict", {"inputs": inputs}).json]
    return answers


def test_texts_unlike_those_of_training_are_far_away(run: Path) -> None:
    usual = [row["text"] for row in classification_rows(VECTOR_SAMPLE, seed=99)]
    others = ["zed in paris , zed in france , zed and ada , who is zed ?"] * 128 + ["mat mat mat mat"] * 128
    with background({"topics": str(run)}) as server:
        held_out = gauges(server, "heedful_held_out_vector_distance")
        assert set(held_out) == {'{model="topics",quantile="0.5"}', '{model="topics",quantile="0.99"}'}
        median, high = held_out.values()
        assert 0 < median < high < 0.5
        classify(server, usual[:-1])
        assert gauges(server, "heedful_vector_distance") == {}  # too few texts for a comparison
        classify(server, usual[-1:])
        (distance,) = gauges(server, "heedful_vector_distance").values()
        assert distance < high
        classify(server, others)
        (distance,) = gauges(server, "heedful_vector_distance").values()
        assert distance > 3 * high
        classify(server, usual)
        (distance,) = gauges(server, "heedful_vector_distance").values()
        assert distance < high


def test_no_text_is_read_twice_and_no_answer_changes(run: Path) -> None:
    texts = [row["text"] for row in classification_rows(20, seed=5)]
    with background({"topics": str(run)}) as server:
        engine = server.service.model_queues["topics"].engine
        assert engine is not None
        rows: list[int] = []
        hook = engine.loaded.model.register_forward_pre_hook(lambda model, inputs: rows.append(inputs[0].bounds[-1]))
        answers = classify(server, texts)
        hook.remove()
    plain = Engine(run)
    assert sum(rows) == sum(encoded.tokens for encoded in plain.tokenize(texts))
    expected = plain(texts)
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
    assert [answer["score"] for answer in answers] == pytest.approx([answer["probability"] for answer in expected])


def test_a_reloaded_model_is_compared_with_its_own_training_texts(run: Path) -> None:
    texts = [row["text"] for row in classification_rows(VECTOR_SAMPLE, seed=7)]
    with background({"topics": str(run)}) as server:
        classify(server, texts)
        assert gauges(server, "heedful_vector_distance")
        model = server.service.loader(str(run))
        server.service._use("topics", model)
        assert gauges(server, "heedful_vector_distance") == {}
        assert gauges(server, "heedful_held_out_vector_distance")
        model.loaded.training_vectors = None
        server.service._use("topics", model)
        assert gauges(server, "heedful_held_out_vector_distance") == {}


def test_models_without_a_summary_have_no_distance(served: RunningServer) -> None:
    classify_all = {"inputs": [["the cat"]] * VECTOR_SAMPLE, "model": "single"}
    assert ask(served.port, "/predict", classify_all).status == 200
    assert gauges(served, "heedful_vector_distance") == gauges(served, "heedful_held_out_vector_distance") == {}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("single", ["the cat sat", ("a", "b c"), ""]),
        ("regression", ["the cat sat", "she ran"]),
        ("tag", ["Ada lives in Paris .", ["Ada", "ran"], "the cat " * 60]),
        ("span", [{"question": "who ?", "context": "Ada wrote it ."}, {"question": "who ran ?", "context": "a cat"}]),
        ("choice", [{"prompt": "the cat", "choices": ["sat on the mat", "ran"]}]),
        ("embed", ["the cat", "she ran here and there"]),
    ],
)
def test_every_head_reports_a_vector_for_each_window(engines: dict[str, Engine], name: str, inputs: list[Any]) -> None:
    """The vectors of a text do not depend on the other texts of its batch, up to rounding."""
    engine = Engine(load(engines[name].loaded.source))
    batches: list[tuple[torch.Tensor, list[int]]] = []
    engine.on_rows = lambda rows, counts: batches.append((rows, list(counts)))
    engine(inputs)
    windows = sum(len(encoded.chunks) for encoded in engine.tokenize(inputs))
    assert sum(len(counts) for _, counts in batches) == windows
    assert all(rows.shape == (sum(counts), engine.loaded.config.model.width) for rows, counts in batches)
    together = VectorDrift(summary(engine))
    for rows, counts in batches:
        together.add(rows, counts)
    alone = VectorDrift(summary(engine))
    engine.on_rows = alone.add
    for engine_input in inputs:
        engine([engine_input])
    assert together._count == alone._count == windows
    assert together._vectors.sum(axis=0) == pytest.approx(alone._vectors.sum(axis=0), abs=1e-4)


def summary(engine: Engine) -> TrainingVectors:
    """Return a summary of vectors of the width of an engine's model."""
    return TrainingVectors(mean=(0.0,) * engine.loaded.config.model.width, radius=2.0, held_out={"0.5": 0.1})


def test_a_distance_is_that_of_the_last_finite_vectors() -> None:
    drift = VectorDrift(TrainingVectors(mean=(1.0, 0.0), radius=2.0, held_out={}))
    drift.add(torch.tensor([[9.0, 9.0]] * 100), [1] * 100)
    rows = torch.tensor([[1.0, 4.0], [1.0, 12.0]] * (VECTOR_SAMPLE + 3))
    drift.add(rows, [2] * (VECTOR_SAMPLE + 3))  # the mean of each window is (1, 8)
    assert drift.distance == 4.0
    drift.add(torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0]]), [1, 1])
    assert drift.distance == 4.0
    drift.add(torch.tensor([[1.0, 0.0]]), [1])
    assert drift.distance == pytest.approx(4.0 * (VECTOR_SAMPLE - 1) / VECTOR_SAMPLE)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("classify", "multiple"),
        ("regress", "regress"),
        ("tag", "tag"),
        ("qa", "qa"),
        ("multiple-choice", "choose 2"),
        ("embed", "embed"),
        ("rank", "rank"),
    ],
)
def test_a_run_of_every_task_has_a_summary_of_its_vectors(tmp_path: Path, task: str, kind: str) -> None:
    data = write_splits(kind, tmp_path / "data", {"train": 12, "dev": 110})
    finetune_tiny(task, data, tmp_path / "run", {"train.max_steps": 2, "eval_baseline": "false"})
    bundle = load(tmp_path / "run")
    vectors = bundle.training_vectors
    assert vectors is not None and len(vectors.mean) == bundle.config.model.width
    assert vectors.radius > 0 and list(vectors.held_out) == ["0.5", "0.99"]
    assert 0 < vectors.held_out["0.5"] < vectors.held_out["0.99"]


def test_too_few_held_out_texts_make_no_summary(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data", {"train": 12, "dev": 99})
    finetune_tiny("classify", data, tmp_path / "run", {"train.max_steps": 2})
    assert load(tmp_path / "run").training_vectors is None
    assert "training_vectors" not in json.loads((tmp_path / "run/model/heedful.json").read_text())


def test_the_distance_of_held_out_texts_is_that_of_samples_of_dev(run: Path, tmp_path: Path) -> None:
    """A server that gets random dev texts measures a median of about the one that is saved."""
    bundle = load(run)
    assert bundle.training_vectors is not None
    drift = VectorDrift(bundle.training_vectors)
    engine = Engine(bundle)
    engine.on_rows = drift.add
    texts = [row["text"] for row in classification_rows(SIZES["dev"], seed=1)]  # dev, as `write_splits` drew it
    draw = np.random.default_rng(3)
    distances = []
    for _ in range(40):
        engine([texts[index] for index in draw.integers(len(texts), size=VECTOR_SAMPLE)])
        distances.append(drift.distance)
    assert float(np.median(distances)) == pytest.approx(bundle.training_vectors.held_out["0.5"], rel=0.15)
