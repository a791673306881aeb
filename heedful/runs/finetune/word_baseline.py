"""The bag-of-words baseline of a fine-tuned model: TF-IDF and a linear model of scikit-learn, on the same data.

The baseline takes seconds and shows whether the encoder was worth its training. How many examples it uses depends on
estimated costs, not on a clock, so that an interrupted run reports the same score as an uninterrupted one. `finetune`
calls `score_words` after it has evaluated its model. The functions that need scikit-learn import it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import nn

from heedful.checkpoint import ModelBundle
from heedful.data import Dataset
from heedful.data.examples import Example, MultiLabelExample, ScoredExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.data.sampler import derive_seed, epoch_order
from heedful.random_streams import Stream
from heedful.runs.results import JsonObject, read_predictions
from heedful.tasks.answering import Answer
from heedful.tasks.classify import best_threshold
from heedful.tasks.label_answers import THRESHOLD
from heedful.tasks.metrics import paired_difference
from heedful.tasks.spec import LinearModel
from heedful.tasks.specs import SPECS
from heedful.tasks.task import EvalMetrics, Task, batched
from heedful.train.trainer import Trainer

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

TRAINING_SHARE = 0.1  # share of the training time that the baseline may take
MIN_SECONDS, MAX_SECONDS = 1.0, 10.0  # limits of the time of the baseline
MAX_ROWS = 50_000  # maximum examples per split
READ_SECONDS = 1.1e-7  # seconds for reading a character
SCORE_SECONDS = 7e-5  # seconds for scoring an example
FIT_ROW_SECONDS = 1e-5  # seconds for fitting one output of the linear model to an example
FIT_CHARACTER_SECONDS = 3e-8  # additional seconds for each character of the example
CPU_FLOPS, GPU_FLOPS = 3e11, 1e14  # operations per second, for estimating the training time
MAX_WEIGHTS = 1_000_000  # maximum weights of the linear model; its optimizer needs 200 bytes per weight
BATCH_EXAMPLES = 512  # examples in a batch
METHODS: dict[LinearModel, str] = {  # descriptions of linear models
    "logistic": "TF-IDF and logistic regression",
    "logistic_per_label": "TF-IDF and one logistic regression per label",
    "ridge": "TF-IDF and ridge regression",
}


def linear_model_of(task: Task) -> LinearModel | None:
    """Return the kind of linear model that can learn the task from a bag of words, or None if no kind can."""
    return next((spec.linear_model for spec in SPECS.values() if spec.task is type(task)), None)


# -- sampling of examples ------------------------------------------------------------------------------------


def seconds_allowed(trainer: Trainer, tokens: int) -> float:
    """Return the seconds that the baseline may take: a tenth of the estimated training time, from 1 to 10 s.

    Training costs 6 operations per token and weight outside the embedding tables (Kaplan et al. 2020, table 1).

    Args:
        trainer: The trainer of the run.
        tokens: Tokens in one epoch.
    """
    budget = trainer.settings.budget_seconds
    if budget is not None:
        training_seconds = budget
    else:
        assert trainer.total_steps is not None
        epochs = trainer.total_steps / trainer.order.steps_per_epoch
        tables = {id(module.weight) for module in trainer.loaded.modules() if isinstance(module, nn.Embedding)}
        num_weights = sum(weight.numel() for weight in trainer.loaded.parameters() if id(weight) not in tables)
        flops = CPU_FLOPS if trainer.device.type == "cpu" else GPU_FLOPS
        training_seconds = 6 * num_weights * tokens * epochs / flops
    return min(MAX_SECONDS, max(MIN_SECONDS, TRAINING_SHARE * training_seconds))


def rows_of_splits(
    counts: Mapping[str, int], characters: Mapping[str, int], outputs: int, seconds: float
) -> dict[str, int]:
    """Return how many examples of each split can be used within a time limit.

    These are all examples, up to MAX_ROWS of a split, or the same share of each split.

    Args:
        counts: Counts of examples by split, including "train".
        characters: Counts of characters by split.
        outputs: How many outputs the linear model has.
        seconds: Limit of the time for reading all examples, fitting to train and scoring the other splits.

    >>> rows_of_splits({"train": 100_000, "test": 1000}, {"train": 5_000_000, "test": 50_000}, 1, 10.0)
    {'train': 50000, 'test': 1000}
    >>> rows_of_splits({"train": 50_000, "test": 1000}, {"train": 50_000_000, "test": 10**6}, 1, 5.0)
    {'train': 32552, 'test': 651}
    """
    max_rows = {split: min(MAX_ROWS, count) for split, count in counts.items()}
    # estimated characters of these examples
    max_characters = {split: characters[split] * max_rows[split] / max(1, counts[split]) for split in counts}
    reading = READ_SECONDS * sum(max_characters.values())
    scoring = SCORE_SECONDS * (sum(max_rows.values()) - max_rows["train"])
    fitting = outputs * (FIT_ROW_SECONDS * max_rows["train"] + FIT_CHARACTER_SECONDS * max_characters["train"])
    needed_seconds = reading + scoring + fitting
    share = min(1.0, seconds / needed_seconds) if needed_seconds else 1.0
    return {split: max(1, int(share * rows)) for split, rows in max_rows.items()}


def sample_mask(count: int, rows: int, seed: int) -> NDArray[np.bool_]:
    """Return a mask, [count], that is true for `rows` examples, sampled with the seed."""
    mask = np.zeros(count, dtype=bool)
    mask[epoch_order(count, derive_seed(seed, Stream.BASELINE_WORDS), 0)[:rows]] = True
    return mask


def _sample_examples(
    dataset: Dataset[Example], split: str, count: int, rows: int, seed: int
) -> Iterator[tuple[int, Example]]:
    """Yield (index, example) for `rows` of the `count` examples of a split, sampled with the seed, in their order."""
    if rows >= count:
        yield from enumerate(dataset.examples(split))
        return
    mask = sample_mask(count, rows, seed)
    yield from ((index, example) for index, example in enumerate(dataset.examples(split)) if mask[index])


# -- the model -----------------------------------------------------------------------------------------------


class WordBaseline:
    """A linear model of a task over the TF-IDF of words.

    A pair of texts has three blocks of features: the TF-IDF of the first text, that of the second text, and their
    product. The product is scaled so that its mean squared norm over the training examples is 1.
    """

    def __init__(self, task: Task) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier

        self.task = task
        self.kind = linear_model_of(task)
        self.thresholds: dict[str, float] = {}  # threshold by label, for multi-label tasks; missing: 0.5
        self.pairs = False  # whether examples are pairs of texts
        self.product_scale = 1.0  # factor of the third block of features
        balanced = "balanced" if getattr(task, "weights", ()) else None
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
        match self.kind:
            case "ridge":
                self._estimator = Ridge()
            case "logistic_per_label":
                self._estimator = OneVsRestClassifier(LogisticRegression(class_weight=balanced))
            case _:
                self._estimator = LogisticRegression(class_weight=balanced)

    @property
    def words(self) -> int:
        """The vocabulary size."""
        return len(self._vectorizer.vocabulary_)

    def fit(self, examples: Sequence[Example]) -> None:
        """Fit the vocabulary and the linear model to examples.

        Raises:
            ValueError: If the examples have no words, or a single label.
        """
        self.pairs = any(len(example.texts) > 1 for example in examples)
        # outputs that are fitted at the same time: a regression per label is fitted one after the other
        outputs = len(self.task.labels) if self.kind == "logistic" and len(self.task.labels) > 2 else 1
        feature_blocks = 3 if self.pairs else 1
        self._vectorizer.max_features = max(1, MAX_WEIGHTS // (outputs * feature_blocks))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about convergence and about labels that all examples have
            features = self._fit_features(examples)
            if self.kind == "ridge":
                targets = np.array(
                    [example.score for example in examples if isinstance(example, ScoredExample)], dtype=np.float64
                )
            else:
                targets = np.array([self.task.target(example) for example in examples])  # type: ignore[attr-defined]
            self._estimator.fit(features, targets)

    def answers(self, examples: Sequence[Example]) -> list[Answer]:
        """Return an answer to each example, in the form of an engine's answers."""
        features = self._features(examples)
        if self.kind == "ridge":
            return [{"values": {"score": float(score)}} for score in self._estimator.predict(features)]
        probabilities = np.zeros((len(examples), len(self.task.labels)))
        columns = self._estimator.classes_ if self.kind == "logistic" else slice(None)
        probabilities[:, columns] = self._estimator.predict_proba(features)
        return [self._answer(dict(zip(self.task.labels, row, strict=True))) for row in probabilities.tolist()]

    def _answer(self, probabilities: dict[str, float]) -> Answer:
        """Return the answer for the probabilities by label."""
        if self.kind == "logistic_per_label":
            labels = [
                label
                for label, probability in probabilities.items()
                if probability >= self.thresholds.get(label, THRESHOLD)
            ]
            return {"labels": labels, "probabilities": probabilities}
        label = max(probabilities, key=probabilities.__getitem__)
        return {"label": label, "probability": probabilities[label], "probabilities": probabilities}

    def _texts(self, examples: Sequence[Example]) -> list[str]:
        """Return the first texts of all examples, followed by the second texts if examples are pairs."""
        second = ["".join(example.texts[1:]) for example in examples] if self.pairs else []
        return [example.texts[0] for example in examples] + second

    def _fit_features(self, examples: Sequence[Example]) -> csr_matrix:
        """Fit the vocabulary and the scale of the products, and return the features of the examples."""
        tfidf = self._vectorizer.fit_transform(self._texts(examples))
        if self.pairs:
            first, second = tfidf[: len(examples)], tfidf[len(examples) :]
            sum_of_squares = float(first.multiply(second).power(2).sum())
            self.product_scale = float(np.sqrt(len(examples) / sum_of_squares)) if sum_of_squares else 1.0
        return self._join_pairs(tfidf)

    def _features(self, examples: Sequence[Example]) -> csr_matrix:
        return self._join_pairs(self._vectorizer.transform(self._texts(examples)))

    def _join_pairs(self, tfidf: csr_matrix) -> csr_matrix:
        """Return the features of examples from the TF-IDF of `_texts`. A pair has three blocks of features."""
        from scipy.sparse import hstack

        if not self.pairs:
            return tfidf
        half = tfidf.shape[0] // 2
        first, second = tfidf[:half], tfidf[half:]
        return hstack([first, second, first.multiply(second) * np.float32(self.product_scale)], format="csr")


