"""The bag-of-words baseline of a fine-tuned model: TF-IDF and a linear model of scikit-learn, on the same data.

The baseline takes seconds and shows whether the encoder was worth its training. How many examples it uses depends on
estimated costs, not on a clock, so that an interrupted run reports the same score as an uninterrupted one. The
functions that need scikit-learn import it.
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
READ_SECONDS = 1.1e-7  # seconds per character for reading
SCORE_SECONDS = 7e-5  # seconds per example for scoring
FIT_ROW_SECONDS = 1e-5  # seconds per training example and output of the linear model
FIT_CHARACTER_SECONDS = 3e-8  # seconds per character of the training examples and output of the linear model
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
        seconds = budget
    else:
        assert trainer.total_steps is not None
        tables = {id(module.weight) for module in trainer.loaded.modules() if isinstance(module, nn.Embedding)}
        weights = sum(weight.numel() for weight in trainer.loaded.parameters() if id(weight) not in tables)
        speed = CPU_FLOPS if trainer.device.type == "cpu" else GPU_FLOPS
        seconds = 6 * weights * tokens * trainer.total_steps / trainer.order.steps_per_epoch / speed
    return min(MAX_SECONDS, max(MIN_SECONDS, TRAINING_SHARE * seconds))


def rows_of_splits(
    counts: Mapping[str, int], characters: Mapping[str, int], outputs: int, seconds: float
) -> dict[str, int]:
    """Return how many examples of each split can be used in a time: all, or the same share of each split.

    Args:
        counts: Counts of examples by split, including "train".
        characters: Counts of characters by split.
        outputs: How many outputs the linear model has.
        seconds: Time for reading all examples, fitting to train and scoring the other splits.

    >>> rows_of_splits({"train": 100_000, "test": 1000}, {"train": 5_000_000, "test": 50_000}, 1, 10.0)
    {'train': 50000, 'test': 1000}
    >>> rows_of_splits({"train": 50_000, "test": 1000}, {"train": 50_000_000, "test": 10**6}, 1, 5.0)
    {'train': 32552, 'test': 651}
    """
    rows = {split: min(MAX_ROWS, count) for split, count in counts.items()}
    sizes = {split: characters[split] * rows[split] / max(1, counts[split]) for split in rows}
    reading = READ_SECONDS * sum(sizes.values())
    scoring = SCORE_SECONDS * (sum(rows.values()) - rows["train"])
    fitting = outputs * (FIT_ROW_SECONDS * rows["train"] + FIT_CHARACTER_SECONDS * sizes["train"])
    cost = reading + scoring + fitting
    share = min(1.0, seconds / cost) if cost else 1.0
    return {split: max(1, int(share * count)) for split, count in rows.items()}


def sample_mask(count: int, rows: int, seed: int) -> NDArray[np.bool_]:
    """Return a mask, [count], that is true for `rows` examples, sampled with the seed."""
    mask = np.zeros(count, dtype=bool)
    mask[epoch_order(count, derive_seed(seed, Stream.BASELINE_WORDS), 0)[:rows]] = True
    return mask


def _sample_examples(
    source: Dataset[Example], split: str, count: int, rows: int, seed: int
) -> Iterator[tuple[int, Example]]:
    """Yield (index, example) for `rows` of the `count` examples of a split, sampled with the seed, in their order."""
    if rows >= count:
        yield from enumerate(source.examples(split))
        return
    mask = sample_mask(count, rows, seed)
    yield from ((index, example) for index, example in enumerate(source.examples(split)) if mask[index])


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
        outputs = len(self.task.labels) if self.kind == "logistic" and len(self.task.labels) > 2 else 1
        self._vectorizer.max_features = max(1, MAX_WEIGHTS // (outputs * (3 if self.pairs else 1)))
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
            squares = float(tfidf[: len(examples)].multiply(tfidf[len(examples) :]).power(2).sum())
            self.product_scale = float(np.sqrt(len(examples) / squares)) if squares else 1.0
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
    source: Dataset[Example],
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
        source: The data.
        stats: Statistics of the data.
        splits: Names of the splits to score.
        seed: Seed of the sample of examples.
        seconds: Approximate time that the baseline may take.
        folder: The run folder with the predictions of the model.

    Returns:
        Plain data: the method, how many "rows" "of" train were used, the vocabulary size, "seconds", and for each split
        "numbers", "intervals" and "difference", which is the model's metric minus the baseline's, with a 95 % interval.
        If nothing can be fitted, "why" is the reason.
    """
    kind = linear_model_of(task)
    assert kind is not None, "the task has no linear model"
    outputs = len(task.labels) if kind == "logistic_per_label" or len(task.labels) > 2 else 1
    counts = {split: stats.counts[split] for split in ("train", *splits)}
    rows = rows_of_splits(counts, stats.num_characters, outputs, seconds)
    train = [example for _, example in _sample_examples(source, "train", counts["train"], rows["train"], seed)]
    words = WordBaseline(task)
    result: JsonObject = {
        "name": "a bag of words",
        "method": METHODS[kind],
        "library": f"scikit-learn {version('scikit-learn')}",
        "rows": rows["train"],
        "of": counts["train"],
    }
    began = time.perf_counter()
    try:
        words.fit(train)
    except ValueError as error:  # raised by scikit-learn: no words, or a single label in the sampled rows
        return result | {"why": str(error), "splits": {}}
    del train
    spent = time.perf_counter() - began
    result |= {"words": words.words, "splits": {}}
    for split in sorted(splits, key=lambda split: split != "dev"):  # dev first, since thresholds are tuned on dev
        indexed = list(_sample_examples(source, split, counts[split], rows[split], seed))
        began = time.perf_counter()
        if split == "dev" and kind == "logistic_per_label" and loaded.thresholds:
            words.thresholds = _tune_thresholds(words, [example for _, example in indexed])
        baseline = measure_words(words, indexed)
        spent += time.perf_counter() - began
        model = _measure_predictions(task, indexed, read_predictions(folder, split))
        result["splits"][split] = _compare(task, baseline, model, len(indexed))
    return result | {"seconds": round(spent, 2)}


