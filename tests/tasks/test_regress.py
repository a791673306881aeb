"""Regression learns numbers beside transformers, and says how sure a correlation is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data import ScoredExample
from heedful.infer.engine import Engine
from heedful.tasks.regress import MAX_DEVIATIONS, PearsonBootstrap, Regress, pearson_of, standardize
from heedful.tasks.task import evaluate_task
from tests.support.model_folders import LIMIT, long_text
from tests.support.task_parity import SHORT, assert_same_gradients, backward_all, load_both, tokenizer

EXAMPLES = [
    ScoredExample(text="the cat sat on the mat .", score=4.5),
    ScoredExample(text="who ran ?", text_pair="it ran", score=-1.0),
    ScoredExample(text="", score=0.25),
]


def task(**more: Any) -> Regress:
    """For the tiny model."""
    return Regress(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": ("stars",)} | more)


def answers(predicted: Any) -> list[dict[str, Any]]:
    """As the engine gives them."""
    return [{"values": {"stars": float(number)}} for number in predicted]


def measured(predicted: Any, gold: Any) -> Any:
    """Of so many examples."""
    examples = [ScoredExample(text="x", score=float(score)) for score in gold]
    return task().update_metrics(task().new_metrics(), examples, answers(predicted), range(len(examples)))


def test_loss_and_gradient() -> None:
    pair = load_both("regression")
    encodings = [
        pair.tokenizer([example.text], None if example.text_pair is None else [example.text_pair])
        for example in EXAMPLES
    ]
    batch = pair.tokenizer.pad(
        [{name: c[0] for name, c in encoding.items()} for encoding in encodings], return_tensors="pt"
    )
    targets = torch.tensor([example.score for example in EXAMPLES], dtype=torch.float64)
    expected = pair.reference(**batch, labels=targets).loss
    for parts in (1, 3):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert (loss.count, float(loss.sum) / 3) == (3, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 3)


def test_the_unit_of_scores_does_not_matter() -> None:
    """The loss is that of (score - mean) / deviation, and what answers gives scores."""
    pair, unit = load_both("regression"), {"mean": 50.0, "deviation": 20.0}
    far = [replace(example, score=20 * example.score + 50) for example in EXAMPLES]
    plain, other = backward_all(task(), pair.model, EXAMPLES), backward_all(task(**unit), pair.model, far)
    assert float(other.sum) == pytest.approx(float(plain.sum), abs=1e-12)
    assert task().for_inference(pair.model) is pair.model is task().for_training(pair.model)
    regress_task = task(**unit).for_inference(pair.model)
    texts = [example.text for example in EXAMPLES]
    before, after = (
        [answer["values"]["stars"] for answer in Engine(loaded)(texts)] for loaded in (pair.model, regress_task)
    )
    assert after == pytest.approx([20 * number + 50 for number in before], abs=1e-9)
    back = task(**unit).for_training(regress_task).named_tensors()
    for name, tensor in pair.model.named_tensors().items():
        assert (back[name] - tensor).abs().max() <= 1e-12 and (back[name] is tensor) == (
            not name.startswith("head.out.")
        ), name


def test_windows_of_a_long_text_have_its_number() -> None:
    samples = task(limit=SHORT).encode_split([ScoredExample(text=long_text(60), score=2.0)]).samples
    assert len(samples) > 3 and {(sample.target, sample.weight) for sample in samples} == {(2.0, 1 / len(samples))}


def test_an_evaluation_agrees_with_scipy() -> None:
    examples = [ScoredExample(text=f"the {a} {b}", score=float(ord(a) * ord(b) % 7)) for a in "abcdefgh" for b in "xyz"]
    measure = evaluate_task(task(), Engine(load_both("regression").model), examples)
    with torch.no_grad():
        batch = load_both("regression").tokenizer([example.text for example in examples], return_tensors="pt")
        predicted = load_both("regression").reference(**batch).logits[:, 0].numpy()
    gold = np.array([example.score for example in examples])
    metrics = task().compute_metrics(measure)
    assert metrics["pearson"] == pytest.approx(scipy.stats.pearsonr(predicted, gold)[0], abs=1e-6)
    assert metrics["spearman"] == pytest.approx(scipy.stats.spearmanr(predicted, gold)[0], abs=1e-6)
    assert metrics["mse"] == pytest.approx(((predicted - gold) ** 2).mean(), abs=1e-5)
    assert metrics[task().metric] == metrics["pearson"]
    judged = [
        task().score_answer(example, answer) for example, answer in zip(examples, answers(predicted), strict=True)
    ]
    assert [scored.loss for scored in judged] == pytest.approx(np.abs(predicted - gold).tolist())
    assert {scored.correct for scored in judged} == {None}


# -- how sure? ----------------------------------------------------------------------------------------------------


def noisy(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Numbers that agree in part."""
    draw = np.random.default_rng(seed)
    gold = draw.normal(size=count)
    return 0.8 * gold + 0.6 * draw.normal(size=count), gold


