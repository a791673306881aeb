"""Statistics of a dataset from one pass: counts, labels, scores; and checks that it can be learned from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

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

LARGEST = 1e30  # largest score that can be trained on, in float32
FINE = 100 * 2.0**-23  # least std relative to the distance from 0: the last bias is float32


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStats:
    """Statistics of all examples."""

    counts: dict[str, int]  # number of examples by split
    labels: Counter[str]  # of the first split, as are the scores
    low: float | None  # None: the examples have no scores
    high: float | None
    unanswered: tuple[str, ...] = ()  # splits with unanswerable questions
    unlearned: Mapping[str, Counter[str]] = field(
        default_factory=dict
    )  # labels of other splits that the first split lacks
    mean: float = 0.0  # of the scores
    deviation: float = 1.0
    characters: Mapping[str, int] = field(default_factory=dict)  # characters of all texts by split
    documents: int = 0  # of all queries of the first split
    max_relevance: float = 0.0  # of its documents
    rankable: Mapping[str, int] = field(
        default_factory=dict
    )  # queries whose documents differ in relevance, by split; {}: the examples are no queries
    has_teacher_scores: bool = False  # whether documents, or pairs, have scores of a teacher
    alike: tuple[str, ...] = ()  # splits whose scores are all equal, so that correlations are undefined

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits with examples."""
        return tuple(split for split, count in self.counts.items() if count)

    @property
    def impossible(self) -> bool:
        """Whether train or dev has unanswerable questions."""
        return not {"train", "dev"}.isdisjoint(self.unanswered)


def compute_stats(source: Dataset[Example], splits: Sequence[str]) -> DatasetStats:
    """Compute statistics of splits in one pass.

    Raises:
        DataError: If the first split has no examples.
    """
    labels: dict[str, Counter[str]] = {split: Counter() for split in splits}
    ranges: dict[str, tuple[float, float]] = {}  # (lowest, highest) score by split
    seen, mean, squares = 0, 0.0, 0.0  # running mean and sum of squared deviations (Welford 1962)
    unanswered: dict[str, bool] = {}
    documents, max_relevance, has_teacher_scores = 0, 0.0, False
    rankable: dict[str, int] = dict.fromkeys(splits, 0) if source.kind is RankExample else {}
    counts, characters = dict.fromkeys(splits, 0), dict.fromkeys(splits, 0)
    for split in splits:
        for example in source.examples(split):
            counts[split] += 1
            characters[split] += sum(map(len, example.texts))
            match example:
                case LabelledExample(label=label):
                    labels[split][label] += 1
                case MultiLabelExample(labels=several) | TaggedExample(tags=several):
                    labels[split].update(several)
                case QuestionExample(answers=()):
                    unanswered[split] = True
                case RankExample(relevance=relevance, teacher_scores=scores):
                    rankable[split] += len({*relevance}) > 1
                    has_teacher_scores = bool(scores)
                    if split == splits[0]:
                        documents, max_relevance = documents + len(relevance), max(max_relevance, *relevance)
                case PairExample(score=None, teacher_scores=scores):
                    has_teacher_scores = bool(scores)
                case ScoredExample(score=float(score)) | PairExample(score=float(score)):
                    lowest, highest = ranges.get(split, (score, score))
                    ranges[split] = min(lowest, score), max(highest, score)
                    if split == splits[0]:
                        seen, away = seen + 1, score - mean
                        mean += away / seen
                        squares += away * (score - mean)
    if not counts[splits[0]] and not (source.has_generated_dev and counts.get("dev")):
        raise DataError(f"{splits[0]} has no examples: nothing can be learned or measured")
    low, high = ranges.get(splits[0], (None, None))
    return DatasetStats(
        counts=counts,
        labels=labels[splits[0]],
        low=low,
        high=high,
        unanswered=tuple(unanswered),
        unlearned=_unlearned(source, labels, splits),
        mean=mean,
        deviation=sqrt(squares / seen) if squares else 1.0,
        characters=characters,
        documents=documents,
        max_relevance=max_relevance,
        rankable=rankable,
        has_teacher_scores=has_teacher_scores,
        alike=tuple(split for split, (lowest, highest) in ranges.items() if lowest == highest),
    )


