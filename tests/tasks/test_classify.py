"""Classification learns: samples, losses and gradients beside transformers', and what an evaluation finds."""

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


def task(**more: Any) -> Classify:
    """For the tiny models."""
    return Classify(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": LABELS} | more)


def many(**more: Any) -> ClassifyMultiLabel:
    """The same with any number of labels."""
    return ClassifyMultiLabel(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": LABELS} | more)


def inputs(examples: list[Any]) -> dict[str, torch.Tensor]:
    """A padded batch as transformers makes it; alone, an empty second text would count as none."""
    backend = load_both("single").tokenizer
    encodings = [
        backend([example.text], None if example.text_pair is None else [example.text_pair]) for example in examples
    ]
    rows = [{name: column[0] for name, column in encoding.items()} for encoding in encodings]
    return dict(backend.pad(rows, return_tensors="pt"))


# -- samples ------------------------------------------------------------------------------------------------------


def test_samples_are_what_transformers_reads() -> None:
    read = task().encode_split(TEXTS)
    assert [sample.target for sample in read.samples] == [2, 0, 2, 1, 0]
    assert [sample.weight for sample in read.samples] == [1.0] * 5
    expected = inputs(TEXTS)
    for number, sample in enumerate(read.samples):
        length = int(expected["attention_mask"][number].sum())
        assert sample.bounds == (0, length)
        assert sample.tokens.tolist() == expected["input_ids"][number, :length].tolist()
        assert sample.types.tolist() == expected["token_type_ids"][number, :length].tolist()
    assert sequence_text(read.samples[2]) == "[CLS] she lives in paris [SEP] where [SEP]"
    assert read.samples[2].types.tolist() == [0] * 6 + [1] * 2  # the first [SEP] included
    assert (read.examples, read.tokens) == (5, sum(map(len, read.samples)))
    assert (read.windowed, read.truncated, read.truncated_tokens, read.skipped) == (0, 0, 0, 0)
    assert read.remarks == {"have an empty text": 2}, "one is a second text"
    assert [sample.target for sample in many().encode_split(SETS).samples][:3] == [[1, 0, 1], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("example", [LONG, LONG_PAIR])
def test_long_texts_are_windows_that_weigh_one_together(example: LabelledExample) -> None:
    short = task(limit=SHORT)
    read = short.encode_split([example, TEXTS[0]])
    *windows, last = read.samples
    assert len(windows) >= 5 and read.windowed == 1 and read.examples == 2 and last.weight == 1
    assert all(len(window) <= SHORT and window.target == LABELS.index(example.label) for window in windows)
    assert [window.weight for window in windows] == [1 / len(windows)] * len(windows)
    seen: list[str] = []
    for window in windows:
        tokens = sequence_text(window).split()
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
        text = tokens[tokens.index("[SEP]") + 1 if example.text_pair else 1 : -1]
        if example.text_pair:
            assert tokens[:6] == ["[CLS]", "who", "lives", "here", "?", "[SEP]"]
        overlap = (
            len(seen) and (SHORT - (7 if example.text_pair else 2)) - (SHORT - (7 if example.text_pair else 2)) // 2
        )
        assert seen[len(seen) - overlap :] == text[:overlap]
        seen += text[overlap:]
    assert seen == [tokenizer().name(id) for id in tokenizer().encode(example.texts[-1]).ids[1:-1]]


def test_the_end_is_cut_where_that_is_asked_for() -> None:
    read = task(limit=SHORT, long_inputs="truncate").encode_split([LONG, TEXTS[0], LONG_PAIR])
    tokens = [
        len(tokenizer().encode((example.text, example.text_pair) if example.text_pair else example.text))
        for example in (LONG, LONG_PAIR)
    ]
    assert [len(sample) for sample in read.samples] == [SHORT, 9, SHORT]
    assert (read.truncated, read.truncated_tokens, read.windowed) == (2, sum(tokens) - 2 * SHORT, 0)
    assert [sample.weight for sample in read.samples] == [1.0] * 3
    unlimited = task(limit=None).encode_split([LONG])
    assert [len(sample) for sample in unlimited.samples] == tokens[:1]


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_of_one_label(dtype: torch.dtype, tolerance: float, parts: int) -> None:
    pair = load_both("single", dtype)
    targets = torch.tensor([LABELS.index(text.label) for text in TEXTS])
    expected = pair.reference(**inputs(TEXTS), labels=targets).loss
    loss = backward_all(task(), pair.model, TEXTS, parts)
    assert loss.count == len(TEXTS)
    assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count, tolerance)


def test_loss_and_gradient_of_many_labels() -> None:
    pair = load_both("multiple")
    targets = torch.tensor([sample.target for sample in many().encode_split(SETS).samples])
    expected = pair.reference(**inputs(SETS), labels=targets.double()).loss
    loss = backward_all(many(), pair.model, SETS)
    assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-12)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count)


