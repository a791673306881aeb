"""Statistics of a dataset from one pass (counts, labels, scores), and checks that a model can learn from it.

Runs compute them before training, and plan the training with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from heedful.data.bad_rows import shown
from heedful.data.examples import (
    ChoiceExample,
    Example,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    QuestionExample,
    RankExample,
    ScoredExample,
    TaggedExample,
)
from heedful.data.labelled.check import label_column_warning
from heedful.data.labelled.dataset import Dataset
from heedful.data.tag_schemes import OUTSIDE
from heedful.errors import DataError

MAX_ABS_SCORE = 1e30  # maximum absolute score for training in float32
MIN_RELATIVE_STD = 100 * 2.0**-23  # minimum of std of scores / maximum absolute score, since biases are float32


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStats:
    """Statistics of all examples.

    Fields without "by split" describe the first split: train, unless other splits are evaluated alone.
    """

    counts: dict[str, int]  # examples by split
    labels: Counter[str]  # examples, or words, by label
    # labels that the first split lacks, by split; splits without such labels are left out
    unseen_labels: Mapping[str, Counter[str]] = field(default_factory=dict)
    min_score: float | None = None  # None: the examples have no scores
    max_score: float | None = None
    score_mean: float = 0.0
    score_std: float = 1.0
    constant_score_splits: tuple[str, ...] = ()  # splits with constant scores, for which no correlation is defined
    splits_with_unanswerable: tuple[str, ...] = ()  # splits with questions that have no answer
    num_characters: Mapping[str, int] = field(default_factory=dict)  # characters of all texts, by split
    num_documents: int = 0  # documents of all queries
    max_relevance: float = 0.0  # highest relevance of a document
    # queries whose documents differ in relevance, by split; {}: the examples are not queries
    num_rankable_queries: Mapping[str, int] = field(default_factory=dict)
    has_teacher_scores: bool = False  # whether all documents, or the texts of all pairs, have teacher scores

    @property
    def non_empty_splits(self) -> tuple[str, ...]:
        """The splits with examples."""
        return tuple(split for split, count in self.counts.items() if count)

    @property
    def has_unanswerable(self) -> bool:
        """Whether train or dev has unanswerable questions."""
        return not {"train", "dev"}.isdisjoint(self.splits_with_unanswerable)


@dataclass(slots=True)
class _ScoreStats:
    """Range, mean and standard deviation of scores, from one pass (Welford 1962)."""

    count: int = 0
    minimum: float = inf
    maximum: float = -inf
    mean: float = 0.0
    sum_of_squares: float = 0.0  # sum of squared deviations from the mean

    def add(self, score: float) -> None:
        self.count += 1
        self.minimum = min(self.minimum, score)
        self.maximum = max(self.maximum, score)
        delta = score - self.mean
        self.mean += delta / self.count
        self.sum_of_squares += delta * (score - self.mean)

    @property
    def std(self) -> float:
        """The population standard deviation, or 1 if it is 0, since scores are divided by it."""
        return sqrt(self.sum_of_squares / self.count) if self.sum_of_squares else 1.0


@dataclass(slots=True)
class _SplitStats:
    """Statistics of one split, from one pass. The fields are explained in `DatasetStats`."""

    count: int = 0
    num_characters: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    scores: _ScoreStats = field(default_factory=_ScoreStats)
    has_unanswerable: bool = False
    num_documents: int = 0
    max_relevance: float = 0.0
    num_rankable_queries: int = 0
    num_with_teacher_scores: int = 0

    def add(self, example: Example) -> None:
        self.count += 1
        self.num_characters += sum(map(len, example.texts))
        match example:
            case LabelledExample():
                self.labels[example.label] += 1
            case MultiLabelExample():
                self.labels.update(example.labels)
            case TaggedExample():
                self.labels.update(example.tags)
            case QuestionExample(answers=()):
                self.has_unanswerable = True
            case RankExample():
                self.num_documents += len(example.documents)
                self.max_relevance = max(self.max_relevance, *example.relevance)
                self.num_rankable_queries += len({*example.relevance}) > 1
                self.num_with_teacher_scores += bool(example.teacher_scores)
            case PairExample(score=None):
                self.num_with_teacher_scores += bool(example.teacher_scores)
            case ScoredExample() | PairExample():
                assert example.score is not None
                self.scores.add(example.score)


def compute_stats(dataset: Dataset[Example], splits: Sequence[str]) -> DatasetStats:
    """Compute statistics of splits in one pass.

    Raises:
        DataError: If the first split has no examples.
    """
    by_split = {split: _SplitStats() for split in splits}
    for split, stats in by_split.items():
        for example in dataset.examples(split):
            stats.add(example)
    counts = {split: stats.count for split, stats in by_split.items()}
    first = by_split[splits[0]]
    # if all examples are in the generated dev split, dev_split_problem reports it
    if not first.count and not (dataset.has_generated_dev and counts.get("dev")):
        raise DataError(f"{splits[0]} has no examples: nothing can be learned or measured")
    labels = {split: stats.labels for split, stats in by_split.items()}
    scores = {split: stats.scores for split, stats in by_split.items() if stats.scores.count}
    rankable = {split: stats.num_rankable_queries for split, stats in by_split.items()}
    return DatasetStats(
        counts=counts,
        labels=first.labels,
        unseen_labels=_unseen_labels(labels, are_tags=dataset.kind is TaggedExample),
        min_score=first.scores.minimum if first.scores.count else None,
        max_score=first.scores.maximum if first.scores.count else None,
        score_mean=first.scores.mean,
        score_std=first.scores.std,
        constant_score_splits=tuple(split for split, stats in scores.items() if stats.minimum == stats.maximum),
        splits_with_unanswerable=tuple(split for split, stats in by_split.items() if stats.has_unanswerable),
        num_characters={split: stats.num_characters for split, stats in by_split.items()},
        num_documents=first.num_documents,
        max_relevance=first.max_relevance,
        num_rankable_queries=rankable if dataset.kind is RankExample else {},
        has_teacher_scores=0 < first.count == first.num_with_teacher_scores,
    )


def _unseen_labels(labels: Mapping[str, Counter[str]], *, are_tags: bool) -> dict[str, Counter[str]]:
    """Return the labels of each split that the first split lacks. Splits without such labels are left out.

    Tags I-x are not reported, since they continue entities whose tag B-x is reported.
    """
    first, *other_splits = labels
    unseen: dict[str, Counter[str]] = {}
    for split in other_splits:
        counts: Counter[str] = Counter()
        for label, count in labels[split].items():
            if label not in labels[first] and not (are_tags and label.startswith("I-")):
                counts[label] = count
        if counts:
            unseen[split] = counts
    return unseen


def split_warnings(stats: DatasetStats) -> list[str]:
    """Return warnings about empty splits, labels that are missing in train, and unanswerable questions."""
    warnings = [
        f"{split} has no examples and is left out" for split in stats.counts if split not in stats.non_empty_splits
    ]
    for split, labels in stats.unseen_labels.items():
        listed = ", ".join(f"{shown(label)} ({count:,})" for label, count in labels.most_common(10))
        warnings.append(f"{split} has labels that do not occur in train, so that they cannot be learned: {listed}")
    if stats.splits_with_unanswerable and not stats.has_unanswerable:
        warnings += [
            f"{split} has unanswerable questions, but train and dev have none: the model is not trained to recognise "
            "them; in the evaluation of this split the no-answer threshold is 0"
            for split in stats.splits_with_unanswerable
        ]
    return warnings


def dev_split_problem(dataset: Dataset[Example], stats: DatasetStats) -> str:
    """Return why no dev split can be generated from train, or "" if it can or if there is a dev split already."""
    if not dataset.has_generated_dev:
        return ""
    train = stats.counts.get("train", 0)
    dev = stats.counts.get("dev", 0)
    if not train or not dev:
        groups = {QuestionExample: "contexts", ChoiceExample: "prompts", RankExample: "queries"}
        share = f"{'none' if train else 'all'} of the {train + dev:,} examples"
        return (
            f"no dev split can be made: the hash of their {groups.get(dataset.kind, 'texts')} would put {share} into it"
        )
    if "dev" in stats.constant_score_splits:
        return f"no dev split can be made: all scores of its {dev:,} examples would be the same"
    if stats.num_rankable_queries and not stats.num_rankable_queries["dev"]:
        return f"no dev split can be made: none of its {dev:,} queries would have documents that differ in relevance"
    return ""


def check_learnable(dataset: Dataset[Example], stats: DatasetStats) -> None:
    """Raise DataError if train has a single label, constant scores or scores beyond float32, so nothing can be learned.

    Args:
        dataset: the dataset.
        stats: statistics of train and the other splits.
    """
    if dataset.kind in (LabelledExample, MultiLabelExample):
        _check_labels(dataset, stats)
    if dataset.labels == (OUTSIDE,):
        raise DataError(f'all words of train have the tag "{OUTSIDE}": there are no entities to learn')
    if dataset.kind is RankExample and not stats.num_rankable_queries["train"]:
        raise DataError(
            f"none of the {stats.counts['train']:,} queries of train has documents that differ in relevance: nothing "
            "can be ranked. Give each query relevant and irrelevant documents"
        )
    if stats.min_score is not None and stats.max_score is not None:
        _check_scores(dataset.kind, stats, stats.min_score, stats.max_score)


def _check_labels(dataset: Dataset[Example], stats: DatasetStats) -> None:
    """Raise DataError if there are too few labels, or labels that look like ids or texts."""
    min_labels = 2 if dataset.kind is LabelledExample else 1
    if len(stats.labels) < min_labels:
        only_label = next((f"the label {shown(label)}" for label in stats.labels), "no label")
        advice = ""
        if dataset.has_generated_dev:
            advice = "; a part of train became the dev split: data.dev_fraction=0 keeps all of it in train"
        raise DataError(f"all examples of train have {only_label}: there is nothing to distinguish{advice}")
    if warning := label_column_warning(stats.labels, sum(stats.counts.values())):
        raise DataError(warning)


def _check_scores(kind: type[Example], stats: DatasetStats, min_score: float, max_score: float) -> None:
    """Raise DataError if scores are constant, or too large or too close to each other for float32."""
    max_abs_score = max(abs(min_score), abs(max_score))
    if kind is ScoredExample and max_abs_score > MAX_ABS_SCORE:
        raise DataError(
            f"scores of train go from {min_score:g} to {max_score:g}: scale them down below {MAX_ABS_SCORE:g}"
        )
    if min_score == max_score:
        advice = ""
        if kind is PairExample:
            advice = "; leave the column out (--data.columns.score='[]') to learn that the texts of each pair belong "
            advice += "together"
        raise DataError(f"all scores of train are {min_score:g}: nothing can be learned from them{advice}")
    if kind is ScoredExample and stats.score_std < MIN_RELATIVE_STD * max_abs_score:
        raise DataError(
            f"scores of train, from {min_score:.12g} to {max_score:.12g}, vary too little for their size to be "
            f"represented in float32: subtract about {stats.score_mean:.12g} from all of them"
        )
