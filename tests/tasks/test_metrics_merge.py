"""Whatever the order, the batches and the ranks: every metric gives the same result, to the last bit."""

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
RANDOM = np.random.default_rng(5)
CLASSES = RANDOM.integers(0, 3, (COUNT, 2))
ROWS = RANDOM.integers(0, 2, (COUNT, 2, 3))
NUMBERS = RANDOM.normal(size=(COUNT, 2)) * 10.0 ** RANDOM.integers(-9, 9, (COUNT, 2))
NUMBERS[::4] = np.round(NUMBERS[::4])  # some are equal
SHARES = RANDOM.random((COUNT, 2))
TAGS = [
    [RANDOM.choice(["O", "B-x", "I-x", "B-y", "I-y"], size=n).tolist() for _ in range(2)]
    for n in RANDOM.integers(0, 7, COUNT)
]
WORDS = [" ".join(RANDOM.choice(["the", "cat", "sat", "x."], size=n)) for n in RANDOM.integers(0, 4, 2 * COUNT)]
GOLDS = [[WORDS[i], WORDS[i + 1]] if i % 3 else [] for i in range(COUNT)]
NULLS = RANDOM.integers(-5, 5, COUNT) / 4  # with many ties


def squad(seen: Any, part: Sequence[int], *more: Any) -> Any:
    return seen.update({f"q{i}": WORDS[i + 5] for i in part if i % 7}, {f"q{i}": GOLDS[i] for i in part}, *more)


METRICS: dict[str, tuple[Any, Callable[[Any, list[int]], Any]]] = {
    "accuracy": (Accuracy(), lambda seen, part: seen.update(CLASSES[part, 0], CLASSES[part, 1])),
    "confusion": (
        ConfusionMatrix(labels=("a", "b", "c"), positive="b"),
        lambda seen, part: seen.update(CLASSES[part, 0], CLASSES[part, 1]),
    ),
    "labels": (
        MultiLabelScores(labels=("a", "b", "c")),
        lambda seen, part: seen.update(ROWS[part, 0], ROWS[part, 1]),
    ),
    "regression": (RegressionScores(), lambda seen, part: seen.update(NUMBERS[part, 0], NUMBERS[part, 1])),
    "ranked": (RankedRegressionScores(), lambda seen, part: seen.update(NUMBERS[part, 0], NUMBERS[part, 1])),
    "loss": (TokenLoss(), lambda seen, part: seen.update(NUMBERS[part, 0], CLASSES[part, 0])),
    "calibration": (Calibration(bins=5), lambda seen, part: seen.update(SHARES[part, 0], CLASSES[part, 0] > 0)),
    "coverage": (Coverage(), lambda seen, part: seen.update(SHARES[part, 0], CLASSES[part, 0] > 0)),
    "entities": (
        EntityScores(scheme="conlleval"),
        lambda seen, part: seen.update([TAGS[i][0] for i in part], [TAGS[i][1] for i in part]),
    ),
    "squad": (SquadScore(version="2.0"), squad),
    "texts": (TextScore(), lambda seen, part: seen.update([WORDS[i] for i in part], [WORDS[i + 5] for i in part])),
    "threshold": (SquadThreshold(), lambda seen, part: squad(seen, part, {f"q{i}": NULLS[i] for i in part})),
    "bootstrap": (
        Bootstrap(seed=3, statistics=2, replicates=50),
        lambda seen, part: seen.update([f"e{i}" for i in part], SHARES[part]),
    ),
}


def read(metric: Any) -> dict[str, Any]:
    """The result, and the state where equality is defined."""
    return metric.interval() if isinstance(metric, Bootstrap) else metric.compute()


@cache
def of_all(name: str) -> dict[str, Any]:
    """The result of all examples at once."""
    empty, update = METRICS[name]
    return read(update(empty, list(range(COUNT))))


@pytest.mark.parametrize("name", METRICS)
@given(data=st.data())
def test_any_partition_and_order_equals_the_whole(name: str, data: st.DataObject) -> None:
    empty, update = METRICS[name]
    order = data.draw(st.permutations(range(COUNT)))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, COUNT), max_size=4))), COUNT]
    ranks = []
    for start, stop in pairwise(cuts):  # some ranks are empty
        seen = empty
        size = data.draw(st.integers(1, 9))
        for at in range(start, stop, size):
            seen = update(seen, list(order[at : min(at + size, stop)]))
        ranks.append(pickle.loads(pickle.dumps(seen)))  # as ranks send them
    ranks = data.draw(st.permutations(ranks))
    assert read(merge_all(ranks)) == of_all(name)
    if len(ranks) > 2:
        left = ranks[0].merge_state(ranks[1]).merge_state(ranks[2])
        right = ranks[0].merge_state(ranks[1].merge_state(ranks[2]))
        other = ranks[2].merge_state(ranks[0]).merge_state(ranks[1])
        if type(left).__eq__ is not object.__eq__:
            assert left == right == other


@pytest.mark.parametrize("name", METRICS)
def test_nothing_seen(name: str) -> None:
    empty, update = METRICS[name]
    for nothing in (empty, update(empty, []), empty.merge_state(empty)):
        with pytest.raises(HeedfulError, match="of no examples is not defined: the data set is empty"):
            read(nothing)
    whole = update(empty, list(range(COUNT)))
    assert read(empty.merge_state(whole)) == read(whole.merge_state(empty)) == read(update(whole, []))


@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"threshold", "ranked"}))
def test_memory_does_not_grow(name: str) -> None:
    empty, update = METRICS[name]
    seen = update(empty, list(range(COUNT)))
    size = len(pickle.dumps(seen))
    for _ in range(7):
        seen = seen.merge_state(seen)  # 5,120 examples
    assert len(pickle.dumps(seen)) < 1.2 * size + 100


@pytest.mark.parametrize("name", ["threshold", "ranked"])
def test_memory_that_must_grow_is_kept_in_few_arrays(name: str) -> None:
    empty, update = METRICS[name]
    seen = empty
    for repeat in range(25):
        for i in range(COUNT):
            seen = update(seen, [i])
        parts = (seen.questions if name == "threshold" else seen.store).parts
        assert sum(map(len, parts)) == (repeat + 1) * COUNT and len(parts) <= 10
    bytes_each = sum(part.nbytes for part in parts) / (25 * COUNT)
    assert bytes_each == {"threshold": 24, "ranked": 16}[name]  # as documented


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
def test_only_equal_kinds_are_merged(one: Any, other: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        one.merge_state(other)
