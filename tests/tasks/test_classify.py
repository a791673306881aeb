"""Classify and ClassifyMultiLabel: samples, losses and gradients equal transformers, metrics equal sklearn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch.nn import functional as F

from heedful.data import LabelledExample, MultiLabelExample
from heedful.infer.engine import Engine
from heedful.tasks.classify import MAX_BOOTSTRAP_SUMS, Classify, ClassifyMultiLabel
from heedful.tasks.task import evaluate_task
from tests.support.model_folders import LIMIT, long_text
from tests.support.task_parity import SHORT, assert_same_gradients, backward_all, load_both, sequence_text, tokenizer

LABELS = ("bad", "fair", "good")
TEXTS = [
    LabelledExample(text="the cat sat on the mat .", label="good"),
    LabelledExample(text="who ran ?", label="bad"),
    LabelledExample(text="she lives in paris", text_pair="where", label="good"),
    LabelledExample(text="", label="fair"),
    LabelledExample(text="ada wrote it", text_pair="", label="bad"),
]
SETS = [
    MultiLabelExample(text=text.text, text_pair=text.text_pair, labels=labels)
    for text, labels in zip(TEXTS, [("bad", "good"), (), ("good",), ("bad", "fair", "good"), ("fair",)], strict=True)
]
LONG = LabelledExample(text=long_text(50), label="fair")
LONG_PAIR = LabelledExample(text="who lives here ?", text_pair=long_text(50), label="bad")


def task(**changes: Any) -> Classify:
    """A task for the tiny models of the tests."""
    return Classify(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": LABELS} | changes)


def multi_label_task(**changes: Any) -> ClassifyMultiLabel:
    """A task for the tiny models, in which a text may have any number of labels."""
    return ClassifyMultiLabel(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": LABELS} | changes)


def transformers_inputs(examples: list[Any]) -> dict[str, torch.Tensor]:
    """A padded batch made by transformers.

    The texts are passed in lists, since transformers ignores an empty second text that is not in a list.
    """
    backend = load_both("single").tokenizer
    encodings = [
        backend([example.text], None if example.text_pair is None else [example.text_pair]) for example in examples
    ]
    rows = [{name: column[0] for name, column in encoding.items()} for encoding in encodings]
    return dict(backend.pad(rows, return_tensors="pt"))


# -- samples ------------------------------------------------------------------------------------------------------


def test_samples_have_the_ids_of_transformers() -> None:
    encoded = task().encode_split(TEXTS)
    assert [sample.target for sample in encoded.samples] == [2, 0, 2, 1, 0]
    assert [sample.weight for sample in encoded.samples] == [1.0] * 5
    expected = transformers_inputs(TEXTS)
    for row, sample in enumerate(encoded.samples):
        length = int(expected["attention_mask"][row].sum())
        assert sample.bounds == (0, length)
        assert sample.tokens.tolist() == expected["input_ids"][row, :length].tolist()
        assert sample.types.tolist() == expected["token_type_ids"][row, :length].tolist()
    assert sequence_text(encoded.samples[2]) == "[CLS] she lives in paris [SEP] where [SEP]"
    assert encoded.samples[2].types.tolist() == [0] * 6 + [1] * 2  # the first [SEP] included
    assert (encoded.examples, encoded.tokens) == (5, sum(map(len, encoded.samples)))
    assert (encoded.windowed, encoded.truncated, encoded.truncated_tokens, encoded.skipped) == (0, 0, 0, 0)
    assert encoded.remarks == {"have an empty text": 2}, "an empty second text counts too"
    targets = [sample.target for sample in multi_label_task().encode_split(SETS).samples]
    assert targets[:3] == [[1, 0, 1], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("example", [LONG, LONG_PAIR])
def test_windows_of_a_long_text_have_a_total_weight_of_one(example: LabelledExample) -> None:
    task_with_windows = task(limit=SHORT)
    encoded = task_with_windows.encode_split([example, TEXTS[0]])
    *windows, short_sample = encoded.samples
    assert len(windows) >= 5
    assert encoded.windowed == 1 and encoded.examples == 2
    assert all(len(window) <= SHORT and window.target == LABELS.index(example.label) for window in windows)
    assert [window.weight for window in windows] == [1 / len(windows)] * len(windows)
    assert short_sample.weight == 1
    start = ["[CLS]", "who", "lives", "here", "?", "[SEP]"] if example.text_pair else ["[CLS]"]
    room = SHORT - len(start) - 1  # tokens of the long text in a window
    joined: list[str] = []  # the tokens of the long text, from all windows
    for window in windows:
        tokens = sequence_text(window).split()
        assert tokens[: len(start)] == start and tokens[-1] == "[SEP]"
        tokens_of_text = tokens[len(start) : -1]
        overlap = room - room // 2 if joined else 0
        assert joined[len(joined) - overlap :] == tokens_of_text[:overlap]
        joined += tokens_of_text[overlap:]
    assert joined == [tokenizer().name(id) for id in tokenizer().encode(example.texts[-1]).ids[1:-1]]


def test_long_inputs_can_be_truncated() -> None:
    encoded = task(limit=SHORT, long_inputs="truncate").encode_split([LONG, TEXTS[0], LONG_PAIR])
    assert [len(sample) for sample in encoded.samples] == [SHORT, 9, SHORT]
    assert [sample.weight for sample in encoded.samples] == [1.0] * 3
    assert (encoded.truncated, encoded.windowed) == (2, 0)
    assert LONG_PAIR.text_pair is not None
    length = len(tokenizer().encode(LONG.text))
    length_of_pair = len(tokenizer().encode((LONG_PAIR.text, LONG_PAIR.text_pair)))
    assert encoded.truncated_tokens == length + length_of_pair - 2 * SHORT
    unlimited = task(limit=None).encode_split([LONG])
    assert [len(sample) for sample in unlimited.samples] == [length]


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_of_one_label(dtype: torch.dtype, tolerance: float, parts: int) -> None:
    pair = load_both("single", dtype)
    targets = torch.tensor([LABELS.index(text.label) for text in TEXTS])
    expected = pair.reference(**transformers_inputs(TEXTS), labels=targets).loss
    loss = backward_all(task(), pair.model, TEXTS, parts)
    assert loss.count == len(TEXTS)
    assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count, tolerance)


def test_loss_and_gradient_of_many_labels() -> None:
    pair = load_both("multiple")
    targets = torch.tensor([sample.target for sample in multi_label_task().encode_split(SETS).samples])
    expected = pair.reference(**transformers_inputs(SETS), labels=targets.double()).loss
    loss = backward_all(multi_label_task(), pair.model, SETS)
    assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-12)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count)


def test_class_weights() -> None:
    pair, class_weights = load_both("single"), (0.25, 3.0, 1.5)
    logits = pair.reference(**transformers_inputs(TEXTS)).logits
    targets = torch.tensor([LABELS.index(text.label) for text in TEXTS])
    expected = F.cross_entropy(logits, targets, weight=torch.tensor(class_weights, dtype=torch.float64))
    for parts in (1, 2, 5):
        loss = backward_all(task(weights=class_weights), pair.model, TEXTS, parts)
        assert loss.count == 0.25 * 2 + 3 + 1.5 * 2, "the sum of the weights of the 5 examples"
        assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-12)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count)
    windows = task(weights=class_weights, limit=SHORT).encode_split([LONG]).samples
    assert [window.weight for window in windows] == [3.0 / len(windows)] * len(windows)


def test_class_weights_of_multiple_labels() -> None:
    pair, class_weights = load_both("multiple"), (0.5, 2.0, 7.0)
    logits = pair.reference(**transformers_inputs(SETS)).logits
    targets = torch.tensor(
        [sample.target for sample in multi_label_task().encode_split(SETS).samples], dtype=torch.float64
    )
    positive = torch.tensor(class_weights, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=positive)
    loss = backward_all(multi_label_task(weights=class_weights), pair.model, SETS, parts=2)
    assert (loss.count, float(loss.sum) / 5) == (5, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 5)


def test_the_loss_of_windows_counts_as_one_example() -> None:
    pair, task_with_windows = load_both("single"), task(limit=SHORT)
    examples = [LONG, TEXTS[0]]
    *windows, short_sample = task_with_windows.encode_split(examples).samples
    with torch.no_grad():
        *window_losses, short_loss = [
            float(-pair.model(task_with_windows.batch([sample], [0]).packed).log_softmax(-1)[0, sample.target])
            for sample in (*windows, short_sample)
        ]
    loss = backward_all(task_with_windows, pair.model, examples)
    assert loss.count == pytest.approx(2, abs=1e-6)
    assert float(loss.sum) == pytest.approx(sum(window_losses) / len(windows) + short_loss, abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------


def transformers_logits(name: str, examples: list[Any]) -> Any:
    """The logits of the model with this name in transformers."""
    with torch.no_grad():
        return load_both(name).reference(**transformers_inputs(examples)).logits


def test_an_evaluation_agrees_with_sklearn() -> None:
    examples = [
        *TEXTS,
        *(LabelledExample(text=f"the dog ran {word}", label=label) for word in "abcdefgh" for label in LABELS),
    ]
    probabilities = transformers_logits("single", examples).softmax(-1).numpy()
    gold = [LABELS.index(example.label) for example in examples]
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    measure = evaluate_task(task(), Engine(load_both("single").model), examples)
    metrics = task().compute_metrics(measure)
    assert metrics["accuracy"] == sklearn_metrics.accuracy_score(gold, predicted)
    assert metrics["confusion"] == sklearn_metrics.confusion_matrix(gold, predicted).tolist()
    assert metrics["loss"] == pytest.approx(sklearn_metrics.log_loss(gold, probabilities, labels=[0, 1, 2]), abs=1e-6)
    right = predicted == gold
    bins = np.minimum((confidence * 15 - 1e-12).astype(int), 14)
    expected_calibration_error = 0.0
    for bin_number in set(bins):
        in_bin = bins == bin_number
        expected_calibration_error += abs(right[in_bin].mean() - confidence[in_bin].mean()) * in_bin.mean()
    assert metrics["ece"] == pytest.approx(expected_calibration_error, abs=1e-6)
    intervals = measure.intervals()
    assert intervals.keys() == {"accuracy", "macro_f1"}
    for name, interval in intervals.items():
        assert 0 < interval["low"] < metrics[name] < interval["high"] < 1, name
        assert interval["count"] == len(examples), name
    assert metrics[task().metric] == metrics["accuracy"]


def metrics_of(classify_task: Classify, examples: list[Any], answers: list[Any]) -> dict[str, Any]:
    measure = classify_task.update_metrics(classify_task.new_metrics(), examples, answers, range(len(examples)))
    return classify_task.compute_metrics(measure)


def test_f1_of_two_labels_is_that_of_the_second() -> None:
    examples = [LabelledExample(text="", label=label) for label in ("yes", "no", "no", "yes")]
    answers = [answer_with(no=1 - p, yes=p) for p in (0.9, 0.8, 0.2, 0.7)]
    metrics = metrics_of(task(labels=("no", "yes")), examples, answers)
    assert (metrics["precision"], metrics["recall"], metrics["f1"]) == (2 / 3, 1.0, 0.8)
    assert metrics["loss"] == pytest.approx(-sum(map(math.log, (0.9, 0.2, 0.8, 0.7))) / 4)
    other_order = metrics_of(task(labels=("yes", "no")), examples, answers)  # answers are matched by label name
    assert (other_order["accuracy"], other_order["loss"]) == (metrics["accuracy"], metrics["loss"])


def test_f1_has_no_interval_with_too_many_labels() -> None:
    labels = tuple(map(str, range(math.isqrt(MAX_BOOTSTRAP_SUMS) + 1)))
    assert task(labels=labels).new_metrics().bootstraps.keys() == {"accuracy"}


def test_many_labels_agree_with_sklearn() -> None:
    model, thresholds = load_both("multiple").model, {"bad": 0.3, "good": 0.6}
    probabilities = transformers_logits("multiple", SETS).sigmoid().numpy()
    gold = np.array([sample.target for sample in multi_label_task().encode_split(SETS).samples]).astype(int)
    for chosen_thresholds in ({}, thresholds):
        model.thresholds = dict(chosen_thresholds)
        measure = evaluate_task(multi_label_task(), Engine(model), SETS)
        model.thresholds = {}
        predicted = (probabilities >= [chosen_thresholds.get(label, 0.5) for label in LABELS]).astype(int)
        metrics = multi_label_task().compute_metrics(measure)
        assert metrics["micro_f1"] == pytest.approx(sklearn_metrics.f1_score(gold, predicted, average="micro"))
        macro = sklearn_metrics.f1_score(gold, predicted, average="macro", zero_division=0.0)
        assert metrics["macro_f1"] == pytest.approx(macro)
        assert metrics["subset_accuracy"] == sklearn_metrics.accuracy_score(gold, predicted)
        expected = -(gold * np.log(probabilities) + (1 - gold) * np.log(1 - probabilities)).mean()
        assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
        assert all(interval["count"] == 5 for interval in measure.intervals().values())
        assert measure.intervals().keys() == {"micro_f1", "subset_accuracy", "macro_f1"}
        interval = measure.intervals()["macro_f1"]
        assert interval["low"] <= metrics["macro_f1"] <= interval["high"]
        assert metrics[multi_label_task().metric] == metrics["micro_f1"]


# -- mistakes -----------------------------------------------------------------------------------------------------


def answer_with(**probabilities: float) -> dict[str, Any]:
    """The engine's answer with these probabilities of the labels."""
    label = max(probabilities, key=lambda name: probabilities[name])
    return {"label": label, "probability": probabilities[label], "probabilities": probabilities}


