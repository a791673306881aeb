"""Metrics of classes and labels: equal to those of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from heedful.errors import HeedfulError
from heedful.tasks.metrics import GLUE, Accuracy, ConfusionMatrix, MultiLabelScores, macro_f1, matthews

NAMES = ("red", "green", "blue", "grey")


def examples(seed: int, classes: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and gold classes that agree in more than half of the examples."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, classes, count)
    return np.where(rng.random(count) < 0.6, gold, rng.integers(0, classes, count)), gold


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("classes", "count"), [(2, 60), (4, 60), (4, 3)])
def test_confusion_matrix(seed: int, classes: int, count: int) -> None:
    predicted, gold = examples(seed, classes, count)
    metrics = ConfusionMatrix(labels=NAMES[:classes], positive="green").update(predicted, gold).compute()
    classes_in_order = list(range(classes))
    assert metrics["confusion"] == sklearn_metrics.confusion_matrix(gold, predicted, labels=classes_in_order).tolist()
    assert metrics["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(gold, predicted))
    if len({*gold, *predicted}) > 1:
        assert metrics["matthews"] == pytest.approx(sklearn_metrics.matthews_corrcoef(gold, predicted), abs=1e-12)
    for average in ("micro", "macro", "weighted"):
        for name, function in (
            ("f1", sklearn_metrics.f1_score),
            ("precision", sklearn_metrics.precision_score),
            ("recall", sklearn_metrics.recall_score),
        ):
            if f"{average}_{name}" in metrics:
                expected = function(gold, predicted, average=average, zero_division=0)
                assert metrics[f"{average}_{name}"] == pytest.approx(expected), (average, name)
    scores_by_label = sklearn_metrics.precision_recall_fscore_support(
        gold, predicted, labels=classes_in_order, zero_division=0
    )
    for number, label in enumerate(NAMES[:classes]):
        assert list(metrics["classes"][label].values()) == pytest.approx([column[number] for column in scores_by_label])
    assert metrics["f1"] == metrics["classes"]["green"]["f1"]
    assert metrics["recall"] == metrics["classes"]["green"]["recall"]
    assert metrics["count"] == count


def test_scores_do_not_depend_on_the_order_of_class_names() -> None:
    predicted, gold = examples(0, 3)
    names = ("n", "e", "c")
    predicted_names, gold_names = ([names[number] for number in side] for side in (predicted, gold))
    metrics = ConfusionMatrix(labels=names).update(predicted_names, gold_names).compute()
    other_order = ConfusionMatrix(labels=("c", "n", "e")).update(predicted_names, gold_names).compute()
    for name in ("accuracy", "matthews", "macro_f1"):
        assert metrics[name] == pytest.approx(other_order[name])
    assert metrics["classes"] == other_order["classes"]
    by_number = ConfusionMatrix(labels=names).update(torch.tensor(predicted), gold.tolist()).compute()
    assert metrics == by_number


def test_constant_predictions() -> None:
    metrics = ConfusionMatrix(labels=("no", "yes"), positive="yes").update(["no"] * 3, ["no", "yes", "no"]).compute()
    assert (metrics["matthews"], metrics["f1"], metrics["precision"]) == (0, 0, 0)
    assert metrics["notes"] == ['every prediction is "no": Matthews is 0 by convention']
    one = ConfusionMatrix(labels=("a", "b", "c")).update([0], [0]).compute()
    assert (one["accuracy"], one["macro_f1"], one["matthews"]) == (1, 1, 0)
    assert one["notes"][-1] == "not in the macro averages, because they never occur: b, c"
    assert len(one["notes"]) == 3


def test_large_counts_do_not_overflow() -> None:
    large = ConfusionMatrix(labels=("a", "b"), cells={(0, 0): 10**9, (0, 1): 10**8, (1, 0): 10**7, (1, 1): 10**9})
    small = ConfusionMatrix(labels=("a", "b"), cells={(0, 0): 100, (0, 1): 10, (1, 0): 1, (1, 1): 100})
    assert large.compute()["matthews"] == pytest.approx(small.compute()["matthews"])


def test_formulas_take_stacks_of_matrices() -> None:
    stack = np.random.default_rng(0).integers(0, 9, (5, 3, 3))
    assert macro_f1(stack).tolist() == [macro_f1(one) for one in stack]
    assert matthews(stack).tolist() == [matthews(one) for one in stack]


@pytest.mark.parametrize(
    ("predicted", "gold", "message"),
    [
        (
            [0, 3],
            [0, 1],
            r"the prediction of example at index 1 .* is 3, but the classes are .* 0 to 2 \(a, b, c\)",
        ),
        (
            [0, 1],
            [0, -100],
            "the gold label of example at index 1 .* is -100, .* leave out what should not count",
        ),
        (
            ["a", "d"],
            ["a", "b"],
            "the prediction of example at index 1 .* is 'd', which is none of .* a, b, c",
        ),
        (
            [0.0, np.nan],
            [0, 1],
            "the prediction of example at index 1 .* is nan: a metric over it would mean",
        ),
        (
            [0.0, 0.5],
            [0, 1],
            "the prediction of example at index 1 .* is 0.5, but the classes are the numbers 0 to 2",
        ),
        ([[0.1, 0.9]], [0], r"each prediction should be one class, got .* \(1, 2\): .* scores.argmax\(-1\)"),
        ([0], [0, 1], "there are 1 predictions for 2 gold labels: each example needs one of each"),
    ],
)
def test_bad_input_of_a_confusion_matrix(predicted: Any, gold: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        ConfusionMatrix(labels=("a", "b", "c")).update(predicted, gold)


def test_bad_settings_and_ids() -> None:
    with pytest.raises(HeedfulError, match=r'should be one of \[.*\], got "Yes" \(did you mean "yes"\?\)'):
        ConfusionMatrix(labels=("no", "yes"), positive="Yes")
    with pytest.raises(HeedfulError, match=r"two or more different names, got \['a', 'a'\]"):
        ConfusionMatrix(labels=("a", "a"))
    with pytest.raises(HeedfulError, match=r'the prediction of example "q7" is .*did you mean "green"'):
        ConfusionMatrix(labels=NAMES).update(["gren"], ["red"], ids=["q7"])
    with pytest.raises(HeedfulError, match="a prediction is 1 and a gold label 'yes': they can never be equal"):
        Accuracy().update([1], ["yes"])
    with pytest.raises(HeedfulError, match=r"each prediction should be one label, got an array of shape \(1, 1\)"):
        Accuracy().update([[1]], [1])
    with pytest.raises(HeedfulError, match='the prediction of example "b" is nan'):
        Accuracy().update([1.0, np.nan], [1, 1], ids=["a", "b"])


def test_accuracy() -> None:
    predicted, gold = examples(1, 5)
    assert Accuracy().update(predicted, gold).compute()["accuracy"] == sklearn_metrics.accuracy_score(gold, predicted)


@pytest.mark.parametrize("seed", range(20))
def test_several_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, (30, 4)) * [1, 1, 1, seed % 2]
    predicted = np.where(rng.random((30, 4)) < 0.7, gold, rng.integers(0, 2, (30, 4)) * [1, 1, 0, 0])
    metrics = MultiLabelScores(labels=NAMES).update(predicted > 0, torch.tensor(gold)).compute()
    for average in ("micro", "macro"):
        expected = sklearn_metrics.precision_recall_fscore_support(gold, predicted, average=average, zero_division=0)
        assert [metrics[f"{average}_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(expected[:3])
    assert metrics["subset_accuracy"] == sklearn_metrics.accuracy_score(gold, predicted)
    never = "these labels never occur and count 0 in the macro averages: grey"
    assert metrics["notes"] == ([] if seed % 2 else [never])


def test_bad_input_of_multiple_labels() -> None:
    metric = MultiLabelScores(labels=("a", "b"))
    with pytest.raises(HeedfulError, match=r"example at index 1 .* has 0\.7"):
        metric.update([[0, 1], [0.7, 1]], [[0, 1], [0, 1]])
    with pytest.raises(HeedfulError, match=r"a row of 0 or 1 for the 2 labels, got an array of shape \(1, 3\)"):
        metric.update([[0, 1, 1]], [[0, 1]])
    with pytest.raises(HeedfulError, match=r"the prediction of example at index 1 .* is nan"):
        metric.update([[0, 1], [0, np.nan]], [[0, 1], [0, 1]])
    with pytest.raises(HeedfulError, match="the examples have different numbers of values"):
        metric.update([[0, 1], [0]], [[0, 1], [0, 1]])


def test_choices() -> None:
    rng = np.random.default_rng(0)
    scores, gold = rng.normal(size=(50, 4)), rng.integers(0, 4, 50)
    expected = sklearn_metrics.top_k_accuracy_score(gold, scores, k=1, labels=range(4))
    assert Accuracy().update_choices(scores, gold).compute()["accuracy"] == pytest.approx(expected)
    metric = Accuracy().update_choices([torch.tensor([1.0, 1.0]), [0.0, 1.0, 2.0]], [0, 2])  # the first among equals
    assert metric == Accuracy(correct=2, count=2)
    with pytest.raises(HeedfulError, match='the gold choice of example "r" is 2, but it has 2 choices, counted from 0'):
        metric.update_choices([[1.0, 2.0]], [2], ids=["r"])
    with pytest.raises(HeedfulError, match=r"the score of example at index 0 .* is nan"):
        metric.update_choices([[1.0, np.nan]], [0])
    with pytest.raises(HeedfulError, match="1 questions with scores for 2 gold choices"):
        metric.update_choices([[1.0, 2.0]], [0, 1])


def test_the_metrics_of_glue() -> None:
    official = {name: suite.official for name, suite in GLUE.items()}
    accuracy, two = ("accuracy",), ("accuracy", "f1")
    assert official == {
        **{"cola": ("matthews",), "sst2": accuracy, "mrpc": two, "qqp": two, "stsb": ("pearson", "spearman")},
        **{"mnli": accuracy, "mnli-mm": accuracy, "qnli": accuracy, "rte": accuracy, "wnli": accuracy},
    }
    predicted, gold = (side.astype(str) for side in examples(2, 2))
    suite = GLUE["mrpc"]
    metrics = suite.scores(suite.metric.update(predicted, gold).compute())
    assert metrics["f1"] == pytest.approx(sklearn_metrics.f1_score(gold, predicted, pos_label="1"))
    assert metrics["score"] == pytest.approx((metrics["accuracy"] + metrics["f1"]) / 2)
    for suite in GLUE.values():
        if isinstance(suite.metric, ConfusionMatrix):
            labels = suite.metric.labels
            assert set(suite.scores(suite.metric.update(labels, labels).compute()).values()) == {1.0}
        else:
            assert suite.scores(suite.metric.update([1, 2, 4], [1, 2, 4]).compute())["score"] == 1.0
