"""Exact match and F1 of answers to questions, and the best no-answer threshold, as the scripts of SQuAD define them."""

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
    """Return an answer in lower case, without ASCII punctuation, articles and extra spaces (Rajpurkar et al. 2016).

    >>> normalize_answer("The  U.S. Army (an army)")
    'us army army'
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def answer_scores(prediction: str, golds: Sequence[str], version: Version) -> tuple[float, float]:
    """Return exact match and F1, each the maximum over all gold answers.

    Version 2.0 (Rajpurkar et al. 2018) drops gold answers that are empty after normalization; if none is left, the gold
    answer is "". An empty prediction or gold answer scores 1 if both are empty, else 0. In version 1.1 the F1 of an
    empty prediction is 0.

    >>> answer_scores("the Denver Broncos won", ["Denver Broncos", "Broncos"], "1.1")
    (0.0, 0.8)
    """
    accepted = {normalize_answer(gold) for gold in golds}
    if version == "2.0":
        accepted = (accepted - {""}) or {""}
    prediction = normalize_answer(prediction)
    f1 = max(word_f1(prediction.split(), gold.split()) for gold in accepted)
    if version == "1.1" and not prediction:
        f1 = 0.0
    return float(prediction in accepted), f1


def word_f1(prediction: list[str], gold: list[str]) -> float:
    """Return 2 common / (predicted + gold) from multisets of words: 1 if both are empty, 0 if only one is empty."""
    if not prediction or not gold:
        return float(prediction == gold)
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold))


def apply_threshold(
    predictions: Mapping[str, object], null_scores: Mapping[str, int | float], threshold: float
) -> dict[str, object]:
    """Return the predictions, replaced by "" (no answer) where the null score is above the threshold."""
    return {name: "" if _null_score(name, null_scores) > threshold else text for name, text in predictions.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Sums of scores over questions or texts."""

    count: int = 0  # questions or texts
    exact: int = 0  # exact matches
    f1: int = 0  # sum of F1, in units of 2^-1126

    def plus(self, incoming: Tally) -> Tally:
        """Return the sums over the examples of both tallies."""
        return Tally(count=self.count + incoming.count, exact=self.exact + incoming.exact, f1=self.f1 + incoming.f1)


def tally_scores(scores: Sequence[tuple[float, float]]) -> Tally:
    """Return the sums of pairs (exact match, F1), without rounding."""
    return Tally(
        count=len(scores),
        exact=int(sum(exact for exact, _ in scores)),
        f1=sum(to_exact(f1) for _, f1 in scores),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadScore:
    """Exact match and F1 over questions, from 0 to 1.

    A question without a prediction scores 0, as in the published script for version 1.1. The script for 2.0 leaves such
    questions out of the average, so that a file with a single correct answer would score 100 %.

    >>> SquadScore(version="1.1").update({"q": "the cat"}, {"q": ["Cat!"], "r": ["dog"]}).compute()["exact"]
    0.5
    """

    version: Version
    answerable: Tally = Tally()  # questions with an answer
    unanswerable: Tally = Tally()  # questions without an answer
    missing: int = 0  # questions without a prediction

    def __post_init__(self) -> None:
        if self.version not in ("1.1", "2.0"):
            raise HeedfulError(f'version should be "1.1" or "2.0", got "{self.version}"')

    def update(self, predictions: Mapping[str, object], golds: Mapping[str, Sequence[str]]) -> SquadScore:
        """Add questions.

        Args:
            predictions: Predicted text by question. Predictions for questions that are not in `golds` are ignored.
            golds: Gold answers by question. An unanswerable question has none.
        """
        scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # key: whether the question is answerable
        missing = 0
        for name, answers in golds.items():
            _check_golds(name, answers, self.version)
            if name in predictions:
                score = answer_scores(_check_text(name, predictions[name]), answers, self.version)
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
        """Return {"exact", "f1", "count", "missing", "version", "notes"}.

        Version 2.0 adds "answerable_exact", "unanswerable_exact" and so on, for the groups of questions that the
        published script calls HasAns and NoAns. A group without questions is left out.
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
    """The thresholds of the null score with the best exact match and the best F1 (version 2.0).

    A question is answered if its null score is at most the threshold. The search for the best threshold visits
    questions in the order of their null scores. An answerable question adds its score, and an unanswerable one
    subtracts 1 if its prediction is not "". Questions with equal null scores are visited together, since no threshold
    can separate them. (The published script visits them one by one, in the order of the file.) The search needs all
    null scores, so 24 bytes are stored per question.
    """

    questions: RowStore = field(default_factory=RowStore)  # columns: null score, gain in exact match, gain in F1
    count: int = 0  # questions
    unanswerable: int = 0  # questions without an answer

    def update(
        self,
        predictions: Mapping[str, object],
        golds: Mapping[str, Sequence[str]],
        null_scores: Mapping[str, int | float],
    ) -> SquadThreshold:
        """Add questions.

        Args:
            predictions: The best text by question, even if a threshold would reject it.
            golds: Gold answers by question. An unanswerable question has none.
            null_scores: Score of "no answer" by question. Larger means less likely to have an answer.
        """
        rows = []
        for name, answers in golds.items():
            null_score = _null_score(name, null_scores)
            text = _check_text(name, predictions[name]) if name in predictions else None
            if not answers:
                gains = (0.0, 0.0) if text == "" else (-1.0, -1.0)
            elif text is None:
                gains = (0.0, 0.0)
            else:
                gains = answer_scores(text, answers, "2.0")
            rows.append((null_score, *gains))
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

        If answering no question is best, the threshold is 0, as published for probabilities, or just below the smallest
        null score if that score is not above 0.
        """
        require_examples(self.count, "the best threshold")
        rows = self.questions.rows(3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        scores, starts = np.unique(rows[:, 0], return_index=True)
        answer_nothing = 0.0 if scores[0] > 0 else float(np.nextafter(scores[0], -np.inf))  # threshold
        result: Result = {}
        for name, gains in (("exact", rows[:, 1]), ("f1", rows[:, 2])):
            best = current = self.unanswerable << BITS
            threshold = answer_nothing
            for score, group in zip(scores, np.split(gains, starts[1:]), strict=True):
                current += sum(to_exact(gain) for gain in group.tolist())
                if current > best:
                    best, threshold = current, float(score)
            result |= {f"best_{name}": from_exact(best, self.count), f"best_{name}_threshold": threshold}
        return result | {"count": self.count}


def _check_text(name: str, prediction: object) -> str:
    """Return a prediction; raise HeedfulError if it is not a text."""
    if not isinstance(prediction, str):
        raise HeedfulError(
            f'the prediction for question "{name}" should be a text ("" for no answer), got {prediction!r}'
        )
    return prediction


def _null_score(name: str, null_scores: Mapping[str, int | float]) -> float:
    """Return the null score of a question; raise HeedfulError if it is missing or not finite."""
    if name not in null_scores:
        raise HeedfulError(f'question "{name}" has no null score: each question needs one')
    score = float(null_scores[name])
    if not np.isfinite(score):
        raise HeedfulError(f'the null score of question "{name}" is {score}: it should be a number')
    return score


def _check_golds(name: str, answers: Sequence[str], version: Version) -> None:
    """Raise HeedfulError if gold answers are not a list, or are missing in version 1.1."""
    if isinstance(answers, str):
        raise HeedfulError(f'the gold answers of question "{name}" should be a list of texts, got {answers!r}')
    if not answers and version == "1.1":
        raise HeedfulError(
            f'question "{name}" has no gold answer, which version 1.1 does not allow: score with version "2.0"'
        )
