"""Exact match and F1 of answers taken from a text, as the published SQuAD scorers define them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import BITS, Result, from_exact, require_equal, require_examples, to_exact
from heedful.tasks.metrics.row_store import RowStore

Version = Literal["1.1", "2.0"]

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(answer: str) -> str:
    """Return an answer in lower case, with no ASCII punctuation, no articles and single spaces (Rajpurkar et al. 2016).

    >>> normalize_answer("The  U.S. Army (an army)")
    'us army army'
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def answer_scores(prediction: str, golds: Sequence[str], version: Version) -> tuple[float, float]:
    """Return exact match and F1, each the best over all gold answers.

    F1 is of words as multisets: 2 common / (predicted + gold). Version 2.0 (Rajpurkar et al. 2018) drops gold answers
    that are empty when normalised; with none left the right answer is "". An empty side scores 1 if both are, else 0;
    in version 1.1 its F1 is 0.

    >>> answer_scores("the Denver Broncos won", ["Denver Broncos", "Broncos"], "1.1")
    (0.0, 0.8)
    """
    accepted = {normalize_answer(gold) for gold in golds}
    if version == "2.0":
        accepted = (accepted - {""}) or {""}
    prediction = normalize_answer(prediction)
    f1 = max(word_f1(prediction.split(), gold.split()) for gold in accepted)
    return float(prediction in accepted), f1 if prediction or version == "2.0" else 0.0


def word_f1(prediction: list[str], gold: list[str]) -> float:
    """Return 2 common / (predicted + gold) of words as multisets; 1 if both sides are empty, 0 if one is."""
    if not prediction or not gold:
        return float(prediction == gold)
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold))


