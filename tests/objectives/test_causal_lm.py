"""Causal language modelling: transformers' loss and gradients, sequence by sequence, and it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, NextToken, StackConfig
from heedful.objectives import Sample
from heedful.objectives.causal_lm import CausalLM
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.task_parity import assert_same_gradients
from tests.support.tiny_models import Float64Mode, random_sequences, save_tiny
from tests.support.tiny_runs import LINES, tokenizer

CAUSAL = CausalLM(tokenizer=tokenizer())
lists = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4), max_size=4)


def plain(*ids: list[int]) -> Sample:
    """A sample of these sequences, all of type 0."""
    return Sample.of(ids, [[0] * len(each) for each in ids])


@given(lists)
def test_each_row_predicts_the_next_of_its_own_sequence(groups: list[list[list[int]]]) -> None:
    batch = CAUSAL.batch([plain(*group) for group in groups], [0] * len(groups))
    flat = [sequence for group in groups for sequence in group]
    assert batch.packed.tokens.tolist() == [id for sequence in flat for id in sequence]
    assert batch.targets.tolist() == [id for sequence in flat for id in sequence[1:]]
    assert batch.rows is not None and batch.weights.tolist() == [1.0] * len(batch.targets)
    pairs = zip(batch.packed.tokens[batch.rows].tolist(), batch.targets.tolist(), strict=True)
    assert list(pairs) == [pair for sequence in flat for pair in pairwise(sequence)]


def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel", torch.float64)
    ours = heedful.load(tmp_path, dtype=torch.float64)
    ids, _ = random_sequences("gpt2")
    batch = CAUSAL.batch([plain(*ids[:3]), plain(*ids[3:])], [0, 0])
    loss = CAUSAL.loss(ours, batch)
    loss.sum.backward()
    with Float64Mode(torch.float64):
        inputs = [torch.tensor([each]) for each in ids if len(each) > 1]
        total = sum(theirs(input_ids=each, labels=each).loss * (each.shape[1] - 1) for each in inputs)
    count = sum(map(len, ids)) - len(ids)
    assert isinstance(total, torch.Tensor) and loss.count == count
    assert abs(float(loss.sum.detach()) / float(total.detach()) - 1) < 1e-12
    assert_same_gradients(theirs, total / count, ours, count, tolerance=1e-12)


def test_a_batch_without_targets_has_a_loss_of_0(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel")
    loss = CAUSAL.loss(heedful.load(tmp_path), CAUSAL.batch([plain([7], [8])], [0]))
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    assert len(CAUSAL.batch([], []).targets) == 0


STACK = StackConfig(width=32, layers=2, heads=4, head_width=8, inner_width=64, norm_at="pre", final_norm=True)


def test_it_learns() -> None:
    """What is certain of a few sentences; their beginnings are not."""
    words = tokenizer()
    ids = [words.encode(line.rpartition(" ")[0]).ids for line in LINES[:8]]
    embedding = EmbeddingConfig(vocabulary=words.size, width=32, positions=Learned(count=48))
    model = ModelConfig(embedding=embedding, decoder=replace(STACK, causal=True))
    loaded = create(BundleConfig(family="heedful", model=model, head=NextToken()), words, seed=1)
    settings = TrainSettings(max_steps=60, batch_size=4, optimizer=AdamW(lr=1e-2), precision="float32")
    samples = [plain(*ids[:4]), plain(*ids[4:6]), plain(*ids[6:])]
    losses = [step.loss for step in Trainer(loaded, CAUSAL, samples, settings)]
    assert losses[0] > 4 and losses[-1] < 0.4
    measured = CAUSAL.measure(loaded, CAUSAL.batch(samples, [0, 0, 0]))
    right, count = measured["clm_accuracy"]
    assert measured["clm_loss"][1] == count and right > 0.9 * count


def test_a_model_that_sees_what_comes_is_refused() -> None:
    embedding = EmbeddingConfig(vocabulary=99, width=32)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=STACK), head=NextToken())
    with pytest.raises(HeedfulError, match="causal pre-training needs a decoder"):
        CAUSAL.loss(create(config), CAUSAL.batch([plain([5, 6])], [0]))