def test_classes_may_weigh_differently() -> None:
    pair, shares = load_both("single"), (0.25, 3.0, 1.5)
    logits = pair.reference(**inputs(TEXTS)).logits
    targets = torch.tensor([LABELS.index(text.label) for text in TEXTS])
    expected = F.cross_entropy(logits, targets, weight=torch.tensor(shares, dtype=torch.float64))
    for parts in (1, 2, 5):
        loss = backward_all(task(weights=shares), pair.model, TEXTS, parts)
        assert loss.count == 0.25 * 2 + 3 + 1.5 * 2
        assert float(loss.sum) / loss.count == pytest.approx(float(expected.detach()), abs=1e-12)
    assert_same_gradients(pair.reference, expected, pair.model, loss.count)
    halves = task(weights=shares, limit=SHORT).encode_split([LONG]).samples
    assert [half.weight for half in halves] == [3.0 / len(halves)] * len(halves)


def test_positives_may_weigh_more() -> None:
    pair, shares = load_both("multiple"), (0.5, 2.0, 7.0)
    logits = pair.reference(**inputs(SETS)).logits
    targets = torch.tensor([sample.target for sample in many().encode_split(SETS).samples], dtype=torch.float64)
    positive = torch.tensor(shares, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=positive)
    loss = backward_all(many(weights=shares), pair.model, SETS, parts=2)
    assert (loss.count, float(loss.sum) / 5) == (5, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 5)


