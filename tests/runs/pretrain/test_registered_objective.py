"""An objective that only this file defines can be used like every other objective, once it is registered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Sample, SelfSupervised, Term
from heedful.objectives.base import concat_long, cross_entropy_term, pack_samples
from heedful.objectives.random_numbers import uniform
from heedful.runs.pretrain.objective_builder import Components, ObjectiveBuilder
from heedful.runs.pretrain.run import pretrain
from heedful.runs.pretrain.settings import resolve_pretrain
from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec
from heedful.runs.pretrain.specs import register_objective, unregister_objective
from heedful.runs.results import RunResult
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.corpora import make_documents, write_documents

pytestmark = pytest.mark.usefixtures("registered", "untimed")


# -- the objective --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshuffleSettings(ObjectiveSettings):
    """Restore the order of tokens that were shuffled within windows."""

    kind: Literal["unshuffle"] = "unshuffle"
    window: int = 3  # tokens that are shuffled together

    def __post_init__(self) -> None:
        if self.window < 2:
            raise HeedfulError(f"window is {self.window}; expected a whole number from 2")


@dataclass(frozen=True, kw_only=True)
class Unshuffle(SelfSupervised):
    """The mean of -log p(token at a position of the original text), over all positions but special tokens."""

    window: int
    head = "masked_lm"

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        packed = pack_samples(samples)
        original_ids = packed.tokens.clone()
        order = np.arange(packed.bounds[-1])  # position in the original text of each token of the batch
        text_positions = []  # of each sequence
        start = 0
        for sample, key in zip(samples, keys, strict=True):
            random_numbers = uniform(key, len(sample))
            for sequence_start, sequence_stop in pairwise(sample.bounds):
                positions = np.arange(start + sequence_start + 1, start + sequence_stop - 1)  # without special tokens
                text_positions.append(positions)
                for window_start in range(0, len(positions), self.window):
                    window = positions[window_start : window_start + self.window]
                    order[window] = window[random_numbers[window - start].argsort(kind="stable")]
            start += len(sample)
        packed.tokens[:] = original_ids[torch.from_numpy(order)]
        rows = concat_long(text_positions)
        return Batch(packed=packed, targets=original_ids[rows], weights=torch.ones(len(rows)), rows=rows)

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        assert loaded.head is not None
        rows = loaded.hidden_states(batch.packed, output_rows=batch.rows)
        return (cross_entropy_term("unshuffle", loaded.head(rows, batch.packed), batch.targets),)


class UnshuffleBuilder(ObjectiveBuilder[UnshuffleSettings]):
    """Builder with packed windows of documents as samples, as for most objectives."""

    def objective(self, components: Components, loaded: ModelBundle, phase: UnshuffleSettings) -> Unshuffle:
        return Unshuffle(window=phase.window)


SPEC = ObjectiveSpec(
    name="unshuffle",
    settings=UnshuffleSettings,
    builder_ref=f"{__name__}:UnshuffleBuilder",
    head="masked_lm",
    family="bert",
)


# -- its use --------------------------------------------------------------------------------------------------------

OVERRIDES: dict[str, object] = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "max_steps": 4,
    "batch_size": 4,
    "precision": "float32",
    "max_seq_length": 32,
    "pack_length": 64,
    "eval_fraction": 0.1,
    "eval_every_steps": 2,
    "fit.keep_checkpoints": True,
    "tokenizer.vocab_size": 200,
    "corpus.sample_by": "paragraph",
    "objective.window": 4,
}


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    register_objective(SPEC)
    yield
    unregister_objective(SPEC.name)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing."""
    latency = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: latency)


class StopAfter(Reporter):
    """Requests a stop after a step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, step: Step, trainer: Trainer) -> None:
        trainer.stop_requested = step.number == self.number


def pretrain_unshuffle(data: Path, folder: Path, reporter: Reporter | None = None) -> RunResult:
    """Pre-train a small model with the objective."""
    return pretrain(data, folder, objective="unshuffle", overrides=OVERRIDES, reporter=reporter)


def test_it_is_pre_trained_evaluated_and_resumed(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "text.txt", make_documents(60, seed=1))
    whole = pretrain_unshuffle(data, tmp_path / "whole")
    assert whole.status == "completed"
    assert whole.results["objective"] == "unshuffle"
    assert whole.results["metric"] == "unshuffle_accuracy"
    metrics = whole.results["splits"]["validation"]["numbers"]
    assert set(metrics) == {"loss", "perplexity", "count", "unshuffle_loss", "unshuffle_accuracy"}
    journal = [json.loads(line) for line in (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in journal if "dev" in line] == [2, 4]
    assert heedful.load(tmp_path / "whole").head is not None
    assert "objective `unshuffle`" in (tmp_path / "whole" / "model" / "README.md").read_text()

    assert pretrain_unshuffle(data, tmp_path / "resumed", StopAfter(3)).status == "interrupted"
    assert pretrain_unshuffle(data, tmp_path / "resumed").status == "completed"
    whole_model, resumed_model = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "resumed"))
    assert whole_model.read_bytes() == resumed_model.read_bytes()


def test_its_settings_are_checked() -> None:
    assert resolve_pretrain("a.txt", objective="unshuffle").objective == UnshuffleSettings()
    with pytest.raises(HeedfulError, match=r"objective\.window is 1; expected a whole number from 2"):
        resolve_pretrain("a.txt", objective="unshuffle", overrides={"objective.window": 1})
    with pytest.raises(HeedfulError, match=r'did you mean "unshuffle"'):
        resolve_pretrain("a.txt", objective="unshufle")
    phases = {"phases": [{"start_fraction": 0.5, "mask_prob": 0.3}]}
    with pytest.raises(HeedfulError, match=r'mask_prob of a phase is for objective\.kind = "mlm" or'):
        resolve_pretrain("a.txt", objective="unshuffle", overrides=phases)
    with pytest.raises(HeedfulError, match='an objective named "unshuffle" is registered already'):
        register_objective(SPEC)
