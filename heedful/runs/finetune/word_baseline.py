"""The bag-of-words baseline of a fine-tuned model: TF-IDF and a linear model of scikit-learn, on the same rows.

It takes seconds and shows whether the encoder was worth its training. scikit-learn is imported by the functions that
need it. The rows that are read depend on counts only, not on a clock, so that an interrupted run reports the same
score as an uninterrupted one.
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

SECONDS, SHARE = 10.0, 0.1  # limits: seconds, and share of the training time
LEAST = 1.0  # seconds that are allowed however short the training is
ROWS = 50_000  # read of a split, at most
READ, SCORE = 1.1e-7, 7e-5  # seconds per character read, and per row scored
ROW, TERM = 1e-5, 3e-8  # seconds per training row, and per character of them, for each output of the linear model
FLOPS = {"cpu": 3e11}  # operations per second of training, to estimate its time
FLOPS_OF_OTHERS = 1e14  # of a GPU
WEIGHTS = 1_000_000  # of the linear model: its optimizer needs 200 bytes for each
CHUNK = 512  # rows of a batch
METHODS: dict[LinearModel, str] = {
    "logistic": "TF-IDF and logistic regression",
    "logistic_per_label": "TF-IDF and one logistic regression per label",
    "ridge": "TF-IDF and ridge regression",
}


def linear_model_of(task: Task) -> LinearModel | None:
    """The kind of linear model that learns the task from a bag of words; None if none does."""
    return next((spec.linear_model for spec in SPECS.values() if spec.task is type(task)), None)


# -- how many rows -------------------------------------------------------------------------------------------


def seconds_allowed(trainer: Trainer, tokens: int) -> float:
    """Estimate a tenth of the training time, within LEAST and SECONDS.

    A pass over a token costs 6 operations per weight outside the embedding tables (Kaplan et al. 2020, table 1).

    Args:
        trainer: Of the run.
        tokens: Of one epoch.
    """
    budget = trainer.settings.budget_seconds
    if budget is not None:
        seconds = budget
    else:
        assert trainer.total_steps is not None
        tables = {id(module.weight) for module in trainer.loaded.modules() if isinstance(module, nn.Embedding)}
        weights = sum(weight.numel() for weight in trainer.loaded.parameters() if id(weight) not in tables)
        speed = FLOPS.get(trainer.device.type, FLOPS_OF_OTHERS)
        seconds = 6 * weights * tokens * trainer.total_steps / trainer.order.steps_per_epoch / speed
    return min(SECONDS, max(LEAST, SHARE * seconds))


def rows_of_splits(
    counts: Mapping[str, int], characters: Mapping[str, int], outputs: int, seconds: float
) -> dict[str, int]:
    """Return the rows of each split that can be read in about `seconds`: all, or the same share of each split.

    >>> rows_of_splits({"train": 100_000, "test": 1000}, {"train": 5_000_000, "test": 50_000}, 1, 10.0)
    {'train': 50000, 'test': 1000}
    >>> rows_of_splits({"train": 50_000, "test": 1000}, {"train": 50_000_000, "test": 10**6}, 1, 5.0)
    {'train': 32552, 'test': 651}
    """
    rows = {split: min(ROWS, count) for split, count in counts.items()}
    sizes = {split: characters[split] * rows[split] / max(1, counts[split]) for split in rows}
    scored = sum(rows.values()) - rows["train"]
    cost = READ * sum(sizes.values()) + SCORE * scored + outputs * (ROW * rows["train"] + TERM * sizes["train"])
    share = min(1.0, seconds / cost) if cost else 1.0
    return {split: max(1, int(share * count)) for split, count in rows.items()}


def sample_mask(count: int, rows: int, seed: int) -> NDArray[np.bool_]:
    """A mask of `rows` of `count` rows, sampled by the seed."""
    chosen = np.zeros(count, dtype=bool)
    chosen[epoch_order(count, derive_seed(seed, Stream.BASELINE_WORDS), 0)[:rows]] = True
    return chosen


def _sampled(source: Dataset[Example], split: str, count: int, rows: int, seed: int) -> Iterator[tuple[int, Example]]:
    """Yield `rows` examples of a split, sampled by the seed, with their numbers, in the order of the split."""
    if rows >= count:
        yield from enumerate(source.examples(split))
        return
    chosen = sample_mask(count, rows, seed)
    yield from ((number, example) for number, example in enumerate(source.examples(split)) if chosen[number])


# -- the model -----------------------------------------------------------------------------------------------


class WordBaseline:
    """TF-IDF of words, and a linear model of a task over it.

    A pair of texts has three blocks of features: those of the first text, those of the second, and their product,
    scaled on the training rows to the same root mean square as the others.
    """

    def __init__(self, task: Task) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier

        self.task, self.kind = task, linear_model_of(task)
        self.thresholds: dict[str, float] = {}  # of labels, where any number may be given; 0.5 for the others
        self.pairs, self.scale = False, 1.0
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
        """The size of the vocabulary."""
        return len(self._vectorizer.vocabulary_)

    def fit(self, examples: Sequence[Example]) -> None:
        """Fit to examples.

        Raises:
            ValueError: If they have no words, or a single label.
        """
        self.pairs = any(len(example.texts) > 1 for example in examples)
        outputs = len(self.task.labels) if self.kind == "logistic" and len(self.task.labels) > 2 else 1
        self._vectorizer.max_features = max(1, WEIGHTS // (outputs * (3 if self.pairs else 1)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about too few steps, and labels that all rows have
            features = self._fitted(examples)
            if self.kind == "ridge":
                targets = np.array(
                    [example.score for example in examples if isinstance(example, ScoredExample)], dtype=np.float64
                )
            else:
                targets = np.array([self.task.target(example) for example in examples])  # type: ignore[attr-defined]
            self._estimator.fit(features, targets)

    def answers(self, examples: Sequence[Example]) -> list[Answer]:
        """Predict in the form of an engine's answers."""
        features = self._features(examples)
        if self.kind == "ridge":
            return [{"values": {"score": float(score)}} for score in self._estimator.predict(features)]
        shares = np.zeros((len(examples), len(self.task.labels)))
        columns = self._estimator.classes_ if self.kind == "logistic" else slice(None)
        shares[:, columns] = self._estimator.predict_proba(features)
        return [self._answer(dict(zip(self.task.labels, row, strict=True))) for row in shares.tolist()]

    def _answer(self, shares: dict[str, float]) -> Answer:
        if self.kind == "logistic_per_label":
            labels = [name for name, share in shares.items() if share >= self.thresholds.get(name, THRESHOLD)]
            return {"labels": labels, "probabilities": shares}
        label = max(shares, key=shares.__getitem__)
        return {"label": label, "probability": shares[label], "probabilities": shares}

    def _texts(self, examples: Sequence[Example]) -> list[str]:
        """All first texts, and where there are pairs all second ones after them."""
        second = ["".join(example.texts[1:]) for example in examples] if self.pairs else []
        return [example.texts[0] for example in examples] + second

    def _fitted(self, examples: Sequence[Example]) -> csr_matrix:
        """Fit the vocabulary and the scale of the products, and return the features of the examples."""
        read = self._vectorizer.fit_transform(self._texts(examples))
        if self.pairs:
            squares = float(read[: len(examples)].multiply(read[len(examples) :]).power(2).sum())
            self.scale = float(np.sqrt(len(examples) / squares)) if squares else 1.0
        return self._joined(read)

    def _features(self, examples: Sequence[Example]) -> csr_matrix:
        return self._joined(self._vectorizer.transform(self._texts(examples)))

    def _joined(self, read: csr_matrix) -> csr_matrix:
        """Features of texts; of pairs those of both texts and their product."""
        from scipy.sparse import hstack

        if not self.pairs:
            return read
        half = read.shape[0] // 2
        first, second = read[:half], read[half:]
        return hstack([first, second, first.multiply(second) * np.float32(self.scale)], format="csr")


