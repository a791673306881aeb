"""The bag of words beside a fine-tuned model: what it learns, on how many rows, and what a run says of it."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn

from heedful.data import LabelledExample, MultiLabelExample, ScoredExample, read
from heedful.runs.card.baseline import baseline_csv_rows, baseline_lines, baseline_warning
from heedful.runs.finetune import run as module
from heedful.runs.finetune import word_baseline
from heedful.runs.finetune.word_baseline import WordBaseline, rows_of_splits, seconds_allowed
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.regress import Regress
from heedful.tasks.task import Task
from heedful.train.settings import TrainSettings
from tests.support.generated_data import finetune_tiny, write_csv, write_splits

TIMES = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
NO_TOKENIZER: Any = None  # a task that is only measured needs none


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: TIMES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task_of(kind: type[Task], labels: tuple[str, ...] = ("no", "yes"), **more: Any) -> Any:
    return kind(tokenizer=NO_TOKENIZER, limit=None, labels=labels, **more)


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
    results = finetune_tiny(task, write_splits(kind, tmp_path / "data"), tmp_path / "run", settings).results
    baseline = results["baseline"]
    assert set(baseline["splits"]) == {"dev", "test"} and baseline["rows"] == baseline["of"] == 24
    for split, each in baseline["splits"].items():
        difference, own = each["difference"], results["splits"][split]["numbers"][metric]
        assert each["numbers"]["count"] == 8
        assert (
            each["intervals"][metric]["low"]
            <= each["numbers"][metric] + 1e-9
            <= each["intervals"][metric]["high"] + 1e-6
        )
        assert difference["value"] == pytest.approx(own - each["numbers"][metric])
        assert difference["low"] <= difference["high"] and difference["count"] == 8
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "### Beside a bag of words" in card and f"scikit-learn {word_baseline.version('scikit-learn')}" in card
    with (tmp_path / "run" / "results.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    assert last["baseline"] == "a bag of words" and last["step"] == ""
    assert float(last[f"test_{metric}"]) == baseline["splits"]["test"]["numbers"][metric]


def test_it_is_scikit_learns(tmp_path: Path) -> None:
    source = read(write_splits("classes", tmp_path / "data", {"train": 60, "dev": 40, "test": 40}))
    done = finetune_tiny("classify", tmp_path / "data", tmp_path / "run", {"train.epochs": 1})
    texts, labels = (
        [[getattr(e, n) for e in source.examples(s)] for s in ("train", "test")] for n in ("text", "label")
    )
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    model = LogisticRegression().fit(vectorizer.fit_transform(texts[0]), labels[0])
    expected = model.score(vectorizer.transform(texts[1]), labels[1])
    assert done.results["baseline"]["splits"]["test"]["numbers"]["accuracy"] == expected
    assert done.results["baseline"]["words"] == len(vectorizer.vocabulary_)


def test_the_difference_is_of_the_same_examples(tmp_path: Path) -> None:
    """Against a bootstrap by hand: which of the model's and of the bag's answers are right, example by example."""
    labelled = write_splits("single", tmp_path / "data", {"train": 60, "dev": 8, "test": 80})
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"train.epochs": 1})
    difference = done.results["baseline"]["splits"]["test"]["difference"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions-test.jsonl").read_text().splitlines()]
    own = {line["id"]: line["correct"] for line in lines}
    source = read(labelled)
    bag = WordBaseline(task_of(Classify, source.labels))
    bag.fit(list(source.examples("train")))
    test = list(source.examples("test"))
    theirs = [each["label"] == example.label for each, example in zip(bag.answers(test), test, strict=True)]
    gains = np.array([own[n] - theirs[n] for n in range(len(test))], dtype=float)
    assert difference["value"] == pytest.approx(gains.mean())
    draw = np.random.default_rng(0)
    means = gains[draw.integers(0, len(gains), (4000, len(gains)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert difference["low"] == pytest.approx(low, abs=0.03) and difference["high"] == pytest.approx(high, abs=0.03)


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("a bag of words is fitted")

    monkeypatch.setattr(module, "score_words", refuse)
    done = finetune_tiny(
        "classify", write_splits("single", tmp_path / "data"), tmp_path / "run", {"eval_baseline": "false"}
    )
    assert "baseline" not in done.results and baseline_lines(done.results) == [] and not baseline_warning(done.results)
    assert "bag of words" not in (tmp_path / "run" / "model" / "README.md").read_text()
    done = finetune_tiny("tag", write_splits("tag", tmp_path / "tags"), tmp_path / "tagger")
    assert "baseline" not in done.results


def test_without_dev_and_test_there_is_none(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data", {"train": 24})
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"data.dev_fraction": 0.0})
    assert "baseline" not in done.results and not done.results["splits"]


def test_texts_without_words_end_no_run(tmp_path: Path) -> None:
    rows = [{"text": "! ?"[: n % 3 + 1], "label": "ab"[n % 2]} for n in range(24)]
    for split in ("train", "test"):
        write_csv(tmp_path / f"{split}.csv", rows)
    done = finetune_tiny("classify", tmp_path, tmp_path / "run", {"data.dev_fraction": 0.0})
    assert "empty vocabulary" in done.results["baseline"]["why"]
    assert baseline_lines(done.results)[0].startswith("a bag of words could not be fitted: empty vocabulary")
    assert not baseline_warning(done.results) and not baseline_csv_rows(done.results)
    assert "a bag of words could not be fitted" in (tmp_path / "run" / "model" / "README.md").read_text()


# -- what it learns --------------------------------------------------------------------------------------------


def test_pairs_are_told_apart_by_the_words_that_both_have() -> None:
    """Each word is as frequent under both labels: only the product of the two texts tells them apart."""
    draw, examples = random.Random(0), []
    words = [f"word{n}" for n in range(30)]
    for n in range(600):
        first = draw.choice(words)
        second = first if n % 2 else draw.choice([each for each in words if each != first])
        examples.append(
            LabelledExample(text=f"{first} {draw.choice(words)}", text_pair=second, label=["no", "yes"][n % 2])
        )
    bag = WordBaseline(task_of(Classify))
    bag.fit(examples[:400])
    held = examples[400:]
    right = [each["label"] == example.label for each, example in zip(bag.answers(held), held, strict=True)]
    assert sum(right) / len(right) > 0.95
    scored = [ScoredExample(text=e.text, text_pair=e.text_pair, score=float(e.label == "yes")) for e in examples]
    numbers = WordBaseline(task_of(Regress, ("score",)))
    numbers.fit(scored[:400])
    predicted = [answer["values"]["score"] for answer in numbers.answers(scored[400:])]
    assert np.corrcoef(predicted, [each.score for each in scored[400:]])[0, 1] > 0.8


def test_weights_of_classes_are_those_of_the_run() -> None:
    rows = [LabelledExample(text=f"common word{n}", label="no") for n in range(95)]
    rows += [LabelledExample(text=f"common other{n}", label="yes") for n in range(5)]
    plain, balanced = (WordBaseline(task_of(Classify, weights=weights)) for weights in ((), (0.5, 10.0)))
    for each in (plain, balanced):
        each.fit(rows)
    asked = [LabelledExample(text="common", label="no")]
    shares = [each.answers(asked)[0]["probabilities"]["yes"] for each in (plain, balanced)]
    assert shares[0] < 0.1 and shares[1] > 0.2


def test_any_number_of_labels_with_thresholds_and_a_label_that_all_rows_have() -> None:
    rows = [
        MultiLabelExample(text=f"cat dog {n}", labels=("animal", "cat") if n % 2 else ("animal",)) for n in range(20)
    ]
    bag = WordBaseline(task_of(ClassifyMultiLabel, ("animal", "cat", "never")))
    bag.fit(rows)
    (answer,) = bag.answers([MultiLabelExample(text="cat", labels=())])
    assert answer["probabilities"]["animal"] == 1.0 and answer["probabilities"]["never"] == 0.0
    bag.thresholds = {"cat": 0.01}
    assert bag.answers([MultiLabelExample(text="cat", labels=())])[0]["labels"] == ["animal", "cat"]
    bag.thresholds = {"cat": 0.99}
    assert bag.answers([MultiLabelExample(text="cat", labels=())])[0]["labels"] == ["animal"]


def test_labels_that_the_drawn_rows_lack_have_probability_0() -> None:
    bag = WordBaseline(task_of(Classify, ("a", "b", "c")))
    bag.fit([LabelledExample(text="red fish", label="a"), LabelledExample(text="blue bird", label="c")] * 4)
    shares = bag.answers([LabelledExample(text="blue bird", label="b")])[0]["probabilities"]
    assert shares["b"] == 0.0 and shares["c"] > shares["a"] > 0 and sum(shares.values()) == pytest.approx(1)


def test_many_classes_have_fewer_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_baseline, "MAX_WEIGHTS", 30)
    bag = WordBaseline(task_of(Classify, ("a", "b", "c")))
    bag.fit([LabelledExample(text=f"one{n} two{n} three{n}", label="abc"[n % 3]) for n in range(9)])
    assert bag.words == 10


# -- how many rows ---------------------------------------------------------------------------------------------


def test_rows_follow_counts_alone() -> None:
    counts, characters = {"train": 1000, "test": 400}, {"train": 1_000_000, "test": 400_000}
    assert rows_of_splits(counts, characters, 1, 10.0) == counts
    assert rows_of_splits({"train": 400_000}, {"train": 400_000}, 1, 10.0) == {"train": 50_000}
    few = rows_of_splits(counts, characters, 1, 0.05)
    assert few["train"] == pytest.approx(2.5 * few["test"], abs=3) and 1 <= few["test"] < 400
    assert rows_of_splits(counts, characters, 100, 0.05)["train"] < few["train"], "each class costs time"
    assert rows_of_splits(counts, characters, 1, 0.0) == {"train": 1, "test": 1}
    assert rows_of_splits({"train": 3}, {"train": 0}, 1, 1.0) == {"train": 3}


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    source = read(write_csv(tmp_path / "a.csv", [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(100)]))
    count = sum(1 for _ in source.examples("train"))

    def drawn(seed: int) -> list[int]:
        return [n for n, _ in word_baseline._sample_examples(source, "train", count, 30, seed)]

    assert drawn(1) == drawn(1) != drawn(2) and len(drawn(1)) == 30 and drawn(1) == sorted(drawn(1))
    chosen = dict(word_baseline._sample_examples(source, "train", count, 30, 1))
    assert all(chosen[n] == example for n, example in enumerate(source.examples("train")) if n in chosen)


def test_a_sample_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_baseline, "MAX_ROWS", 12)
    sizes = {"train": 24, "dev": 8, "test": 20}
    done = finetune_tiny("classify", write_splits("single", tmp_path / "data", sizes), tmp_path / "run")
    baseline = done.results["baseline"]
    assert (baseline["rows"], baseline["of"], baseline["splits"]["test"]["numbers"]["count"]) == (12, 24, 12)
    assert baseline["splits"]["test"]["difference"]["count"] == 12
    line = baseline_lines(done.results)[-1]
    assert "fitted on 12 of 24 rows, scored on 12 of 20 rows" in line


def trainer(train: TrainSettings, device: str = "cpu") -> Any:
    """A stand-in of a trainer of a model with 100 x 1000 weights and a table."""
    loaded = nn.Sequential(nn.Embedding(5000, 100), nn.Linear(100, 1000, bias=False))
    return SimpleNamespace(
        settings=train, total_steps=50, order=SimpleNamespace(steps_per_epoch=25), loaded=loaded,
        device=torch.device(device),
    )  # fmt: skip


def test_time_is_a_tenth_of_the_training_and_at_most_ten_seconds() -> None:
    planned = 6 * 100_000 * 2  # operations per token of an epoch; there are two epochs
    tokens = int(50 * 3e11 / planned)
    assert seconds_allowed(trainer(TrainSettings(epochs=2)), tokens) == pytest.approx(5.0, rel=1e-3)
    assert seconds_allowed(trainer(TrainSettings(epochs=2)), 100 * tokens) == 10.0
    assert seconds_allowed(trainer(TrainSettings(epochs=2)), 10) == 1.0
    assert seconds_allowed(trainer(TrainSettings(epochs=2), "meta"), tokens) == 1.0, "other devices train faster"
    assert seconds_allowed(trainer(TrainSettings(time_budget=0.5)), 10) == pytest.approx(3.0)


# -- what is said ----------------------------------------------------------------------------------------------


def results(low: float, high: float, **more: Any) -> dict[str, Any]:
    each = {
        "numbers": {"accuracy": 0.881, "count": 100},
        "difference": {"value": (low + high) / 2, "low": low, "high": high, "level": 0.95},
    }
    baseline = {"name": "a bag of words", "seconds": 0.41, "rows": 9, "of": 9, "splits": {"test": each}} | more
    splits = {"test": {"numbers": {"accuracy": 0.912, "count": 100}}}
    return {"task": "classify", "metric": "accuracy", "splits": splits, "baseline": baseline}


def test_a_line_beside_the_score() -> None:
    assert baseline_lines(results(0.01, 0.05)) == ["test accuracy 91.2 %; a bag of words 88.1 % (in 0.4 s)"]
    assert baseline_lines(results(0.01, 0.05, seconds=0.01))[0].endswith("(in less than 0.1 s)")


@pytest.mark.parametrize(
    ("low", "high", "advice"),
    [(0.01, 0.05, ""), (-0.01, 0.05, "is not measurably better than"), (-0.05, -0.01, "is worse than")],
)
def test_a_model_that_is_not_better_is_told_with_what_to_do(low: float, high: float, advice: str) -> None:
    sentence = baseline_warning(results(low, high))
    assert bool(sentence) == bool(advice) and advice in sentence and ("--model" in sentence) == bool(advice)


def test_equal_scores_ask_for_a_harder_split_and_not_for_more_training() -> None:
    sentence = baseline_warning(results(0.0, 0.0))
    assert "score the same" in sentence and "too small or too easy" in sentence and "--model" not in sentence


# -- what is imported -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_but_fine_tuning_imports_scikit_learn(tmp_path: Path) -> None:
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
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bad" in done.stdout and "good" in done.stdout