def test_windows_count_as_one_text() -> None:
    pair, short = load_both("single"), task(limit=SHORT)
    examples = [LONG, TEXTS[0]]
    *windows, last = short.encode_split(examples).samples
    with torch.no_grad():
        each = [
            float(-pair.model(short.batch([sample], [0]).packed).log_softmax(-1)[0, sample.target])
            for sample in (*windows, last)
        ]
    loss = backward_all(short, pair.model, examples)
    assert loss.count == pytest.approx(2, abs=1e-6)
    assert float(loss.sum) == pytest.approx(sum(each[:-1]) / len(windows) + each[-1], abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------


def shares_of(name: str, examples: list[Any]) -> Any:
    """transformers' logits."""
    with torch.no_grad():
        return load_both(name).reference(**inputs(examples)).logits


def test_an_evaluation_agrees_with_sklearn() -> None:
    examples = [
        *TEXTS,
        *(LabelledExample(text=f"the dog ran {word}", label=label) for word in "abcdefgh" for label in LABELS),
    ]
    probabilities = shares_of("single", examples).softmax(-1).numpy()
    gold, predicted = [LABELS.index(example.label) for example in examples], probabilities.argmax(1)
    measure = evaluate_task(task(), Engine(load_both("single").model), examples)
    metrics = task().compute_metrics(measure)
    assert metrics["accuracy"] == sklearn_metrics.accuracy_score(gold, predicted)
    assert metrics["confusion"] == sklearn_metrics.confusion_matrix(gold, predicted).tolist()
    assert metrics["loss"] == pytest.approx(sklearn_metrics.log_loss(gold, probabilities, labels=[0, 1, 2]), abs=1e-6)
    right = predicted == gold
    bins = np.minimum((probabilities.max(1) * 15 - 1e-12).astype(int), 14)
    gaps = [
        abs(right[bins == m].mean() - probabilities.max(1)[bins == m].mean()) * (bins == m).mean() for m in set(bins)
    ]
    assert metrics["ece"] == pytest.approx(sum(gaps), abs=1e-6)
    intervals = measure.intervals()
    assert intervals.keys() == {"accuracy", "macro_f1"}
    for name, interval in intervals.items():
        assert 0 < interval["low"] < metrics[name] < interval["high"] < 1 and interval["count"] == len(examples), name
    assert metrics[task().metric] == metrics["accuracy"]


def test_two_labels_have_f1_of_the_second_and_many_have_no_interval_of_f1() -> None:
    two = task(labels=("no", "yes"))
    examples = [LabelledExample(text="", label=label) for label in ("yes", "no", "no", "yes")]
    shares = [0.9, 0.8, 0.2, 0.7]  # of yes
    answers = [
        {"label": "yes" if p > 0.5 else "no", "probability": max(p, 1 - p), "probabilities": {"no": 1 - p, "yes": p}}
        for p in shares
    ]
    metrics = two.compute_metrics(two.update_metrics(two.new_metrics(), examples, answers, range(4)))
    assert (metrics["precision"], metrics["recall"], metrics["f1"]) == (2 / 3, 1.0, 0.8)
    assert metrics["loss"] == pytest.approx(-sum(map(math.log, (0.9, 0.2, 0.8, 0.7))) / 4)
    backwards = task(labels=("yes", "no"))  # by name, not by place
    again = backwards.compute_metrics(backwards.update_metrics(backwards.new_metrics(), examples, answers, range(4)))
    assert (again["accuracy"], again["loss"]) == (metrics["accuracy"], metrics["loss"])
    assert set(task(labels=tuple(map(str, range(math.isqrt(MAX_BOOTSTRAP_SUMS) + 1)))).new_metrics().bootstraps) == {
        "accuracy"
    }


def test_many_labels_agree_with_sklearn() -> None:
    ours, thresholds = load_both("multiple").model, {"bad": 0.3, "good": 0.6}
    probabilities = shares_of("multiple", SETS).sigmoid().numpy()
    gold = np.array([sample.target for sample in many().encode_split(SETS).samples]).astype(int)
    for chosen_thresholds in ({}, thresholds):
        ours.thresholds = dict(chosen_thresholds)
        measure = evaluate_task(many(), Engine(ours), SETS)
        ours.thresholds = {}
        predicted = (probabilities >= [chosen_thresholds.get(label, 0.5) for label in LABELS]).astype(int)
        metrics = many().compute_metrics(measure)
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
        assert metrics[many().metric] == metrics["micro_f1"]


# -- mistakes -----------------------------------------------------------------------------------------------------


def answer(**shares: float) -> dict[str, Any]:
    """Probabilities as an answer."""
    label = max(shares, key=lambda name: shares[name])
    return {"label": label, "probability": shares[label], "probabilities": shares}


def test_the_surest_mistake_is_the_worst() -> None:
    example = LabelledExample(text="x", label="good")
    answers = [
        answer(bad=0.9, fair=0.1, good=0.0),
        answer(bad=0.9, fair=0.05, good=0.05),
        answer(bad=0.5, fair=0.2, good=0.3),
        answer(bad=0.4, fair=0.1, good=0.5),
        answer(bad=0.0, fair=0.0, good=1.0),
    ]
    judged = [task().score_answer(example, answer) for answer in answers]
    assert [scored.correct for scored in judged] == [False, False, False, True, True]
    loss = [scored.loss for scored in judged]
    assert loss == sorted(loss, reverse=True) and loss[-1] == 0 and loss[0] < 30  # never infinite
    assert (judged[0].label, judged[0].prediction) == ("good", "bad")
    several = MultiLabelExample(text="x", labels=("good", "bad"))
    sets = [
        many().score_answer(several, {"labels": predicted, "probabilities": shares})
        for predicted, shares in (
            (["fair"], {"bad": 0.1, "fair": 0.9, "good": 0.1}),
            (["bad"], {"bad": 0.9, "fair": 0.1, "good": 0.4}),
            (["bad", "good"], {"bad": 0.9, "fair": 0.1, "good": 0.9}),
        )
    ]
    assert [scored.correct for scored in sets] == [False, False, True]
    assert sets[0].loss > sets[1].loss > sets[2].loss == pytest.approx(-math.log(0.9))
    assert (sets[0].label, sets[0].prediction) == (["bad", "good"], ["fair"])


def test_of_two_labels_the_one_that_f1_is_of_is_named() -> None:
    two = task(labels=("spam", "legit"))
    answers = [{"label": "legit", "probability": 0.9, "probabilities": {"spam": 0.1, "legit": 0.9}}]
    example = LabelledExample(text="a", label="legit")
    metrics = two.compute_metrics(two.update_metrics(two.new_metrics(), [example], answers, [0]))
    assert metrics["notes"][0] == 'precision, recall and f1 are those of "legit"' and metrics["f1"] == 1.0
    three = task(labels=("spam", "legit", "other"))
    metrics = three.compute_metrics(three.update_metrics(three.new_metrics(), [example], answers, [0]))
    assert "f1" not in metrics and not any("are those of" in note for note in metrics["notes"])
