"""Find the answer to a question in a context: the span whose start and end score most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import AnswerSpan, Example, QuestionExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.model.config import Head
from heedful.model.config import SpanScores as SpanHead
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, sample_weights
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    TokenPosition,
    Window,
    best_context_positions,
    dict_values,
    read_pair,
    strip_span,
)
from heedful.tasks.metrics import Result, SquadScore, SquadThreshold, answer_scores, mean_of
from heedful.tasks.predictions import Span as SpanPrediction
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.qa import ANSWER_LIMIT, MAX_ANSWER_TOKENS, QASettings, max_answer_tokens_of
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, TaskSetup, bootstrap_stat, evaluate_task
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig

NO_ANSWER = "no_answer"  # the threshold that was calibrated, where some questions have no answer


def question_inputs(given: Any) -> list[TokenizerInput] | None:
    """{"question": ..., "context": ...}."""
    return read_pair(dict_values(given, "question", "context"))


def all_positions(windows: list[Encoding], tokenizer: Tokenizer) -> list[TokenPosition]:
    """All tokens."""
    return [(number, place) for number, window in enumerate(windows) for place in range(len(window))]


def span_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"answer", "start", "end", "score", "no_answer_score"}: characters of the context, and sums of two scores.

    A span starts at a token of the context in the window where that token sees most around it (beside each window of a
    question that is windowed too), ends at or after it, and has at most 30 tokens, or as many as its run set. The
    no-answer score is that of the first token, or of the last one in a decoder, whose first token sees itself alone;
    the least over the windows. Where the model was trained on questions without answers, the answer is "" when the
    no-answer score exceeds the score by the threshold that was calibrated, and "best" is the best span all the same.
    """
    context: str = given["context"]
    best: tuple[float, Window, int, int] | None = None
    starts: dict[int, list[int]] = {}
    for number, place in best_context_positions([window.encoded for window in windows], segment=1):
        starts.setdefault(number, []).append(place)
    for number, mine in starts.items():
        window = windows[number]
        last = max(place for place, segment in enumerate(window.encoded.segments) if segment == 1)
        start, stop, score = best_span(window.scores, mine, last, max_answer_tokens_of(setting.thresholds))
        if best is None or score > best[0]:
            best = score, window, start, stop
    found: Answer = {"answer": "", "start": 0, "end": 0, "score": None}
    if best is not None:
        score, window, start, stop = best
        offsets = window.encoded.offsets
        first, end = strip_span(context, offsets[start][0], offsets[stop][1])
        found = {"answer": context[first:end], "start": first, "end": end, "score": score}
    row = no_answer_row(setting.head)
    nothing = min((float(window.scores[row].sum()) for window in windows), default=0.0)  # no tokens: no windows
    found |= {"no_answer_score": nothing, "windows": len(windows)}
    threshold = setting.thresholds.get(NO_ANSWER)
    if threshold is None:
        return found
    found["best"] = found["answer"]
    if found["score"] is None or nothing - found["score"] > threshold:
        found |= {"answer": "", "start": 0, "end": 0}
    return found


def no_answer_row(head: Head | None) -> int:
    """Index of the row of a window whose scores are those of "no answer": 0, or -1 for the last one."""
    return -1 if isinstance(head, SpanHead) and head.no_answer == "last" else 0


def best_span(
    scores: Tensor, starts: list[int], last: int, max_answer_tokens: int = MAX_ANSWER_TOKENS
) -> tuple[int, int, float]:
    """The start among `starts` and the end, at most `last`, with the largest sum of scores[:, 0] and scores[:, 1]."""
    ends = F.pad(scores[: last + 1, 1], (0, max_answer_tokens - 1), value=float("-inf")).unfold(0, max_answer_tokens, 1)
    sums = scores[starts, :1] + ends[starts]  # [starts, lengths]
    index, length = divmod(int(sums.argmax()), max_answer_tokens)
    return starts[index], starts[index] + length, float(sums[index, length])