def ends(predicted: Any, gold: Any) -> tuple[float, float]:
    """Of the interval."""
    interval = measured(predicted, gold).intervals()["pearson"]
    return interval["low"], interval["high"]


@pytest.mark.parametrize("count", [50, 400])
def test_the_interval_is_that_of_a_bootstrap(count: int) -> None:
    predicted, gold = noisy(count)
    draw = np.random.default_rng(1)
    picks = draw.integers(0, count, (2000, count))
    plain = np.quantile([np.corrcoef(predicted[pick], gold[pick])[0, 1] for pick in picks], [0.025, 0.975])
    assert ends(predicted, gold) == pytest.approx(plain.tolist(), abs=0.3 / count**0.5)


@pytest.mark.parametrize(("scale", "shift"), [(1e6, 3e7), (-250_000.0, 0.0), (1e-9, 1.0), (1e200, 0.0)])
def test_the_interval_does_not_depend_on_the_unit(scale: float, shift: float) -> None:
    """Prices have squares that sums of a bootstrap have no room for."""
    predicted, gold = noisy(200)
    low, high = ends(predicted, gold)
    interval_ends = ends(scale * predicted + shift, scale * gold + shift)
    assert interval_ends == pytest.approx((low, high), abs=1e-5)


def test_one_number_that_is_far_off_is_borne() -> None:
    predicted, gold = noisy(3000)
    low, high = ends(np.append(predicted, 1e12), np.append(gold, 0.0))
    assert -0.1 < low <= high < 1
    assert ends(np.append(predicted, 0.5), np.append(gold, 0.5)) == pytest.approx(ends(predicted, gold), abs=1e-2)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert ends([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == (0.0, 0.0)
    assert ends([0.1] * 5, [0.3] * 5) == (0.0, 0.0)
    assert ends([5.0], [3.0]) == (0.0, 0.0)
    low, high = ends([1.0, 2.0], [3.0, 4.0])  # replicates with one of the two do not vary
    assert (low, high) == (0.0, 1.0)


def test_what_rounding_leaves_is_no_variance() -> None:
    """A replicate that has one example several times; sums are whole multiples of 2^-30."""
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    one = np.rint(np.stack([np.ones(20), x, y, x * x, y * y, x * y], 1) * 2**30) / 2**30
    for times in range(1, 9):
        assert pearson_of(times * one).tolist() == [0.0] * 20
    two = pearson_of(one + np.ones(6))  # (x, y) and (1, 1): on a line, up or down
    assert two == pytest.approx(np.sign((x - 1) * (y - 1)))


def test_one_of_very_many_may_be_far_off() -> None:
    """z² of it would be about their number, for which a bootstrap's sums have no room."""
    many = np.append(np.arange(1_000_000) % 7, 1e15)
    assert np.abs(standardize(many)).max() == pytest.approx(MAX_DEVIATIONS)
    assert np.abs(standardize(many[:-1])).max() < 3


def test_correlations_of_sums() -> None:
    draw = np.random.default_rng(4)
    x, y = draw.normal(size=(2, 30))
    weights = draw.poisson(1, (50, 30)).astype(np.float64)
    sums = weights @ np.stack([np.ones(30), x, y, x * x, y * y, x * y], 1)
    for row_weights, correlation in zip(weights, pearson_of(sums), strict=True):
        repeated = np.repeat(np.arange(30), row_weights.astype(int))
        assert correlation == pytest.approx(np.corrcoef(x[repeated], y[repeated])[0, 1], abs=1e-9)
    assert pearson_of(np.zeros((1, 6))).tolist() == [0.0]


numbers = st.lists(st.tuples(st.floats(-1e300, 1e300), st.floats(-10, 10)), min_size=1, max_size=12)


@given(numbers, st.randoms(use_true_random=False))
def test_merging_is_exact_in_any_order(pairs: list[tuple[float, float]], random: Any) -> None:
    rows, ids = np.array(pairs), list(range(len(pairs)))
    whole = PearsonBootstrap().update(ids, rows)
    random.shuffle(ids)
    merged = PearsonBootstrap()
    for number in ids:
        one = PearsonBootstrap().update([number], rows[[number]])
        merged = one.merge_state(merged) if random.random() < 0.5 else merged.merge_state(one)
    bootstrap_interval = whole.interval()
    assert merged.interval() == bootstrap_interval
    assert -1 <= bootstrap_interval["low"] <= bootstrap_interval["high"] <= 1


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30))
def test_standard_numbers_have_room(values: list[float]) -> None:
    standardized = standardize(np.array(values))
    assert np.isfinite(standardized).all() and np.abs(standardized).max() <= 512.000001
    assert (standardized**2).mean() <= 1.000001
