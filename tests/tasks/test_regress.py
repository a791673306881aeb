"""Regress: losses and gradients equal transformers, correlations equal scipy, and confidence intervals of Pearson."""

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


def task(**changes: Any) -> Regress:
    """A task for the tiny model."""
    return Regress(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": ("stars",)} | changes)


def engine_answers(predicted: Any) -> list[dict[str, Any]]:
    """The engine's answers with these predicted numbers."""
    return [{"values": {"stars": float(number)}} for number in predicted]


def measure_of(predicted: Any, gold: Any) -> Any:
    """The metrics of these predictions and gold scores, as `evaluate_task` returns them."""
    examples = [ScoredExample(text="x", score=float(score)) for score in gold]
    return task().update_metrics(task().new_metrics(), examples, engine_answers(predicted), range(len(examples)))


def test_loss_and_gradient() -> None:
    pair = load_both("regression")
    encodings = [
        pair.tokenizer([example.text], None if example.text_pair is None else [example.text_pair])
        for example in EXAMPLES
    ]
    rows = [{name: column[0] for name, column in encoding.items()} for encoding in encodings]
    batch = pair.tokenizer.pad(rows, return_tensors="pt")
    targets = torch.tensor([example.score for example in EXAMPLES], dtype=torch.float64)
    expected = pair.reference(**batch, labels=targets).loss
    for parts in (1, 3):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert (loss.count, float(loss.sum) / 3) == (3, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 3)


def test_the_unit_of_scores_does_not_matter() -> None:
    """The model learns (score - mean) / deviation, and its weights are rescaled for inference to give scores."""
    model, unit = load_both("regression").model, {"mean": 50.0, "deviation": 20.0}
    other_unit = [replace(example, score=20 * example.score + 50) for example in EXAMPLES]
    loss = backward_all(task(), model, EXAMPLES)
    loss_in_other_unit = backward_all(task(**unit), model, other_unit)
    assert float(loss_in_other_unit.sum) == pytest.approx(float(loss.sum), abs=1e-12)
    assert task().for_inference(model) is model
    assert task().for_training(model) is model

    def predictions(loaded: Any) -> list[float]:
        return [answer["values"]["stars"] for answer in Engine(loaded)([example.text for example in EXAMPLES])]

    rescaled = task(**unit).for_inference(model)
    expected = [20 * number + 50 for number in predictions(model)]
    assert predictions(rescaled) == pytest.approx(expected, abs=1e-9)
    restored = task(**unit).for_training(rescaled).named_tensors()
    for name, tensor in model.named_tensors().items():
        assert (restored[name] - tensor).abs().max() <= 1e-12, name
        is_shared = restored[name] is tensor
        assert is_shared == (not name.startswith("head.out.")), name


def test_windows_of_a_long_text_have_its_score() -> None:
    samples = task(limit=SHORT).encode_split([ScoredExample(text=long_text(60), score=2.0)]).samples
    assert len(samples) > 3
    assert {(sample.target, sample.weight) for sample in samples} == {(2.0, 1 / len(samples))}


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
    scored_answers = [
        task().score_answer(example, answer)
        for example, answer in zip(examples, engine_answers(predicted), strict=True)
    ]
    assert [scored.loss for scored in scored_answers] == pytest.approx(np.abs(predicted - gold).tolist())
    assert {scored.correct for scored in scored_answers} == {None}


# -- confidence intervals -----------------------------------------------------------------------------------------


def correlated_numbers(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Predictions and gold scores with a correlation of about 0.8."""
    rng = np.random.default_rng(seed)
    gold = rng.normal(size=count)
    return 0.8 * gold + 0.6 * rng.normal(size=count), gold


def interval_ends(predicted: Any, gold: Any) -> tuple[float, float]:
    """The low and the high end of the interval of Pearson's correlation."""
    interval = measure_of(predicted, gold).intervals()["pearson"]
    return interval["low"], interval["high"]


@pytest.mark.parametrize("count", [50, 400])
def test_the_interval_is_that_of_a_plain_bootstrap(count: int) -> None:
    predicted, gold = correlated_numbers(count)
    rng = np.random.default_rng(1)
    resamples = rng.integers(0, count, (2000, count))  # indices of examples
    correlations = [np.corrcoef(predicted[indices], gold[indices])[0, 1] for indices in resamples]
    expected = np.quantile(correlations, [0.025, 0.975]).tolist()
    assert interval_ends(predicted, gold) == pytest.approx(expected, abs=0.3 / count**0.5)


@pytest.mark.parametrize(("scale", "shift"), [(1e6, 3e7), (-250_000.0, 0.0), (1e-9, 1.0), (1e200, 0.0)])
def test_the_interval_does_not_depend_on_the_unit(scale: float, shift: float) -> None:
    """The bootstrap adds squares in fixed-point numbers, where those of large scores would overflow."""
    predicted, gold = correlated_numbers(200)
    expected = interval_ends(predicted, gold)
    assert interval_ends(scale * predicted + shift, scale * gold + shift) == pytest.approx(expected, abs=1e-5)


def test_the_interval_with_one_outlier() -> None:
    predicted, gold = correlated_numbers(3000)
    low, high = interval_ends(np.append(predicted, 1e12), np.append(gold, 0.0))
    assert -0.1 < low <= high < 1
    assert interval_ends(np.append(predicted, 0.5), np.append(gold, 0.5)) == pytest.approx(
        interval_ends(predicted, gold), abs=1e-2
    )


def test_constant_numbers_have_no_correlation() -> None:
    assert interval_ends([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == (0.0, 0.0)
    assert interval_ends([0.1] * 5, [0.3] * 5) == (0.0, 0.0)
    assert interval_ends([5.0], [3.0]) == (0.0, 0.0)
    low, high = interval_ends([1.0, 2.0], [3.0, 4.0])  # a resample with one of the two examples is constant
    assert (low, high) == (0.0, 1.0)


def sums_of(x: Any, y: Any) -> Any:
    """The quantities that `pearson_of` takes the sums of, in a row for every example."""
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], 1)


def test_rounding_errors_are_not_taken_for_variance() -> None:
    """A resample with only one example has no variance, though its sums are rounded to multiples of 2^-30."""
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    sums_of_one = np.rint(sums_of(x, y) * 2**30) / 2**30  # a row for every example alone
    for times in range(1, 9):
        assert pearson_of(times * sums_of_one).tolist() == [0.0] * 20
    with_second_example = pearson_of(sums_of_one + np.ones(6))  # the sums of the example (1, 1) are ones
    assert with_second_example == pytest.approx(np.sign((x - 1) * (y - 1))), "two points lie on a line, up or down"


def test_standardize_limits_an_outlier_among_many_numbers() -> None:
    """The squared standard score of one outlier is about the number of examples, too large for the bootstrap's sums."""
    numbers_with_outlier = np.append(np.arange(1_000_000) % 7, 1e15)
    assert np.abs(standardize(numbers_with_outlier)).max() == pytest.approx(MAX_DEVIATIONS)
    assert np.abs(standardize(numbers_with_outlier[:-1])).max() < 3


def test_pearson_of() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(2, 30))
    weights = rng.poisson(1, (50, 30)).astype(np.float64)
    for counts, correlation in zip(weights, pearson_of(weights @ sums_of(x, y)), strict=True):
        resample = np.repeat(np.arange(30), counts.astype(int))
        assert correlation == pytest.approx(np.corrcoef(x[resample], y[resample])[0, 1], abs=1e-9)
    assert pearson_of(np.zeros((1, 6))).tolist() == [0.0]


numbers = st.lists(st.tuples(st.floats(-1e300, 1e300), st.floats(-10, 10)), min_size=1, max_size=12)


@given(numbers, st.randoms(use_true_random=False))
def test_merging_is_exact_in_any_order(pairs: list[tuple[float, float]], random: Any) -> None:
    rows, ids = np.array(pairs), list(range(len(pairs)))
    whole = PearsonBootstrap().update(ids, rows)
    random.shuffle(ids)
    merged = PearsonBootstrap()
    for id in ids:
        one = PearsonBootstrap().update([id], rows[[id]])
        merged = one.merge_state(merged) if random.random() < 0.5 else merged.merge_state(one)
    interval = whole.interval()
    assert merged.interval() == interval
    assert -1 <= interval["low"] <= interval["high"] <= 1


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30))
def test_standardized_numbers_are_limited(values: list[float]) -> None:
    standardized = standardize(np.array(values))
    assert np.isfinite(standardized).all()
    assert np.abs(standardized).max() <= 512.000001
    assert (standardized**2).mean() <= 1.000001