def _prediction(answer: Answer) -> SpanPrediction:
    fields = {name: answer[name] for name in ("start", "end", "score", "no_answer_score")}
    text, cut = answer["answer"], answer.get("cut", 0)
    return SpanPrediction(text=text, best_text=str(answer.get("best", text)), truncated_tokens=cut, **fields)


def _columns(loaded: ModelBundle, writing: GenerationConfig) -> dict[str, Any]:
    found = {"answer": str, "start": int, "end": int, "score": float, "no_answer_score": float}
    return found | ({"best": str} if NO_ANSWER in loaded.thresholds else {}) | {"windows": int}


QA_HEAD = AnswerHead(
    expects='questions with their contexts, like [{"question": "Who?", "context": "Ada wrote it."}]',
    tokenizer_inputs=question_inputs,
    positions=all_positions,
    answer=span_answer,
    prediction=_prediction,
    columns=_columns,
)


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Task):
    """Start and end of the first answer: the mean of both cross-entropies over the window (Devlin et al. 2019, 4.2).

    The target are the tokens that the answer touches, in windows that have all of them; a window without points at its
    first token (`null_row` 0) or its last one (-1) where some questions have no answer (as the published code for
    version 2.0), else it is left out (as that for 1.1). So is a question whose answer has no tokens, or is in no window
    as a whole.
    """

    example: ClassVar[type[Example]] = QuestionExample
    head: ClassVar[str] = "question_answering"
    answerers: ClassVar[tuple[AnswerHead, ...]] = (QA_HEAD,)
    metric: str = "f1"
    impossible: bool  # whether some questions have no answer
    max_answer_tokens: int = MAX_ANSWER_TOKENS
    null_row: int = 0  # of a window: the one that "no answer" is learned at, see `no_answer_row`

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings, impossible = setup.settings, setup.survey.impossible
        assert isinstance(settings, QASettings)
        most, threshold = settings.max_answer_tokens, settings.no_answer_threshold
        task, made = cls.with_new_head(setup, impossible=impossible, max_answer_tokens=most)
        made.thresholds = {ANSWER_LIMIT: float(most)} if most != cls.max_answer_tokens else {}
        if impossible:
            made.thresholds[NO_ANSWER] = 0.0 if threshold == "tuned" else float(threshold)
        return replace(task, null_row=no_answer_row(made.config.head)), made

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, survey: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> dict[str, Any]:
        """Return the fields for evaluation: "no answer" is allowed if the model has a threshold for it."""
        return {"impossible": NO_ANSWER in loaded.thresholds, "null_row": no_answer_row(loaded.config.head)}

    def for_split(
        self, loaded: ModelBundle, survey: Callable[[], DatasetStats], split: str
    ) -> tuple[Task, ModelBundle]:
        """Allow "no answer" where some questions of the split have none."""
        if self.impossible or split not in survey().unanswered:
            return self, loaded
        loaded = copy(loaded)  # the one that was given stays as it is
        loaded.thresholds = {NO_ANSWER: 0.0, **loaded.thresholds}
        return replace(self, impossible=True), loaded

    def for_unlabelled(self) -> Task:
        """Keep all windows of questions, whose answers are not known."""
        return replace(self, impossible=True)

    def calibrate(self, ask: Callable[[list[Any]], list[Answer]], examples: Iterable[Any]) -> dict[str, float]:
        return {NO_ANSWER: self.compute_metrics(evaluate_task(self, ask, examples))["best_f1_threshold"]}

    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        return [(example.question, example.context)]

    def engine_input(self, example: Any) -> Any:
        return {"question": example.question, "context": example.context}

    def make_samples(self, example: QuestionExample, seen: list[list[Encoding]]) -> list[Sample]:
        (windows,) = seen
        places: list[TokenPosition | None] = [None] * len(windows)
        if example.answers:
            places = touched(windows, example.context, example.answers[0])
            if not any(places):
                return []
        kept = [
            (window, place or (self.null_row % max(1, len(window)),) * 2)
            for window, place in zip(windows, places, strict=True)
            if place or self.impossible
        ]
        return [Sample.of([window.ids], [window.types], target=place, weight=1 / len(kept)) for window, place in kept]

    def remarks(self, example: QuestionExample, seen: list[list[Encoding]]) -> list[str]:
        found = super().remarks(example, seen)
        if (
            example.answers and len(example.answers[0].text.encode(errors="replace")) >= self.max_answer_tokens
        ):  # else too few bytes
            places = filter(None, touched(seen[0], example.context, example.answers[0]))
            if any(stop - start >= self.max_answer_tokens for start, stop in places):
                found.append(f"have an answer that is longer than task.max_answer_tokens={self.max_answer_tokens}")
        return found

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        targets = torch.tensor([sample.target for sample in samples])
        return Batch(packed=pack_samples(samples), targets=targets, weights=sample_weights(samples))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        each = [
            F.cross_entropy(mine.T, target, reduction="none").mean()
            for mine, target in zip(batch.packed.unpack(scores), batch.targets, strict=True)
        ]
        return torch.stack(each)

    def new_metrics(self) -> EvalMetrics:
        metrics: dict[str, Any] = {"squad": SquadScore(version="2.0" if self.impossible else "1.1")}
        if self.impossible:
            metrics["threshold"] = SquadThreshold()
        return EvalMetrics(
            metrics=metrics, bootstraps={"exact": bootstrap_stat(2, mean_of), "f1": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[QuestionExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        golds = {str(number): _golds(example) for number, example in zip(ids, examples, strict=True)}
        said = {str(number): answer["answer"] for number, answer in zip(ids, answers, strict=True)}
        updated = {"squad": metrics.metrics["squad"].update(said, golds)}
        if self.impossible:
            best = {
                str(number): answer.get("best", answer["answer"]) for number, answer in zip(ids, answers, strict=True)
            }
            nothing = {str(number): _null(answer) for number, answer in zip(ids, answers, strict=True)}
            updated["threshold"] = metrics.metrics["threshold"].update(best, golds, nothing)
        pairs = [answer_scores(said[name], golds[name], self._version) for name in golds]
        return EvalMetrics(
            metrics=updated,
            bootstraps={
                name: metrics.bootstraps[name].update(ids, [(pair[index], 1.0) for pair in pairs])
                for index, name in enumerate(("exact", "f1"))
            },
        )

    @property
    def _version(self) -> Literal["1.1", "2.0"]:
        return "2.0" if self.impossible else "1.1"

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        found: Result = metrics.metrics["squad"].compute()
        return found | (metrics.metrics["threshold"].compute() if self.impossible else {})

    def score_answer(self, example: QuestionExample, answer: Answer) -> ScoredAnswer:
        golds = _golds(example)
        exact, f1 = answer_scores(answer["answer"], golds, self._version)
        return ScoredAnswer(golds or "", answer["answer"], exact == 1.0, 1 - f1)


def _golds(example: QuestionExample) -> list[str]:
    return [span.text for span in example.answers]


def _null(answer: Answer) -> float:
    """How much more "no answer" scores than the best span (Devlin et al. 2019, 4.3)."""
    return float(answer["no_answer_score"] - answer["score"]) if answer["score"] is not None else 0.0


def touched(windows: Sequence[Encoding], context: str, span: AnswerSpan) -> list[TokenPosition | None]:
    """The first and the last token that the answer touches, in each window that has all tokens it touches."""
    start, stop = strip_span(context, span.start, span.start + len(span.text))
    of_context = [[place for place, segment in enumerate(window.segments) if segment == 1] for window in windows]
    places = [
        [place for place in mine if window.offsets[place][0] < stop and window.offsets[place][1] > start]
        for window, mine in zip(windows, of_context, strict=True)
    ]
    tokens = {
        window.start + place - whole[0]
        for window, whole, mine in zip(windows, of_context, places, strict=True)
        for place in mine
    }
    if windows[-1].dropped and all(windows[-1].offsets[place][1] < stop for place in of_context[-1]):
        return [None] * len(windows)  # its end was cut off
    return [(mine[0], mine[-1]) if mine and len(mine) == len(tokens) else None for mine in places]