def measure_words(words: WordBaseline, indexed: Sequence[tuple[int, Example]]) -> EvalMetrics:
    """Return the metrics of a word baseline on examples, which are pairs (index in the split, example)."""
    metrics = _main_metric(words.task)
    for chunk in batched(indexed, BATCH_EXAMPLES):
        ids = [index for index, _ in chunk]
        examples = [example for _, example in chunk]
        metrics = words.task.update_metrics(metrics, examples, words.answers(examples), ids)
    return metrics


def _main_metric(task: Task) -> EvalMetrics:
    """Return new metrics with a bootstrap of the main metric only. All bootstraps would cost more than the fit."""
    metrics = task.new_metrics()
    return replace(metrics, bootstraps={task.metric: metrics.bootstraps[task.metric]})


def _measure_predictions(
    task: Task, indexed: Sequence[tuple[int, Example]], lines: Iterator[JsonObject]
) -> EvalMetrics:
    """Return the metrics of a model on examples, (index, example), from the lines of its predictions."""
    metrics = _main_metric(task)
    examples = dict(indexed)
    matching = (line for line in lines if line["id"] in examples)
    while chunk := list(islice(matching, BATCH_EXAMPLES)):
        ids = [line["id"] for line in chunk]
        metrics = task.update_metrics(metrics, [examples[id] for id in ids], [line["answer"] for line in chunk], ids)
    return metrics


def _compare(task: Task, baseline: EvalMetrics, model: EvalMetrics, count: int) -> JsonObject:
    """Return the metrics of a baseline, and the difference to a model's metric on the same `count` examples."""
    numbers = task.compute_metrics(baseline)
    model_numbers = task.compute_metrics(model)
    model_replicates = model.bootstraps[task.metric].values()
    baseline_replicates = baseline.bootstraps[task.metric].values()
    interval = paired_difference(model_replicates, baseline_replicates, count=count)
    return {
        "numbers": {name: value for name, value in numbers.items() if isinstance(value, float)} | {"count": count},
        "intervals": baseline.intervals(),
        "difference": {"value": model_numbers[task.metric] - numbers[task.metric]} | interval,
    }


def _tune_thresholds(words: WordBaseline, examples: Sequence[Example]) -> dict[str, float]:
    """Return the threshold of each label with the best F1 on these examples."""
    labels = words.task.labels
    probabilities = np.array([list(answer["probabilities"].values()) for answer in words.answers(examples)])
    has_label = np.array(
        [
            [label in example.labels for label in labels]
            for example in examples
            if isinstance(example, MultiLabelExample)
        ]
    )
    return {label: best_threshold(probabilities[:, k], has_label[:, k]) for k, label in enumerate(labels)}