# -- evaluation ----------------------------------------------------------------------------------------------


def score_words(
    task: Task,
    loaded: ModelBundle,
    dataset: Dataset[Example],
    stats: DatasetStats,
    splits: Sequence[str],
    *,
    seed: int,
    seconds: float,
    folder: Path,
) -> JsonObject:
    """Fit a bag of words on train, score it on splits, and compare it with the predictions of a model.

    Args:
        task: The task, which has a linear model.
        loaded: The model. If it has thresholds of labels, thresholds of the bag of words are tuned on dev too.
        dataset: The data.
        stats: Statistics of the data.
        splits: Names of the splits to score.
        seed: Seed of the sample of examples.
        seconds: Approximate time that the baseline may take.
        folder: The run folder with the predictions of the model.

    Returns:
        The entry "baseline" of results.json: "name", "method", "library", "rows" (sampled training examples), "of" (all
        training examples), "words" (vocabulary size), "seconds", and "splits", each with "numbers", "intervals" and
        "difference": the model's metric minus the baseline's, with a 95 % interval. If nothing can be fitted, "why" is
        the reason.
    """
    kind = linear_model_of(task)
    assert kind is not None, "the task has no linear model"
    outputs = len(task.labels) if kind == "logistic_per_label" or len(task.labels) > 2 else 1
    counts = {split: stats.counts[split] for split in ("train", *splits)}
    rows = rows_of_splits(counts, stats.num_characters, outputs, seconds)
    train = [example for _, example in _sample_examples(dataset, "train", counts["train"], rows["train"], seed)]
    baseline = WordBaseline(task)
    result: JsonObject = {
        "name": "a bag of words",
        "method": METHODS[kind],
        "library": f"scikit-learn {version('scikit-learn')}",
        "rows": rows["train"],
        "of": counts["train"],
    }
    start = time.perf_counter()
    try:
        baseline.fit(train)
    except ValueError as error:  # raised by scikit-learn: no words, or a single label in the sampled rows
        return result | {"why": str(error), "splits": {}}
    del train
    seconds_spent = time.perf_counter() - start
    result |= {"words": baseline.words, "splits": {}}
    for split in sorted(splits, key=lambda split: split != "dev"):  # dev first, since thresholds are tuned on dev
        indexed_examples = list(_sample_examples(dataset, split, counts[split], rows[split], seed))
        start = time.perf_counter()
        if split == "dev" and kind == "logistic_per_label" and loaded.thresholds:
            baseline.thresholds = _tune_thresholds(baseline, [example for _, example in indexed_examples])
        baseline_metrics = measure_words(baseline, indexed_examples)
        seconds_spent += time.perf_counter() - start
        model_metrics = _measure_predictions(task, indexed_examples, read_predictions(folder, split))
        result["splits"][split] = _compare(task, baseline_metrics, model_metrics, len(indexed_examples))
    return result | {"seconds": round(seconds_spent, 2)}


