"""The score of an embedding model before training, which is the baseline of its run."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.data import read
from heedful.data.labelled.statistics import compute_stats
from heedful.runs.card.baseline import baseline_lines
from heedful.runs.finetune.build import build_task
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.scoring import measure_split
from heedful.tasks.specs.embed import EmbedSettings
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.model_folders import make_model_dir

LATENCY = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: LATENCY)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder without a head, as transformers saves it."""
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


class Interrupt(Reporter):
    """Interrupts training after a step, and records messages."""

    def __init__(self, step_number: int) -> None:
        self.step_number = step_number
        self.messages: list[str] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.step_number:
            os.kill(os.getpid(), signal.SIGTERM)

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.parametrize(("kind", "metric"), [("embed", "spearman"), ("together", "accuracy")])
def test_embed_reports_the_score_before_training(kind: str, metric: str, tmp_path: Path, bare: Path) -> None:
    labelled, run = write_splits(kind, tmp_path / "data"), tmp_path / "run"
    settings = {"task.group_size": 4} if kind == "together" else {}
    results = finetune_tiny("embed", labelled, run, settings, model=bare).results
    baseline = results["baseline"]
    dataset = read(labelled)
    stats = compute_stats(dataset, ("train", "dev", "test"))
    task, untrained = build_task(FinetuneSettings(task=EmbedSettings(group_size=4)), dataset, stats, heedful.load(bare))
    for split in ("dev", "test"):
        expected = task.compute_metrics(measure_split(task, untrained, dataset.examples(split)))[metric]
        assert baseline["splits"][split]["numbers"][metric] == pytest.approx(expected, abs=1e-6)
        assert metric in baseline["splits"][split]["intervals"]
    _, test_line = baseline_lines(results)
    assert test_line.startswith(f"test {metric} ")
    assert "; before training " in test_line
    assert test_line in (run / "model" / "README.md").read_text().replace("\\", "")
    with (run / "results.csv").open(newline="") as file:
        *_, baseline_row = csv.DictReader(file)
    assert baseline_row["baseline"] == "before training"
    assert float(baseline_row[f"dev_{metric}"]) == baseline["splits"]["dev"]["numbers"][metric]


def test_a_resumed_run_reports_the_same_score_before_training(tmp_path: Path, bare: Path) -> None:
    labelled, run = write_splits("embed", tmp_path / "data"), tmp_path / "run"
    uninterrupted = finetune_tiny("embed", labelled, tmp_path / "uninterrupted", model=bare).results
    first, second = Interrupt(2), Interrupt(0)
    assert finetune_tiny("embed", labelled, run, model=bare, reporter=first).status == "interrupted"
    resumed = finetune_tiny("embed", labelled, run, model=bare, reporter=second).results
    assert resumed["baseline"] == uninterrupted["baseline"]
    assert resumed["baseline"] == json.loads((run / "before.json").read_text())
    assert "the score before training" in first.messages
    assert "the score before training" not in second.messages


def test_changed_settings_of_an_untrained_run_are_scored_anew(tmp_path: Path, bare: Path) -> None:
    labelled, run = write_splits("embed", tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    finetune_tiny("embed", labelled, tmp_path / "other", {"max_length": 8}, model=bare)
    for name in ("run.lock", "settings.toml", "environment.json", "data.json"):
        (run / name).write_bytes((tmp_path / "other" / name).read_bytes())
    (run / "before.json").write_text('{"name": "stale", "splits": {}}')
    results = finetune_tiny("embed", labelled, run, model=bare).results
    assert results["baseline"]["name"] == "before training"


def test_the_score_before_training_can_be_left_out(tmp_path: Path, bare: Path) -> None:
    labelled, run = write_splits("embed", tmp_path / "data"), tmp_path / "run"
    settings: dict[str, Any] = {"eval_baseline": "false"}
    results = finetune_tiny("embed", labelled, run, settings, model=bare).results
    assert "baseline" not in results
    assert not (run / "before.json").exists()