def test_the_most_confident_mistake_has_the_largest_loss() -> None:
    example = LabelledExample(text="x", label="good")
    answers = [
        answer_with(bad=0.9, fair=0.1, good=0.0),
        answer_with(bad=0.9, fair=0.05, good=0.05),
        answer_with(bad=0.5, fair=0.2, good=0.3),
        answer_with(bad=0.4, fair=0.1, good=0.5),
        answer_with(bad=0.0, fair=0.0, good=1.0),
    ]
    scored_answers = [task().score_answer(example, answer) for answer in answers]
    assert [scored.correct for scored in scored_answers] == [False, False, False, True, True]
    losses = [scored.loss for scored in scored_answers]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0
    assert losses[0] < 30, "a probability of 0 does not make the loss infinite"
    assert (scored_answers[0].label, scored_answers[0].prediction) == ("good", "bad")


def test_the_most_confident_mistake_in_multiple_labels_has_the_largest_loss() -> None:
    example = MultiLabelExample(text="x", labels=("good", "bad"))
    scored_sets = [
        multi_label_task().score_answer(example, {"labels": predicted, "probabilities": probabilities})
        for predicted, probabilities in (
            (["fair"], {"bad": 0.1, "fair": 0.9, "good": 0.1}),
            (["bad"], {"bad": 0.9, "fair": 0.1, "good": 0.4}),
            (["bad", "good"], {"bad": 0.9, "fair": 0.1, "good": 0.9}),
        )
    ]
    assert [scored.correct for scored in scored_sets] == [False, False, True]
    assert scored_sets[0].loss > scored_sets[1].loss > scored_sets[2].loss == pytest.approx(-math.log(0.9))
    assert (scored_sets[0].label, scored_sets[0].prediction) == (["bad", "good"], ["fair"])


def test_a_note_names_the_label_that_f1_is_for() -> None:
    example, answer = LabelledExample(text="a", label="legit"), answer_with(spam=0.1, legit=0.9)
    metrics = metrics_of(task(labels=("spam", "legit")), [example], [answer])
    assert metrics["notes"][0] == 'precision, recall and f1 are those of "legit"'
    assert metrics["f1"] == 1.0
    metrics = metrics_of(task(labels=("spam", "legit", "other")), [example], [answer])
    assert "f1" not in metrics
    assert not any("are those of" in note for note in metrics["notes"])
