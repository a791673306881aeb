"""Merging metrics: the result is exactly the same for any order of examples, batches and ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.tasks.metrics import (
    Accuracy,
    Bootstrap,
    Calibration,
    ConfusionMatrix,
    Coverage,
    EntityScores,
    MultiLabelScores,
    RankedRegressionScores,
    RegressionScores,
    SquadScore,
    SquadThreshold,
    TextScore,
    TokenLoss,
    merge_all,
)

COUNT = 40
RNG = np.random.default_rng(5)
CLASSES = RNG.integers(0, 3, (COUNT, 2))
LABEL_ROWS = RNG.integers(0, 2, (COUNT, 2, 3))
NUMBERS = RNG.normal(size=(COUNT, 2)) * 10.0 ** RNG.integers(-9, 9, (COUNT, 2))
NUMBERS[::4] = np.round(NUMBERS[::4])  # so that some numbers are equal
PROBABILITIES = RNG.random((COUNT, 2))
TAGS = [
    [RNG.choice(["O", "B-x", "I-x", "B-y", "I-y"], size=n).tolist() for _ in range(2)]
    for n in RNG.integers(0, 7, COUNT)
]
WORDS = [" ".join(RNG.choice(["the", "cat", "sat", "x."], size=n)) for n in RNG.integers(0, 4, 2 * COUNT)]
GOLDS = [[WORDS[i], WORDS[i + 1]] if i % 3 else [] for i in range(COUNT)]
NULLS = RNG.integers(-5, 5, COUNT) / 4  # scores of no answer, many of them equal


def squad(metric: Any, indices: Sequence[int], *null_scores: Any) -> Any:
    return metric.update(
        {f"q{i}": WORDS[i + 5] for i in indices if i % 7}, {f"q{i}": GOLDS[i] for i in indices}, *null_scores
    )


METRICS: dict[str, tuple[Any, Callable[[Any, list[int]], Any]]] = {
    "accuracy": (Accuracy(), lambda metric, part: metric.update(CLASSES[part, 0], CLASSES[part, 1])),
    "confusion": (
        ConfusionMatrix(labels=("a", "b", "c"), positive="b"),
        lambda metric, part: metric.update(CLASSES[part, 0], CLASSES[part, 1]),
    ),
    "labels": (
        MultiLabelScores(labels=("a", "b", "c")),
        lambda metric, part: metric.update(LABEL_ROWS[part, 0], LABEL_ROWS[part, 1]),
    ),
    "regression": (RegressionScores(), lambda metric, part: metric.update(NUMBERS[part, 0], NUMBERS[part, 1])),
    "ranked": (RankedRegressionScores(), lambda metric, part: metric.update(NUMBERS[part, 0], NUMBERS[part, 1])),
    "loss": (TokenLoss(), lambda metric, part: metric.update(NUMBERS[part, 0], CLASSES[part, 0])),
    "calibration": (
        Calibration(bins=5),
        lambda metric, part: metric.update(PROBABILITIES[part, 0], CLASSES[part, 0] > 0),
    ),
    "coverage": (Coverage(), lambda metric, part: metric.update(PROBABILITIES[part, 0], CLASSES[part, 0] > 0)),
    "entities": (
        EntityScores(scheme="conlleval"),
        lambda metric, part: metric.update([TAGS[i][0] for i in part], [TAGS[i][1] for i in part]),
    ),
    "squad": (SquadScore(version="2.0"), squad),
    "texts": (TextScore(), lambda metric, part: metric.update([WORDS[i] for i in part], [WORDS[i + 5] for i in part])),
    "threshold": (SquadThreshold(), lambda metric, part: squad(metric, part, {f"q{i}": NULLS[i] for i in part})),
    "bootstrap": (
        Bootstrap(seed=3, statistics=2, replicates=50),
        lambda metric, part: metric.update([f"e{i}" for i in part], PROBABILITIES[part]),
    ),
}


def result_of(metric: Any) -> dict[str, Any]:
    """The metrics of a metric, or the interval of a bootstrap."""
    return metric.interval() if isinstance(metric, Bootstrap) else metric.compute()


@cache
def result_of_all(name: str) -> dict[str, Any]:
    """The result after one update with all examples."""
    empty, update = METRICS[name]
    return result_of(update(empty, list(range(COUNT))))


@pytest.mark.parametrize("name", METRICS)
@given(data=st.data())
def test_merged_metrics_equal_those_of_all_examples(name: str, data: st.DataObject) -> None:
    empty, update = METRICS[name]
    order = data.draw(st.permutations(range(COUNT)))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, COUNT), max_size=4))), COUNT]
    ranks = []
    for start, stop in pairwise(cuts):  # some ranks may have no examples
        metric = empty
        batch_size = data.draw(st.integers(1, 9))
        for batch_start in range(start, stop, batch_size):
            metric = update(metric, list(order[batch_start : min(batch_start + batch_size, stop)]))
        ranks.append(pickle.loads(pickle.dumps(metric)))  # ranks send their metrics in pickles
    ranks = data.draw(st.permutations(ranks))
    assert result_of(merge_all(ranks)) == result_of_all(name)
    if len(ranks) > 2:
        left = ranks[0].merge_state(ranks[1]).merge_state(ranks[2])
        right = ranks[0].merge_state(ranks[1].merge_state(ranks[2]))
        other = ranks[2].merge_state(ranks[0]).merge_state(ranks[1])
        if type(left).__eq__ is not object.__eq__:
            assert left == right == other


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_no_examples(name: str) -> None:
    empty, update = METRICS[name]
    for metric in (empty, update(empty, []), empty.merge_state(empty)):
        with pytest.raises(HeedfulError, match="of no examples is not defined: the data set is empty"):
            result_of(metric)
    whole = update(empty, list(range(COUNT)))
    assert result_of(empty.merge_state(whole)) == result_of(whole.merge_state(empty)) == result_of(update(whole, []))


@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"threshold", "ranked"}))
def test_memory_does_not_grow(name: str) -> None:
    empty, update = METRICS[name]
    metric = update(empty, list(range(COUNT)))
    size = len(pickle.dumps(metric))
    for _ in range(7):
        metric = metric.merge_state(metric)  # in the end, a metric of 5,120 examples
    assert len(pickle.dumps(metric)) < 1.2 * size + 100


@pytest.mark.parametrize("name", ["threshold", "ranked"])
def test_memory_that_must_grow_is_kept_in_few_arrays(name: str) -> None:
    empty, update = METRICS[name]
    metric = empty
    for repeat in range(25):
        for i in range(COUNT):
            metric = update(metric, [i])
        parts = (metric.questions if name == "threshold" else metric.store).parts
        assert sum(map(len, parts)) == (repeat + 1) * COUNT and len(parts) <= 10
    bytes_per_example = sum(part.nbytes for part in parts) / (25 * COUNT)
    assert bytes_per_example == {"threshold": 24, "ranked": 16}[name]  # as its docstring says


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            ConfusionMatrix(labels=("a", "b")),
            ConfusionMatrix(labels=("b", "a")),
            r"cannot be merged, their labels differ: \(\('a', 'b'\), None\)",
        ),
        (MultiLabelScores(labels=("a",)), MultiLabelScores(labels=("b",)), "their labels differ"),
        (Calibration(), Calibration(bins=10), "their numbers of bins differ: 15 and 10"),
        (
            EntityScores(scheme="conlleval"),
            EntityScores(scheme="strict-iob2"),
            "their schemes differ: 'conlleval' and 'strict",
        ),
        (SquadScore(version="1.1"), SquadScore(version="2.0"), "their versions differ: '1.1' and '2.0'"),
        (Bootstrap(seed=1, statistics=2), Bootstrap(seed=2, statistics=2), "their seeds, statistics or replicates"),
    ],
)
def test_metrics_with_different_settings_cannot_be_merged(one: Any, other: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        one.merge_state(other)
