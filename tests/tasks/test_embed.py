"""Embed: the losses of pairs with and without scores, groups in micro-batches, and metrics that agree with scipy."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import PairExample
from heedful.data.sampler import group, split_microbatches
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.tasks.embed import Embed
from heedful.tasks.task import evaluate_task
from tests.support.model_folders import LIMIT, long_text
from tests.support.task_parity import SHORT, backward_all, load_both, sequence_text, tokenizer

PAIRS = [
    PairExample(anchor="the cat sat", positive="on the mat"),
    PairExample(anchor="who ?", positive="ada wrote it"),
    PairExample(anchor="in paris", positive="she lives here ."),
    PairExample(anchor="", positive="x"),
    PairExample(anchor="the dog", positive="ran to france"),
    PairExample(anchor="it is love", positive="love"),
    PairExample(anchor="first", positive="program"),
]
SCORED = [
    PairExample(anchor=example.anchor, positive=example.positive, score=score)
    for example, score in zip(PAIRS, (0.0, 5.0, 2.5, 1.0, 4.0, 4.5, 3.0), strict=True)
]


@cache
def model() -> ModelBundle:
    """The tiny model with mean pooling, in float64."""
    return with_head(load_both("bare").model, "embedding")


def task(**changes: Any) -> Embed:
    """A task for pairs without scores."""
    return Embed(**{"tokenizer": tokenizer(), "limit": LIMIT, "scored": False, "group_size": 3} | changes)


def scored_task(**changes: Any) -> Embed:
    """A task for pairs with scores from 0 to 5."""
    return task(**{"scored": True, "group_size": 1, "high": 5.0} | changes)


@cache
def reference_vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of all anchors and of all positives in transformers: means over the tokens of a text."""
    pair = load_both("bare")
    sides = []
    with torch.no_grad():
        for side in ("anchor", "positive"):
            batches = [pair.tokenizer([getattr(example, side)], return_tensors="pt") for example in PAIRS]
            sides.append(torch.cat([pair.reference(**batch).last_hidden_state.mean(1) for batch in batches]))
    return sides[0], sides[1]


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_has_both_texts_of_a_pair() -> None:
    encoded = scored_task().encode_split(SCORED)
    assert sequence_text(encoded.samples[0], 0) == "[CLS] the cat sat [SEP]"
    assert sequence_text(encoded.samples[0], 1) == "[CLS] on the mat [SEP]"
    assert [sample.target for sample in encoded.samples] == [0, 1, 0.5, 0.2, 0.8, 0.9, 0.6]  # scores, scaled to 0..1
    for sample in encoded.samples:
        assert len(sample.bounds) == 3
        assert not sample.types.any()
    assert scored_task(low=-5.0).encode_split(SCORED[:1]).samples[0].target == 0.5


