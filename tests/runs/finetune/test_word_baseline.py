"""The bag-of-words baseline: its scores in a run, its linear model, its sample of rows, and the sentences about it."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn

from heedful.data import Dataset, Example, LabelledExample, MultiLabelExample, ScoredExample, read
from heedful.runs.card.baseline import baseline_csv_rows, baseline_lines, baseline_warning
from heedful.runs.finetune import run as run_module
from heedful.runs.finetune import word_baseline
from heedful.runs.finetune.word_baseline import WordBaseline, rows_of_splits, seconds_allowed
from heedful.runs.results import read_predictions
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.regress import Regress
from heedful.tasks.task import Task
from heedful.train.settings import TrainSettings
from tests.support.generated_data import finetune_tiny, write_csv, write_splits

LATENCY = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
NO_TOKENIZER: Any = None  # a bag of words does not use the tokenizer of its task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: LATENCY)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def task_of(task_class: type[Task], labels: tuple[str, ...] = ("no", "yes"), **fields: Any) -> Any:
    return task_class(tokenizer=NO_TOKENIZER, limit=None, labels=labels, **fields)


def fitted(task: Any, examples: Sequence[Example]) -> WordBaseline:
    baseline = WordBaseline(task)
    baseline.fit(examples)
    return baseline


# -- in a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "task", "metric", "settings"),
    [
        ("single", "classify", "accuracy", {}),
        ("pair", "classify", "accuracy", {}),
        ("classes", "classify", "accuracy", {"task.class_weight": "balanced"}),
        ("multiple", "classify", "micro_f1", {"task.class_weight": "balanced", "task.thresholds": "tuned"}),
        ("regress", "regress", "pearson", {}),
    ],
)
def test_a_run_scores_a_bag_of_words_beside_its_model(
    kind: str, task: str, metric: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results = finetune_tiny(task, write_splits(kind, tmp_path / "data"), run, settings).results
    baseline = results["baseline"]
    assert set(baseline["splits"]) == {"dev", "test"}
    assert baseline["rows"] == baseline["of"] == 24
    for split, scores in baseline["splits"].items():
        value, interval, difference = scores["numbers"][metric], scores["intervals"][metric], scores["difference"]
        assert scores["numbers"]["count"] == 8
        assert interval["low"] <= value + 1e-9
        assert value <= interval["high"] + 1e-6
        model_value = results["splits"][split]["numbers"][metric]
        assert difference["value"] == pytest.approx(model_value - value)
        assert difference["low"] <= difference["high"]
        assert difference["count"] == 8
    card = (run / "model" / "README.md").read_text()
    assert "### Compared with a bag of words" in card
    assert f"scikit-learn {word_baseline.version('scikit-learn')}" in card
    with (run / "results.csv").open(newline="") as file:
        *_, baseline_row = csv.DictReader(file)
    assert baseline_row["baseline"] == "a bag of words"
    assert baseline_row["step"] == ""
    assert float(baseline_row[f"test_{metric}"]) == baseline["splits"]["test"]["numbers"][metric]


def texts_and_labels(dataset: Dataset[Any], split: str) -> tuple[list[str], list[str]]:
    examples = list(dataset.examples(split))
    return [example.text for example in examples], [example.label for example in examples]


def test_the_baseline_is_a_logistic_regression_over_tf_idf(tmp_path: Path) -> None:
    data = write_splits("classes", tmp_path / "data", {"train": 60, "dev": 40, "test": 40})
    dataset = read(data)
    baseline = finetune_tiny("classify", data, tmp_path / "run", {"train.epochs": 1}).results["baseline"]
    train_texts, train_labels = texts_and_labels(dataset, "train")
    test_texts, test_labels = texts_and_labels(dataset, "test")
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    reference = LogisticRegression().fit(vectorizer.fit_transform(train_texts), train_labels)
    accuracy = reference.score(vectorizer.transform(test_texts), test_labels)
    assert baseline["splits"]["test"]["numbers"]["accuracy"] == accuracy
    assert baseline["words"] == len(vectorizer.vocabulary_)


def test_the_interval_of_the_difference_is_paired_by_example(tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data", {"train": 60, "dev": 8, "test": 80}), tmp_path / "run"
    results = finetune_tiny("classify", data, run, {"train.epochs": 1}).results
    difference = results["baseline"]["splits"]["test"]["difference"]
    model_is_correct = {prediction["id"]: prediction["correct"] for prediction in read_predictions(run, "test")}
    dataset = read(data)
    test = list(dataset.examples("test"))
    answers = fitted(task_of(Classify, dataset.labels), list(dataset.examples("train"))).answers(test)
    differences = np.array(
        [
            float(model_is_correct[index]) - float(answer["label"] == example.label)
            for index, (answer, example) in enumerate(zip(answers, test, strict=True))
        ]
    )
    assert difference["value"] == pytest.approx(differences.mean())
    samples = np.random.default_rng(0).integers(0, len(test), (4000, len(test)))
    low, high = np.quantile(differences[samples].mean(1), [0.025, 0.975])
    assert difference["low"] == pytest.approx(low, abs=0.03)
    assert difference["high"] == pytest.approx(high, abs=0.03)


def test_the_baseline_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "score_words", lambda *arguments, **options: pytest.fail("a baseline is fitted"))
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    results = finetune_tiny("classify", data, run, {"eval_baseline": "false"}).results
    assert "baseline" not in results
    assert baseline_lines(results) == []
    assert not baseline_warning(results)
    assert "bag of words" not in (run / "model" / "README.md").read_text()


def test_tagging_has_no_baseline(tmp_path: Path) -> None:
    results = finetune_tiny("tag", write_splits("tag", tmp_path / "data"), tmp_path / "run").results
    assert "baseline" not in results


def test_a_run_without_dev_and_test_has_no_baseline(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data", {"train": 24})
    results = finetune_tiny("classify", data, tmp_path / "run", {"data.dev_fraction": 0.0}).results
    assert "baseline" not in results
    assert not results["splits"]


def test_a_baseline_that_cannot_be_fitted_has_a_reason(tmp_path: Path) -> None:
    texts_without_words = ("!", "! ", "! ?")
    rows = [{"text": texts_without_words[number % 3], "label": "ab"[number % 2]} for number in range(24)]
    for split in ("train", "test"):
        write_csv(tmp_path / f"{split}.csv", rows)
    run = tmp_path / "run"
    results = finetune_tiny("classify", tmp_path, run, {"data.dev_fraction": 0.0}).results
    assert "empty vocabulary" in results["baseline"]["why"]
    assert baseline_lines(results)[0].startswith("a bag of words could not be fitted: empty vocabulary")
    assert not baseline_warning(results)
    assert not baseline_csv_rows(results)
    assert "a bag of words could not be fitted" in (run / "model" / "README.md").read_text()


# -- the linear model ------------------------------------------------------------------------------------------


def pairs_with_and_without_a_common_word() -> list[LabelledExample]:
    """Return pairs with the label "yes" if both texts have the same word. Single words say nothing about the label."""
    rng, examples = random.Random(0), []
    words = [f"word{number}" for number in range(30)]
    for number in range(600):
        has_common_word = number % 2 == 1
        word = rng.choice(words)
        second_word = word if has_common_word else rng.choice([candidate for candidate in words if candidate != word])
        label = "yes" if has_common_word else "no"
        examples.append(LabelledExample(text=f"{word} {rng.choice(words)}", text_pair=second_word, label=label))
    return examples


def test_a_common_word_of_a_pair_is_a_feature() -> None:
    examples = pairs_with_and_without_a_common_word()
    train, held_out = examples[:400], examples[400:]
    answers = fitted(task_of(Classify), train).answers(held_out)
    correct = [answer["label"] == example.label for answer, example in zip(answers, held_out, strict=True)]
    assert fmean(correct) > 0.95


def test_a_common_word_of_a_pair_is_a_feature_of_a_regression() -> None:
    examples = [
        ScoredExample(text=example.text, text_pair=example.text_pair, score=float(example.label == "yes"))
        for example in pairs_with_and_without_a_common_word()
    ]
    train, held_out = examples[:400], examples[400:]
    answers = fitted(task_of(Regress, ("score",)), train).answers(held_out)
    predicted, scores = [answer["values"]["score"] for answer in answers], [example.score for example in held_out]
    assert np.corrcoef(predicted, scores)[0, 1] > 0.8


def test_classes_are_balanced_if_the_task_has_class_weights() -> None:
    examples = [LabelledExample(text=f"common word{number}", label="no") for number in range(95)]
    examples += [LabelledExample(text=f"common other{number}", label="yes") for number in range(5)]

    def probability_of_yes(class_weights: tuple[float, ...]) -> float:
        baseline = fitted(task_of(Classify, weights=class_weights), examples)
        (answer,) = baseline.answers([LabelledExample(text="common", label="no")])
        return float(answer["probabilities"]["yes"])

    assert probability_of_yes(()) < 0.1
    assert probability_of_yes((0.5, 10.0)) > 0.2


def test_labels_of_a_multi_label_task_have_thresholds() -> None:
    examples = []
    for number in range(20):
        labels = ("animal", "cat") if number % 2 else ("animal",)
        examples.append(MultiLabelExample(text=f"cat dog {number}", labels=labels))
    baseline = fitted(task_of(ClassifyMultiLabel, ("animal", "cat", "never")), examples)
    unlabelled = [MultiLabelExample(text="cat", labels=())]
    (answer,) = baseline.answers(unlabelled)
    assert answer["probabilities"]["animal"] == 1.0, "all examples have the label"
    assert answer["probabilities"]["never"] == 0.0
    baseline.thresholds = {"cat": 0.01}
    assert baseline.answers(unlabelled)[0]["labels"] == ["animal", "cat"]
    baseline.thresholds = {"cat": 0.99}
    assert baseline.answers(unlabelled)[0]["labels"] == ["animal"]


def test_a_class_without_sampled_examples_has_probability_0() -> None:
    examples = [LabelledExample(text="red fish", label="a"), LabelledExample(text="blue bird", label="c")] * 4
    baseline = fitted(task_of(Classify, ("a", "b", "c")), examples)
    (answer,) = baseline.answers([LabelledExample(text="blue bird", label="b")])
    probabilities = answer["probabilities"]
    assert probabilities["b"] == 0.0
    assert probabilities["c"] > probabilities["a"] > 0
    assert sum(probabilities.values()) == pytest.approx(1)


def test_the_number_of_words_is_limited_by_the_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_baseline, "MAX_WEIGHTS", 30)
    examples = [
        LabelledExample(text=f"one{number} two{number} three{number}", label="abc"[number % 3]) for number in range(9)
    ]
    assert fitted(task_of(Classify, ("a", "b", "c")), examples).words == 30 / 3


# -- the sample of rows ----------------------------------------------------------------------------------------


def test_the_number_of_rows_depends_on_counts_and_the_time_limit() -> None:
    counts, characters = {"train": 1000, "test": 400}, {"train": 1_000_000, "test": 400_000}
    assert rows_of_splits(counts, characters, 1, 10.0) == counts
    assert rows_of_splits({"train": 400_000}, {"train": 400_000}, 1, 10.0) == {"train": 50_000}
    in_short_time = rows_of_splits(counts, characters, 1, 0.05)
    assert 1 <= in_short_time["test"] < 400
    assert in_short_time["train"] == pytest.approx(2.5 * in_short_time["test"], abs=3), "in proportion to the counts"
    with_many_outputs = rows_of_splits(counts, characters, 100, 0.05)
    assert with_many_outputs["train"] < in_short_time["train"]
    assert rows_of_splits(counts, characters, 1, 0.0) == {"train": 1, "test": 1}
    assert rows_of_splits({"train": 3}, {"train": 0}, 1, 1.0) == {"train": 3}


def test_rows_are_sampled_with_the_seed(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(100)]
    dataset = read(write_csv(tmp_path / "a.csv", rows))
    train = list(dataset.examples("train"))

    def sample(seed: int) -> dict[int, Example]:
        return dict(word_baseline._sample_examples(dataset, "train", len(train), 30, seed))

    sampled = sample(1)
    assert len(sampled) == 30
    assert list(sampled) == sorted(sampled)
    for index, example in sampled.items():
        assert example == train[index]
    assert sample(1) == sampled
    assert sample(2) != sampled


def test_the_number_of_sampled_rows_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_baseline, "MAX_ROWS", 12)
    data = write_splits("single", tmp_path / "data", {"train": 24, "dev": 8, "test": 20})
    results = finetune_tiny("classify", data, tmp_path / "run").results
    baseline = results["baseline"]
    assert baseline["rows"] == 12
    assert baseline["of"] == 24
    assert baseline["splits"]["test"]["numbers"]["count"] == 12
    assert baseline["splits"]["test"]["difference"]["count"] == 12
    _, test_line = baseline_lines(results)
    assert "fitted on 12 of 24 rows, scored on 12 of 20 rows" in test_line


NUM_WEIGHTS = 100 * 1000  # of the model of `fake_trainer`, without its embedding


def fake_trainer(train: TrainSettings, device: str = "cpu") -> Any:
    """Return what `seconds_allowed` needs of a trainer: settings, two epochs of 25 steps, a model and a device."""
    loaded = nn.Sequential(nn.Embedding(5000, 100), nn.Linear(100, 1000, bias=False))
    order = SimpleNamespace(steps_per_epoch=25)
    return SimpleNamespace(settings=train, total_steps=50, order=order, loaded=loaded, device=torch.device(device))


def test_the_baseline_may_take_a_tenth_of_the_training_time_from_1_to_10_seconds() -> None:
    two_epochs, operations_per_second = TrainSettings(epochs=2), 3e11
    operations_per_token = 6 * NUM_WEIGHTS * 2
    tokens_for_50_seconds = int(50 * operations_per_second / operations_per_token)
    assert seconds_allowed(fake_trainer(two_epochs), tokens_for_50_seconds) == pytest.approx(5.0, rel=1e-3)
    assert seconds_allowed(fake_trainer(two_epochs), 100 * tokens_for_50_seconds) == 10.0
    assert seconds_allowed(fake_trainer(two_epochs), 10) == 1.0
    assert seconds_allowed(fake_trainer(two_epochs, "meta"), tokens_for_50_seconds) == 1.0, "faster than a CPU"
    thirty_seconds = TrainSettings(time_budget=0.5)
    assert seconds_allowed(fake_trainer(thirty_seconds), 10) == pytest.approx(3.0)


# -- sentences -------------------------------------------------------------------------------------------------


def results_with_difference(low: float, high: float, **entries: Any) -> dict[str, Any]:
    """Return results in which the difference to the baseline has this interval. `entries` replace baseline entries."""
    difference = {"value": (low + high) / 2, "low": low, "high": high, "level": 0.95}
    test = {"numbers": {"accuracy": 0.881, "count": 100}, "difference": difference}
    baseline = {"name": "a bag of words", "seconds": 0.41, "rows": 9, "of": 9, "splits": {"test": test}} | entries
    splits = {"test": {"numbers": {"accuracy": 0.912, "count": 100}}}
    return {"task": "classify", "metric": "accuracy", "splits": splits, "baseline": baseline}


def test_a_line_with_both_scores() -> None:
    (line,) = baseline_lines(results_with_difference(0.01, 0.05))
    assert line == "test accuracy 91.2 %; a bag of words 88.1 % (in 0.4 s)"
    (line,) = baseline_lines(results_with_difference(0.01, 0.05, seconds=0.01))
    assert line.endswith("(in less than 0.1 s)")


@pytest.mark.parametrize(
    ("low", "high", "comparison"), [(-0.01, 0.05, "is not measurably better than"), (-0.05, -0.01, "is worse than")]
)
def test_the_warning_for_a_model_that_is_not_better_has_advice(low: float, high: float, comparison: str) -> None:
    warning = baseline_warning(results_with_difference(low, high))
    assert comparison in warning
    assert "--model" in warning


def test_there_is_no_warning_for_a_better_model() -> None:
    assert baseline_warning(results_with_difference(0.01, 0.05)) == ""


def test_the_warning_for_equal_scores_asks_for_a_harder_split() -> None:
    warning = baseline_warning(results_with_difference(0.0, 0.0))
    assert "score the same" in warning
    assert "too small or too easy" in warning
    assert "--model" not in warning


# -- imports ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_fine_tuning_imports_scikit_learn(tmp_path: Path) -> None:
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run")
    code = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from heedful.cli import main\n"
        "import heedful.serve.app, heedful.runs.finetune.run\n"
        "for words in (['--help'], ['finetune', '--help'], ['predict', sys.argv[1], 'a cat']):\n"
        "    with suppress(SystemExit):\n"
        "        main(words)\n"
        "assert not {'sklearn', 'scipy'} & set(sys.modules), 'imported'\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "bad" in process.stdout
    assert "good" in process.stdout