# -- its score -----------------------------------------------------------------------------------------------


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
    """Fit a bag of words on train, score it on `splits`, and compare it with the model's predictions in `folder`.

    Thresholds of labels are fitted on dev where those of `loaded` are. The result is plain data: what was fitted, on
    how many rows, in how many "seconds", and for each split "numbers", "intervals" and the "difference" of the model's
    metric and this one's, with its 95 % interval; or, where nothing can be fitted, "why".
    """
    kind = linear_model_of(task)
    assert kind is not None, "linear_model_of tells"
    outputs = len(task.labels) if kind == "logistic_per_label" or len(task.labels) > 2 else 1
    counts = {split: stats.counts[split] for split in ("train", *splits)}
    rows = rows_of_splits(counts, stats.num_characters, outputs, seconds)
    train = [example for _, example in _sampled(source, "train", counts["train"], rows["train"], seed)]
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
    except ValueError as error:  # of scikit-learn: no words, or a single label in the sampled rows
        return result | {"why": str(error), "splits": {}}
    del train
    spent = time.perf_counter() - began
    result |= {"words": words.words, "splits": {}}
    for split in sorted(splits, key="dev".__ne__):  # dev is first, where thresholds are fitted
        numbered = list(_sampled(source, split, counts[split], rows[split], seed))
        began = time.perf_counter()
        if split == "dev" and kind == "logistic_per_label" and loaded.thresholds:
            words.thresholds = _thresholds(words, [example for _, example in numbered])
        baseline = measure_words(words, numbered)
        spent += time.perf_counter() - began
        result["splits"][split] = _compared(
            task, baseline, _as_answered(task, numbered, read_predictions(folder, split)), numbered
        )
    return result | {"seconds": round(spent, 2)}


