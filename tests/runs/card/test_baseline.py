"""The score before training beside that after it, of embed and of pre-training that goes on."""

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

TIMES = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: TIMES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers saved."""
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


class Leaves(Reporter):
    """Asks for a stop after a step, and counts what is said."""

    def __init__(self, at: int) -> None:
        self.at, self.sentences = at, list[str]()

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def message(self, text: str) -> None:
        self.sentences.append(text)


@pytest.mark.parametrize(("kind", "main"), [("embed", "spearman"), ("together", "accuracy")])
def test_embed_reports_the_score_before_training(kind: str, main: str, tmp_path: Path, bare: Path) -> None:
    labelled, settings = write_splits(kind, tmp_path / "data"), {"task.group_size": 4} if kind == "together" else {}
    done = finetune_tiny("embed", labelled, tmp_path / "run", settings, model=bare)
    baseline = done.results["baseline"]
    source = read(labelled)
    splits = compute_stats(source, ("train", "dev", "test"))
    task, loaded = build_task(FinetuneSettings(task=EmbedSettings(group_size=4)), source, splits, heedful.load(bare))
    for split in ("dev", "test"):
        expected = task.compute_metrics(measure_split(task, loaded, source.examples(split)))[main]
        assert baseline["splits"][split]["numbers"][main] == pytest.approx(expected, abs=1e-6)
        assert main in baseline["splits"][split]["intervals"]
    line = baseline_lines(done.results)[1]
    assert line.startswith(f"test {main} ") and "; before training " in line
    assert line in (tmp_path / "run" / "model" / "README.md").read_text().replace("\\", "")
    with (tmp_path / "run" / "results.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    assert last["baseline"] == "before training"
    assert float(last[f"dev_{main}"]) == baseline["splits"]["dev"]["numbers"][main]


def test_a_resumed_run_reports_the_same_score_before_training(tmp_path: Path, bare: Path) -> None:
    labelled = write_splits("embed", tmp_path / "data")
    whole = finetune_tiny("embed", labelled, tmp_path / "whole", model=bare)
    first, second = Leaves(2), Leaves(0)
    assert finetune_tiny("embed", labelled, tmp_path / "run", model=bare, reporter=first).status == "interrupted"
    done = finetune_tiny("embed", labelled, tmp_path / "run", model=bare, reporter=second)
    assert (
        done.results["baseline"] == whole.results["baseline"] == json.loads((tmp_path / "run/before.json").read_text())
    )
    assert "the score before training" in first.sentences and "the score before training" not in second.sentences


def test_other_settings_are_scored_anew_before_anything_is_trained(tmp_path: Path, bare: Path) -> None:
    labelled, run = write_splits("embed", tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    finetune_tiny("embed", labelled, tmp_path / "other", {"max_length": 8}, model=bare)
    for name in ("run.lock", "settings.toml", "environment.json", "data.json"):
        (run / name).write_bytes((tmp_path / "other" / name).read_bytes())
    (run / "before.json").write_text('{"name": "stale", "splits": {}}')
    done = finetune_tiny("embed", labelled, run, model=bare)
    assert done.results["baseline"]["name"] == "before training"


def test_the_score_before_training_can_be_left_out(tmp_path: Path, bare: Path) -> None:
    settings: dict[str, Any] = {"eval_baseline": "false"}
    done = finetune_tiny("embed", write_splits("embed", tmp_path / "data"), tmp_path / "run", settings, model=bare)
    assert "baseline" not in done.results and not (tmp_path / "run" / "before.json").exists()