def measure_words(baseline: WordBaseline, indexed_examples: Sequence[tuple[int, Example]]) -> EvalMetrics:
    """Return the metrics of a fitted word baseline on examples of a split.

    Args:
        baseline: The fitted baseline.
        indexed_examples: Pairs (index in the split, example).
    """
    metrics = _main_metric(baseline.task)
    for chunk in batched(indexed_examples, BATCH_EXAMPLES):
        ids = [index for index, _ in chunk]
        examples = [example for _, example in chunk]
        metrics = baseline.task.update_metrics(metrics, examples, baseline.answers(examples), ids)
    return metrics


def _main_metric(task: Task) -> EvalMetrics:
    """Return new metrics with a bootstrap of the main metric only. All bootstraps would cost more than the fit."""
    metrics = task.new_metrics()
    return replace(metrics, bootstraps={task.metric: metrics.bootstraps[task.metric]})


def _measure_predictions(
    task: Task, indexed_examples: Sequence[tuple[int, Example]], predictions: Iterator[JsonObject]
) -> EvalMetrics:
    """Return the metrics of a model on examples of a split.

    Args:
        task: The task.
        indexed_examples: Pairs (index in the split, example).
        predictions: The model's predictions for the whole split, with the index of the example as "id".
    """
    metrics = _main_metric(task)
    example_by_id = dict(indexed_examples)
    sampled_predictions = (prediction for prediction in predictions if prediction["id"] in example_by_id)
    while chunk := list(islice(sampled_predictions, BATCH_EXAMPLES)):
        ids = [prediction["id"] for prediction in chunk]
        examples = [example_by_id[id] for id in ids]
        answers = [prediction["answer"] for prediction in chunk]
        metrics = task.update_metrics(metrics, examples, answers, ids)
    return metrics