def measure_words(words: WordBaseline, numbered: Sequence[tuple[int, Example]]) -> EvalMetrics:
    """Answer numbered examples and measure the answers."""
    measure = _metric_alone(words.task)
    for chunk in batched(numbered, CHUNK):
        examples = [example for _, example in chunk]
        measure = words.task.update_metrics(measure, examples, words.answers(examples), [number for number, _ in chunk])
    return measure


def _metric_alone(task: Task) -> EvalMetrics:
    """Metrics with bootstrap replicates for the main metric only: they cost more than the linear model."""
    measure = task.new_metrics()
    return replace(measure, bootstraps={task.metric: measure.bootstraps[task.metric]})


def _as_answered(task: Task, numbered: Sequence[tuple[int, Example]], lines: Iterator[JsonObject]) -> EvalMetrics:
    """Score the model's answers to the same examples, read from its predictions."""
    measure, examples = _metric_alone(task), dict(numbered)
    wanted = (line for line in lines if line["id"] in examples)
    while chunk := list(islice(wanted, CHUNK)):
        ids = [line["id"] for line in chunk]
        measure = task.update_metrics(measure, [examples[n] for n in ids], [line["answer"] for line in chunk], ids)
    return measure


def _compared(
    task: Task, baseline: EvalMetrics, model: EvalMetrics, numbered: Sequence[tuple[int, Example]]
) -> JsonObject:
    numbers, mine = task.compute_metrics(baseline), task.compute_metrics(model)
    scores = {
        "numbers": {name: value for name, value in numbers.items() if isinstance(value, float)}
        | {"count": len(numbered)},
        "intervals": baseline.intervals(),
    }
    values = [measure.bootstraps[task.metric].values() for measure in (model, baseline)]
    difference = {"value": mine[task.metric] - numbers[task.metric]}
    return scores | {"difference": difference | paired_difference(values[0], values[1], count=len(numbered))}


def _thresholds(words: WordBaseline, examples: Sequence[Example]) -> dict[str, float]:
    """Each label's threshold with the best F1 on these examples."""
    labels = words.task.labels
    shares = np.array([list(answer["probabilities"].values()) for answer in words.answers(examples)])
    gold = np.array(
        [
            [label in example.labels for label in labels]
            for example in examples
            if isinstance(example, MultiLabelExample)
        ]
    )
    return {label: best_threshold(shares[:, k], gold[:, k]) for k, label in enumerate(labels)}
