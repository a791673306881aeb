"""Causal language modelling: targets, the loss and gradients of transformers, and training."""

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
samples_of_ids = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4), max_size=4)


def make_sample(*ids: list[int]) -> Sample:
    """Return a sample of these sequences, all with token type 0."""
    return Sample.of(ids, [[0] * len(sequence) for sequence in ids])


@given(samples_of_ids)
def test_each_token_predicts_the_next_one_of_its_sequence(groups: list[list[list[int]]]) -> None:
    batch = CAUSAL.batch([make_sample(*group) for group in groups], [0] * len(groups))
    flat = [sequence for group in groups for sequence in group]
    assert batch.packed.tokens.tolist() == [id for sequence in flat for id in sequence]
    assert batch.targets.tolist() == [id for sequence in flat for id in sequence[1:]]
    assert batch.rows is not None and batch.weights.tolist() == [1.0] * len(batch.targets)
    pairs = zip(batch.packed.tokens[batch.rows].tolist(), batch.targets.tolist(), strict=True)
    assert list(pairs) == [pair for sequence in flat for pair in pairwise(sequence)]


def test_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    ids, _ = random_sequences("gpt2")
    batch = CAUSAL.batch([make_sample(*ids[:3]), make_sample(*ids[3:])], [0, 0])
    loss = CAUSAL.loss(loaded, batch)
    loss.sum.backward()
    with Float64Mode(torch.float64):
        inputs = [torch.tensor([sequence]) for sequence in ids if len(sequence) > 1]
        total = sum(reference(input_ids=row, labels=row).loss * (row.shape[1] - 1) for row in inputs)
    count = sum(map(len, ids)) - len(ids)
    assert isinstance(total, torch.Tensor) and loss.count == count
    assert abs(float(loss.sum.detach()) / float(total.detach()) - 1) < 1e-12
    assert_same_gradients(reference, total / count, loaded, count, tolerance=1e-12)


def test_a_batch_without_targets_has_a_loss_of_0(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel")
    loss = CAUSAL.loss(heedful.load(tmp_path), CAUSAL.batch([make_sample([7], [8])], [0]))
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    assert len(CAUSAL.batch([], []).targets) == 0


STACK = StackConfig(width=32, layers=2, heads=4, head_width=8, inner_width=64, norm_at="pre", final_norm=True)


def test_a_model_learns_a_few_sentences() -> None:
    """The model predicts all tokens but those at the beginnings of sentences."""
    words = tokenizer()
    ids = [words.encode(line.rpartition(" ")[0]).ids for line in LINES[:8]]
    embedding = EmbeddingConfig(vocabulary=words.size, width=32, positions=Learned(count=48))
    model = ModelConfig(embedding=embedding, decoder=replace(STACK, causal=True))
    loaded = create(BundleConfig(family="heedful", model=model, head=NextToken()), words, seed=1)
    settings = TrainSettings(max_steps=60, batch_size=4, optimizer=AdamW(lr=1e-2), precision="float32")
    samples = [make_sample(*ids[:4]), make_sample(*ids[4:6]), make_sample(*ids[6:])]
    losses = [step.loss for step in Trainer(loaded, CAUSAL, samples, settings)]
    assert losses[0] > 4 and losses[-1] < 0.4
    metrics = CAUSAL.measure(loaded, CAUSAL.batch(samples, [0, 0, 0]))
    right, count = metrics["clm_accuracy"]
    assert metrics["clm_loss"][1] == count and right > 0.9 * count


def test_a_bidirectional_model_is_refused() -> None:
    embedding = EmbeddingConfig(vocabulary=99, width=32)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=STACK), head=NextToken())
    with pytest.raises(HeedfulError, match="causal pre-training needs a decoder"):
        CAUSAL.loss(create(config), CAUSAL.batch([make_sample([5, 6])], [0]))