def apply_threshold(
    predictions: Mapping[str, object], null_scores: Mapping[str, int | float], threshold: float
) -> dict[str, object]:
    """Return the predictions, replaced by no answer ("") where the null score is above the threshold."""
    return {name: "" if _null_score(name, null_scores) > threshold else text for name, text in predictions.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Sums of scores over questions, or texts."""

    count: int = 0
    exact: int = 0
    f1: int = 0  # in units of 2^-1126

    def plus(self, incoming: Tally) -> Tally:
        """Return the sums over both."""
        return Tally(count=self.count + incoming.count, exact=self.exact + incoming.exact, f1=self.f1 + incoming.f1)


def tally_scores(scores: Sequence[tuple[float, float]]) -> Tally:
    """Return the sums of exact matches and F1s, without rounding."""
    return Tally(
        count=len(scores),
        exact=int(sum(match for match, _ in scores)),
        f1=sum(to_exact(overlap) for _, overlap in scores),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadScore:
    """Exact match and F1 over questions, of 1 (published tables say percent).

    A question without a prediction counts 0, as in the script of version 1.1. That of 2.0 leaves it out of the average,
    so that a file with one correct answer scores 100.

    >>> SquadScore(version="1.1").update({"q": "the cat"}, {"q": ["Cat!"], "r": ["dog"]}).compute()["exact"]
    0.5
    """

    version: Version
    answerable: Tally = Tally()
    unanswerable: Tally = Tally()
    missing: int = 0

    def __post_init__(self) -> None:
        if self.version not in ("1.1", "2.0"):
            raise HeedfulError(f'version should be "1.1" or "2.0", got "{self.version}"')

    def update(self, predictions: Mapping[str, object], golds: Mapping[str, Sequence[str]]) -> SquadScore:
        """Add the questions of `golds`: by id, their gold answers (none: unanswerable) and the predicted text.

        Predictions of other questions do not count.
        """
        scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # is there an answer?
        missing = 0
        for name, answers in golds.items():
            _check(name, answers, self.version)
            if name in predictions:
                score = answer_scores(_text(name, predictions[name]), answers, self.version)
            else:
                score, missing = (0.0, 0.0), missing + 1
            scores[bool(answers)].append(score)
        return self.merge_state(
            replace(
                self, answerable=tally_scores(scores[True]), unanswerable=tally_scores(scores[False]), missing=missing
            )
        )

    def merge_state(self, incoming: SquadScore) -> SquadScore:
        """Return the metric over the examples of both metrics."""
        require_equal(self.version, incoming.version, "versions")
        return replace(
            self,
            answerable=self.answerable.plus(incoming.answerable),
            unanswerable=self.unanswerable.plus(incoming.unanswerable),
            missing=self.missing + incoming.missing,
        )

    def compute(self) -> Result:
        """Return {"exact", "f1", "count", "missing", "notes"}; for 2.0 also "answerable_exact" and the like.

        A group without questions is left out. The published script calls them HasAns and NoAns.
        """
        total = self.answerable.plus(self.unanswerable)
        require_examples(total.count, "the score")
        groups = {"": total}
        if self.version == "2.0":
            groups |= {"answerable_": self.answerable, "unanswerable_": self.unanswerable}
        result: Result = {}
        for prefix, tally in groups.items():
            if tally.count:
                result[f"{prefix}exact"] = tally.exact / tally.count
                result[f"{prefix}f1"] = from_exact(tally.f1, tally.count)
                result[f"{prefix}count"] = tally.count
        notes = [f"{self.missing} of {total.count} questions have no prediction and count 0"] if self.missing else []
        return result | {"missing": self.missing, "version": self.version, "notes": notes}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SquadThreshold:
    """The null score above which to predict "no answer", for the best exact match and for the best F1 (2.0).

    Needs all null scores in order: 24 bytes are kept for each question. Starting from no answers at all, questions are
    answered in the order of their null scores; one that can be answered adds its score, one that cannot takes 1 away
    if its prediction is not "". Questions with equal null scores are answered together, as no threshold can tell them
    apart; the published script takes them one by one in the order of the file.
    """

    questions: RowStore = field(default_factory=RowStore)  # null score, gain in exact match, gain in F1
    count: int = 0
    unanswerable: int = 0

    def update(
        self,
        predictions: Mapping[str, object],
        golds: Mapping[str, Sequence[str]],
        null_scores: Mapping[str, int | float],
    ) -> SquadThreshold:
        """With the questions of `golds`; each prediction is the best text, also where the threshold would reject it."""
        rows = []
        for name, answers in golds.items():
            score = _null_score(name, null_scores)
            text = _text(name, predictions[name]) if name in predictions else None
            if answers:
                rows.append((score, *(answer_scores(text, answers, "2.0") if text is not None else (0.0, 0.0))))
            else:
                rows.append((score, *((0.0, 0.0) if text == "" else (-1.0, -1.0))))
        return replace(
            self,
            questions=self.questions.append(np.array(rows, dtype=np.float64).reshape(-1, 3)),
            count=self.count + len(rows),
            unanswerable=self.unanswerable + sum(not answers for answers in golds.values()),
        )

    def merge_state(self, incoming: SquadThreshold) -> SquadThreshold:
        """Return the metric over the examples of both metrics."""
        return replace(
            self,
            questions=self.questions.merge_state(incoming.questions),
            count=self.count + incoming.count,
            unanswerable=self.unanswerable + incoming.unanswerable,
        )

    def compute(self) -> Result:
        """Return {"best_exact", "best_exact_threshold", "best_f1", "best_f1_threshold", "count"}.

        Where no answer at all is best, the threshold is 0, as published for probabilities, or just below the smallest
        null score where that is not above 0.
        """
        require_examples(self.count, "the best threshold")
        rows = self.questions.rows(3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        scores, starts = np.unique(rows[:, 0], return_index=True)
        none = 0.0 if scores[0] > 0 else float(np.nextafter(scores[0], -np.inf))
        result: Result = {}
        for name, gains in (("exact", rows[:, 1]), ("f1", rows[:, 2])):
            best = current = self.unanswerable << BITS
            threshold = none
            for score, group in zip(scores, np.split(gains, starts[1:]), strict=True):
                current += sum(to_exact(gain) for gain in group.tolist())
                if current > best:
                    best, threshold = current, float(score)
            result |= {f"best_{name}": from_exact(best, self.count), f"best_{name}_threshold": threshold}
        return result | {"count": self.count}


def _text(name: str, prediction: object) -> str:
    if not isinstance(prediction, str):
        raise HeedfulError(f'the prediction for question "{name}" should be a text ("" for no answer): {prediction!r}')
    return prediction


def _null_score(name: str, null_scores: Mapping[str, int | float]) -> float:
    if name not in null_scores:
        raise HeedfulError(f'question "{name}" has no null score: each question needs one')
    score = float(null_scores[name])
    if not np.isfinite(score):
        raise HeedfulError(f'the null score of question "{name}" is {score}: it should be a number')
    return score


def _check(name: str, answers: Sequence[str], version: Version) -> None:
    if isinstance(answers, str):
        raise HeedfulError(f'the gold answers of question "{name}" should be a list of texts, got {answers!r}')
    if not answers and version == "1.1":
        raise HeedfulError(
            f'question "{name}" has no gold answer, which version 1.1 does not know: score with version "2.0"'
        )