def test_long_texts_are_truncated() -> None:
    encoded = task(limit=SHORT).encode_split([PairExample(anchor=long_text(60), positive="x")])
    length = len(tokenizer().encode(long_text(60)))
    assert (encoded.truncated, encoded.truncated_tokens, encoded.windowed) == (1, length - SHORT, 0)
    assert encoded.samples[0].bounds == (0, SHORT, SHORT + 3)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"long_inputs": "stride"}, '^long_inputs is "stride", but a text has one vector: set it to "truncate"$'),
    ({"group_size": 1}, "^group_size is 1, but in-batch negatives need groups of 2 or more pairs$"),
    ({"scored": True, "low": 2.0, "high": 2.0}, r"^scores go from 2\.0 to 2\.0: low must be below high$"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_settings_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        task(**changes)


# -- losses -------------------------------------------------------------------------------------------------------


def test_the_loss_with_scores_is_the_squared_error_of_cosines() -> None:
    a, b = reference_vectors()
    goal = torch.tensor([example.score for example in SCORED], dtype=torch.float64) / 5
    expected = (F.cosine_similarity(a, b) - goal).square().sum()
    for parts in (1, 3):
        loss = backward_all(scored_task(), model(), SCORED, parts)
        assert (loss.count, float(loss.sum)) == (7, pytest.approx(float(expected), abs=1e-12))


def test_the_loss_without_scores_has_negatives_from_the_group() -> None:
    """The loss is the cross-entropy of a_i with the positives b_j of its group, by exp(20 cos(a_i, b_j))."""
    a, b = (F.normalize(vectors, dim=-1).numpy() for vectors in reference_vectors())
    expected = 0.0
    for members in ((0, 1, 2), (3, 4, 5), (6,)):
        for i in members:
            powers = {j: np.exp(20 * a[i] @ b[j]) for j in members}
            expected -= np.log(powers[i] / sum(powers.values()))
    loss = backward_all(task(), model(), PAIRS)
    assert (loss.count, float(loss.sum)) == (7, pytest.approx(expected, abs=1e-9))
    other_scale = backward_all(task(scale=5.0), model(), PAIRS)
    assert float(other_scale.sum) != pytest.approx(expected, abs=0.1)


def test_an_equal_second_text_is_not_a_negative() -> None:
    positives = ("x", "y", "x", "y", "y", "y", "x")
    pairs = [replace(example, positive=positive) for example, positive in zip(PAIRS, positives, strict=True)]
    for group_size in (3, 7):
        embed_task, loaded = task(group_size=group_size), model()
        with torch.no_grad():
            vectors = embed_task.scores(loaded, embed_task.batch(embed_task.encode_split(pairs).samples, [0] * 7))
        a, b = (F.normalize(vectors[side::2], dim=-1).numpy() for side in (0, 1))
        expected = 0.0
        for start in range(0, 7, group_size):
            members = range(start, min(start + group_size, 7))
            for i in members:
                negatives = [np.exp(20 * a[i] @ b[j]) for j in members if positives[j] != positives[i]]
                own = np.exp(20 * a[i] @ b[i])
                expected -= np.log(own / (own + sum(negatives)))
        loss = backward_all(embed_task, loaded, pairs)
        assert (loss.count, float(loss.sum)) == (7, pytest.approx(expected, abs=1e-9))
    without_negatives = backward_all(task(), model(), [replace(pair, positive="x") for pair in PAIRS])
    assert float(without_negatives.sum) == 0


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_micro_batches_of_whole_groups_give_equal_losses_and_gradients(budget: int) -> None:
    embed_task, loaded = task(), model()
    samples = embed_task.encode_split(PAIRS).samples
    groups = group(len(samples), embed_task.group_size)

    def run(budget: int) -> tuple[float, float, torch.Tensor, int]:
        """Train on micro-batches of up to `budget` tokens: the loss, its count, a gradient, the number of batches."""
        loaded.zero_grad()
        total = count = 0.0
        tokens_of_groups = [sum(len(samples[index]) for index in members) for members in groups]
        batches = split_microbatches(tokens_of_groups, budget)
        for batch in batches:
            batch_samples = [samples[index] for position in batch for index in groups[position]]
            loss = embed_task.loss(loaded, embed_task.batch(batch_samples, [0] * len(batch_samples)))
            loss.sum.backward()
            total, count = total + loss.sum.item(), count + loss.count
        gradient = loaded.named_tensors()["encoder.blocks.1.mlp.up.weight"].grad
        assert gradient is not None
        return total, count, gradient.clone(), len(batches)

    expected_loss, expected_count, expected_gradient, num_batches = run(10**6)
    assert num_batches == 1
    assert expected_gradient.abs().max() > 1e-3
    loss, count, gradient, num_batches = run(budget)
    assert num_batches == {1: 3, 20: 3, 40: 2, 1000: 1}[budget]
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    assert count == expected_count == 7
    assert (gradient - expected_gradient).abs().max() <= 1e-12 * expected_gradient.abs().max()


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_with_scores_agrees_with_scipy() -> None:
    embed_task = scored_task()
    measure = evaluate_task(embed_task, Engine(model()), SCORED)
    metrics = embed_task.compute_metrics(measure)
    cosines, gold = F.cosine_similarity(*reference_vectors()).numpy(), np.array([example.score for example in SCORED])
    assert metrics["spearman"] == pytest.approx(scipy.stats.spearmanr(cosines, gold)[0], abs=1e-9)
    assert metrics[embed_task.metric] == metrics["spearman"]
    assert metrics["pearson"] == pytest.approx(scipy.stats.pearsonr(cosines, gold)[0], abs=1e-5)
    assert metrics["mse"] == pytest.approx(((cosines - gold / 5) ** 2).mean(), abs=1e-5)
    for name, interval in measure.intervals().items():
        assert -1 <= interval["low"] <= metrics[name] <= interval["high"] <= 1
    assert measure.intervals().keys() == {"pearson", "spearman"}


def test_an_evaluation_without_scores_ranks_all_second_texts() -> None:
    embed_task = task()
    measure = evaluate_task(embed_task, Engine(model()), PAIRS)
    metrics = embed_task.report(measure)
    a, b = (F.normalize(vectors, dim=-1).numpy() for vectors in reference_vectors())
    order = (-a @ b.T).argsort(1)  # for every anchor, the positives from the nearest to the farthest
    ranks = [1 + list(row).index(index) for index, row in enumerate(order)]
    assert metrics["accuracy"] == metrics[embed_task.metric] == sum(rank == 1 for rank in ranks) / 7
    assert metrics["mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / 7)
    assert metrics["count"] == 7
    assert metrics["notes"] == []
    assert measure.intervals().keys() == {"accuracy", "mrr"}


def test_equal_second_texts_do_not_compete_in_an_evaluation() -> None:
    pairs = [replace(pair, positive="x") for pair in PAIRS]
    metrics = task().compute_metrics(evaluate_task(task(), Engine(model()), pairs))
    assert (metrics["accuracy"], metrics["mrr"]) == (1, 1)


@pytest.mark.parametrize("embed_task", [scored_task(), task()])
def test_truncated_texts_are_counted(embed_task: Embed) -> None:
    loaded = copy(model())
    loaded.tokenizer = tokenizer().limited(SHORT)
    pairs = [
        *SCORED,
        PairExample(anchor=long_text(60), positive=long_text(60), score=1.0),
        PairExample(anchor=long_text(60), positive="x", score=2.0),
    ]
    num_cut_tokens = 3 * (len(tokenizer().encode(long_text(60))) - SHORT)
    message = f"examples longer than the model reads, which were cut: 2 ({num_cut_tokens} tokens)"
    first, second = (evaluate_task(embed_task, Engine(loaded), pairs, first=rank, step=2) for rank in (0, 1))
    assert embed_task.report(first.merge_state(second))["notes"] == [message]


def test_worse_mistakes_have_larger_losses() -> None:
    pair = SCORED[1]  # its score is 5, so the right cosine is 1
    scored_answers = [scored_task().score_answer(pair, {"similarity": cosine}) for cosine in (-1.0, 0.0, 0.9, 1.0)]
    assert [scored.loss for scored in scored_answers] == pytest.approx([2.0, 1.0, 0.1, 0.0])
    assert {scored.correct for scored in scored_answers} == {None}
    assert (scored_answers[0].label, scored_answers[0].prediction) == (5.0, -1.0)
    scored_answers = [task().score_answer(PAIRS[0], {"similarity": cosine}) for cosine in (-1.0, 0.5, 1.0)]
    assert [scored.loss for scored in scored_answers] == [2.0, 0.5, 0.0]
    assert scored_answers[0].label is None