def _unlearned(
    source: Dataset[Example], labels: Mapping[str, Counter[str]], splits: Sequence[str]
) -> dict[str, Counter[str]]:
    """Labels of other splits that the first split lacks; of tags only those that begin an entity."""
    first, *others = splits
    inside = ("I-",) if source.kind is TaggedExample else ()
    missing = {
        split: Counter(
            {label: n for label, n in labels[split].items() if not labels[first][label] and label[:2] not in inside}
        )
        for split in others
    }
    return {split: lacking for split, lacking in missing.items() if lacking}


def split_warnings(stats: DatasetStats) -> list[str]:
    """Warnings about empty splits, labels missing in train, and unanswerable questions."""
    warnings = [f"{split} has no examples and is left out" for split in stats.counts if split not in stats.splits]
    for split, labels in stats.unlearned.items():
        some = ", ".join(f"{shown(label)} ({count:,})" for label, count in labels.most_common(10))
        warnings.append(f"{split} has labels that nothing is learned of, since no example of train has them: {some}")
    if stats.unanswered and not stats.impossible:
        splits = " and ".join(stats.unanswered)
        warnings.append(
            f"{splits} has questions without answers, and neither train nor dev has: to tell them is not learned, and "
            "only where they are measured may there be no answer, above a threshold of 0"
        )
    return warnings


def dev_split_problem(source: Dataset[Example], stats: DatasetStats) -> str:
    """Why no dev split can be generated from train; "" if it can, or a dev split was given."""
    train, dev = (stats.counts.get(split, 0) for split in ("train", "dev"))
    if source.has_generated_dev and train and dev and "dev" in stats.alike:
        return f"no dev split can be made: all scores of its {dev:,} examples would be the same"
    if source.has_generated_dev and train and dev and stats.rankable and not stats.rankable["dev"]:
        return f"no dev split can be made: none of its {dev:,} queries would have documents that differ in relevance"
    if not source.has_generated_dev or (train and dev):
        return ""
    what = {QuestionExample: "contexts", ChoiceExample: "prompts", RankExample: "queries"}.get(source.kind, "texts")
    share = f"{'none' if train else 'all'} of the {train + dev:,} examples"
    return f"no dev split can be made: chosen by a hash of their {what}, {share} would be in it"


def check_learnable(source: Dataset[Example], stats: DatasetStats) -> None:
    """Raise DataError if nothing can be learned: a single label, constant scores, or scores beyond float32."""
    if source.kind in (LabelledExample, MultiLabelExample) and len(stats.labels) < (
        2 if source.kind is LabelledExample else 1
    ):
        named = " and ".join(f'the label "{label}"' for label in stats.labels) or "no label"
        remedy = (
            "; some of it was made dev, and data.dev_fraction=0 leaves all in train" if source.has_generated_dev else ""
        )
        raise DataError(f"all examples of train have {named}: there is nothing to tell apart{remedy}")
    doubt = (
        label_column_warning(stats.labels, sum(stats.counts.values()))
        if source.kind in (LabelledExample, MultiLabelExample)
        else ""
    )
    if doubt:
        raise DataError(doubt)
    if source.labels == (OUTSIDE,):
        raise DataError(f'all words of train have the tag "{OUTSIDE}": there is nothing to tell apart')
    if source.kind is RankExample and not stats.rankable["train"]:
        raise DataError(
            f"none of the {stats.counts['train']:,} queries of train has documents that differ in relevance: nothing "
            "can be ranked. Give each query relevant and irrelevant documents"
        )
    if source.kind is ScoredExample and max(map(abs, (stats.low or 0.0, stats.high or 0.0))) > LARGEST:
        raise DataError(f"scores of train go from {stats.low:g} to {stats.high:g}: scale them down below {LARGEST:g}")
    if stats.low is not None and stats.low == stats.high:
        more = "; leave the column out (--data.columns.score='[]'), and pairs are learned as belonging together"
        more = more if source.kind is PairExample else ""
        raise DataError(f"all scores of train are {stats.low:g}: nothing can be learned from them{more}")
    if source.kind is ScoredExample and stats.deviation < FINE * max(map(abs, (stats.low or 0.0, stats.high or 0.0))):
        raise DataError(
            f"scores of train go from {stats.low:.12g} to {stats.high:.12g}, too far from 0 for what they "
            f"differ by, as weights are in float32: subtract {stats.mean:.12g}, or what is near it, from all of them"
        )
