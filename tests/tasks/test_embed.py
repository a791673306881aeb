"""Embeddings learn from scores or from company; groups of pairs stay whole, so micro-batches do not matter."""

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
    """Mean pooling over the tiny model, in float64."""
    return with_head(load_both("bare").model, "embedding")


def task(**more: Any) -> Embed:
    """For the tiny model."""
    return Embed(**{"tokenizer": tokenizer(), "limit": LIMIT, "scored": False, "group_size": 3} | more)


def scored(**more: Any) -> Embed:
    """With scores from 0 to 5."""
    return task(**{"scored": True, "group_size": 1, "high": 5.0} | more)


@cache
def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' means over the tokens of each text of all pairs."""
    pair = load_both("bare")
    sides = []
    with torch.no_grad():
        for side in ("anchor", "positive"):
            each = [pair.tokenizer([getattr(example, side)], return_tensors="pt") for example in PAIRS]
            sides.append(torch.cat([pair.reference(**arguments).last_hidden_state.mean(1) for arguments in each]))
    return sides[0], sides[1]


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_is_both_texts_of_a_pair() -> None:
    read = scored().encode_split(SCORED)
    assert [sequence_text(read.samples[0], number) for number in (0, 1)] == [
        "[CLS] the cat sat [SEP]",
        "[CLS] on the mat [SEP]",
    ]
    assert [sample.target for sample in read.samples] == [0, 1, 0.5, 0.2, 0.8, 0.9, 0.6]  # from 0 to 1
    assert {len(sample.bounds) for sample in read.samples} == {3} and not np.concatenate(
        [s.types for s in read.samples]
    ).any()
    assert scored(low=-5.0).encode_split(SCORED[:1]).samples[0].target == 0.5
    long = task(limit=SHORT).encode_split([PairExample(anchor=long_text(60), positive="x")])
    whole = len(tokenizer().encode(long_text(60)))
    assert (long.truncated, long.truncated_tokens, long.windowed) == (1, whole - SHORT, 0)
    assert long.samples[0].bounds == (0, SHORT, SHORT + 3)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"long_inputs": "stride"}, '^long_inputs is "stride", but a text has one vector: set it to "truncate"$'),
    ({"group_size": 1}, "^group_size is 1, but in-batch negatives need groups of 2 or more pairs$"),
    ({"scored": True, "low": 2.0, "high": 2.0}, r"^scores go from 2\.0 to 2\.0: low must be below high$"),
]


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_settings_that_mean_nothing_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        task(**more)


# -- losses -------------------------------------------------------------------------------------------------------


def test_scores_are_met_by_cosines() -> None:
    a, b = vectors()
    goal = torch.tensor([example.score for example in SCORED], dtype=torch.float64) / 5
    expected = (F.cosine_similarity(a, b) - goal).square().sum()
    for parts in (1, 3):
        loss = backward_all(scored(), model(), SCORED, parts)
        assert (loss.count, float(loss.sum)) == (7, pytest.approx(float(expected), abs=1e-12))


def test_second_texts_are_told_apart_within_a_group() -> None:
    """-log of exp(20 cos(a_i, b_i)) over its sum with all b_j of the group; the last group is smaller."""
    a, b = (F.normalize(vector, dim=-1).numpy() for vector in vectors())
    expected = 0.0
    for members in ((0, 1, 2), (3, 4, 5), (6,)):
        for i in members:
            powers = [np.exp(20 * a[i] @ b[j]) for j in members]
            expected -= np.log(powers[members.index(i)] / sum(powers))
    loss = backward_all(task(), model(), PAIRS)
    assert (loss.count, float(loss.sum)) == (7, pytest.approx(expected, abs=1e-9))
    other = backward_all(task(scale=5.0), model(), PAIRS)
    assert float(other.sum) != pytest.approx(expected, abs=0.1)