def _compare(task: Task, baseline_metrics: EvalMetrics, model_metrics: EvalMetrics, count: int) -> JsonObject:
    """Return the metrics of a baseline, and the difference to a model's metric on the same `count` examples."""
    baseline_numbers = task.compute_metrics(baseline_metrics)
    model_numbers = task.compute_metrics(model_metrics)
    model_replicates = model_metrics.bootstraps[task.metric].values()
    baseline_replicates = baseline_metrics.bootstraps[task.metric].values()
    interval = paired_difference(model_replicates, baseline_replicates, count=count)
    float_numbers = {name: value for name, value in baseline_numbers.items() if isinstance(value, float)}
    return {
        "numbers": float_numbers | {"count": count},
        "intervals": baseline_metrics.intervals(),
        "difference": {"value": model_numbers[task.metric] - baseline_numbers[task.metric]} | interval,
    }


def _tune_thresholds(baseline: WordBaseline, examples: Sequence[Example]) -> dict[str, float]:
    """Return the threshold of each label with the best F1 on these examples."""
    labels = baseline.task.labels
    # both arrays are [examples, labels]
    probabilities = np.array([list(answer["probabilities"].values()) for answer in baseline.answers(examples)])
    has_label = np.array(
        [
            [label in example.labels for label in labels]
            for example in examples
            if isinstance(example, MultiLabelExample)
        ]
    )
    return {label: best_threshold(probabilities[:, index], has_label[:, index]) for index, label in enumerate(labels)}