def test_a_second_text_that_is_the_same_is_not_told_apart() -> None:
    pairs = [
        replace(example, positive=b) for example, b in zip(PAIRS, ("x", "y", "x", "y", "y", "y", "x"), strict=True)
    ]
    for group_size in (3, 7):
        embed_task, ours = task(group_size=group_size), model()
        with torch.no_grad():
            vectors = embed_task.scores(ours, embed_task.batch(embed_task.encode_split(pairs).samples, [0] * 7))
        a, b = (F.normalize(vectors[side::2], dim=-1).numpy() for side in (0, 1))
        expected = 0.0
        for start in range(0, 7, group_size):
            group = range(start, min(start + group_size, 7))
            for i in group:
                rivals = [np.exp(20 * a[i] @ b[j]) for j in group if pairs[j].positive != pairs[i].positive]
                own = np.exp(20 * a[i] @ b[i])
                expected -= np.log(own / (own + sum(rivals)))
        loss = backward_all(embed_task, ours, pairs)
        assert (loss.count, float(loss.sum)) == (7, pytest.approx(expected, abs=1e-9))
    alone = backward_all(task(), model(), [replace(pair, positive="x") for pair in PAIRS])
    assert float(alone.sum) == 0, "there is nothing to tell apart"


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_micro_batches_do_not_matter_while_groups_stay_whole(budget: int) -> None:
    embed_task, ours = task(), model()
    samples = embed_task.encode_split(PAIRS).samples
    groups = group(len(samples), embed_task.group_size)

    def run(budget: int) -> tuple[float, float, torch.Tensor, int]:
        ours.zero_grad()
        total = count = 0.0
        batches = split_microbatches([sum(len(samples[n]) for n in group) for group in groups], budget)
        for batch in batches:
            mine = [samples[number] for place in batch for number in groups[place]]
            loss = embed_task.loss(ours, embed_task.batch(mine, [0] * len(mine)))
            loss.sum.backward()
            total, count = total + loss.sum.item(), count + loss.count
        gradient = ours.named_tensors()["encoder.blocks.1.mlp.up.weight"].grad
        assert gradient is not None
        return total, count, gradient.clone(), len(batches)

    whole, parts = run(10**6), run(budget)
    assert (whole[3], parts[3]) == (1, {1: 3, 20: 3, 40: 2, 1000: 1}[budget])
    assert parts[0] == pytest.approx(whole[0], abs=1e-12) and parts[1] == whole[1] == 7
    assert (parts[2] - whole[2]).abs().max() <= 1e-12 * whole[2].abs().max()
    assert whole[2].abs().max() > 1e-3


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_scored_pairs_are_correlated() -> None:
    embed_task = scored()
    measure = evaluate_task(embed_task, Engine(model()), SCORED)
    metrics = embed_task.compute_metrics(measure)
    cosines, gold = F.cosine_similarity(*vectors()).numpy(), np.array([example.score for example in SCORED])
    assert (
        metrics["spearman"]
        == metrics[embed_task.metric]
        == pytest.approx(scipy.stats.spearmanr(cosines, gold)[0], abs=1e-9)
    )
    assert metrics["pearson"] == pytest.approx(scipy.stats.pearsonr(cosines, gold)[0], abs=1e-5)
    assert metrics["mse"] == pytest.approx(((cosines - gold / 5) ** 2).mean(), abs=1e-5)
    for name, interval in measure.intervals().items():
        assert -1 <= interval["low"] <= metrics[name] <= interval["high"] <= 1
    assert measure.intervals().keys() == {"pearson", "spearman"}


def test_unscored_pairs_are_found_among_all() -> None:
    embed_task = task()
    measure = evaluate_task(embed_task, Engine(model()), PAIRS)
    metrics = embed_task.report(measure)
    a, b = (F.normalize(vector, dim=-1).numpy() for vector in vectors())
    order = (-a @ b.T).argsort(1)
    ranks = [1 + list(row).index(number) for number, row in enumerate(order)]
    assert metrics["accuracy"] == metrics[embed_task.metric] == sum(rank == 1 for rank in ranks) / 7
    assert metrics["mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / 7)
    assert metrics["count"] == 7 and metrics["notes"] == [] and measure.intervals().keys() == {"accuracy", "mrr"}


def test_pairs_with_the_same_second_text_are_no_rivals() -> None:
    pairs = [replace(pair, positive="x") for pair in PAIRS]
    metrics = task().compute_metrics(evaluate_task(task(), Engine(model()), pairs))
    assert (metrics["accuracy"], metrics["mrr"]) == (1, 1), "there is one answer"


@pytest.mark.parametrize("embed_task", [scored(), task()])
def test_texts_that_are_cut_are_counted(embed_task: Embed) -> None:
    ours = copy(model())
    ours.tokenizer = tokenizer().limited(SHORT)
    pairs = [
        *SCORED,
        PairExample(anchor=long_text(60), positive=long_text(60), score=1.0),
        PairExample(anchor=long_text(60), positive="x", score=2.0),
    ]
    lost = 3 * (len(tokenizer().encode(long_text(60))) - SHORT)
    message = f"examples longer than the model reads, which were cut: 2 ({lost} tokens)"
    halves = [evaluate_task(embed_task, Engine(ours), pairs, first=rank, step=2) for rank in (0, 1)]
    assert embed_task.report(halves[0].merge_state(halves[1]))["notes"] == [message]


def test_mistakes_come_in_order() -> None:
    far = [
        scored().score_answer(SCORED[1], {"similarity": cosine}) for cosine in (-1.0, 0.0, 0.9, 1.0)
    ]  # its score is 5
    assert [scored.loss for scored in far] == pytest.approx([2.0, 1.0, 0.1, 0.0])
    assert {scored.correct for scored in far} == {None} and (far[0].label, far[0].prediction) == (5.0, -1.0)
    apart = [task().score_answer(PAIRS[0], {"similarity": cosine}) for cosine in (-1.0, 0.5, 1.0)]
    assert [scored.loss for scored in apart] == [2.0, 0.5, 0.0] and apart[0].label is None
