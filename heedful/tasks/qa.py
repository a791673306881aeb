"""Find the answer to a question in a context: the span with the best scores of its start and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import AnswerSpan, Example, QuestionExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.model.config import Head
from heedful.model.config import SpanScores as SpanHead
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, weights_of_samples
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    AnswerInputs,
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
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, TaskFields, TaskSetup, bootstrap_stat, evaluate_task
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig

NO_ANSWER = "no_answer"  # name of the tuned threshold, if some questions have no answer


def question_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Accept {"question": ..., "context": ...}."""
    return read_pair(dict_values(engine_input, "question", "context"))


def all_positions(windows: list[Encoding], tokenizer: Tokenizer) -> list[TokenPosition]:
    """Return the positions of all tokens."""
    return [(number, position) for number, window in enumerate(windows) for position in range(len(window))]


def span_answer(engine_input: object, windows: list[Window], answer_context: AnswerContext) -> Answer:
    """Answer with {"answer", "start", "end", "score", "no_answer_score"}: characters of the context, sums of scores.

    A span starts at a token of the context in the window where that token has the most context (for each window of a
    question that is windowed too), ends at or after it, and has at most 30 tokens, or the maximum of its run. The
    no-answer score is that of the first token, or of the last one in a decoder, whose first token attends to itself
    alone; the least over the windows. If the model was trained on questions without answers, the answer is "" when the
    no-answer score exceeds the score by the tuned threshold; "best_answer" is always the best span.
    """
    assert isinstance(engine_input, dict)
    context: str = engine_input["context"]
    best: tuple[float, Window, int, int] | None = None
    starts: dict[int, list[int]] = {}
    for number, position in best_context_positions([window.encoded for window in windows], segment=1):
        starts.setdefault(number, []).append(position)
    for number, positions in starts.items():
        window = windows[number]
        last = max(position for position, segment in enumerate(window.encoded.segments) if segment == 1)
        start, stop, score = best_span(window.scores, positions, last, max_answer_tokens_of(answer_context.thresholds))
        if best is None or score > best[0]:
            best = score, window, start, stop
    result: Answer = {"answer": "", "start": 0, "end": 0, "score": None}
    if best is not None:
        score, window, start, stop = best
        offsets = window.encoded.offsets
        first, end = strip_span(context, offsets[start][0], offsets[stop][1])
        result = {"answer": context[first:end], "start": first, "end": end, "score": score}
    row = no_answer_row(answer_context.head)
    no_answer_score = min(
        (float(window.scores[row].sum()) for window in windows), default=0.0
    )  # an input without tokens has no windows
    result |= {"no_answer_score": no_answer_score, "windows": len(windows)}
    threshold = answer_context.thresholds.get(NO_ANSWER)
    if threshold is None:
        return result
    result["best_answer"] = result["answer"]
    if result["score"] is None or no_answer_score - result["score"] > threshold:
        result |= {"answer": "", "start": 0, "end": 0}
    return result


def no_answer_row(head: Head | None) -> int:
    """Return the index of the row of a window that scores "no answer": 0, or -1 for the last one."""
    return -1 if isinstance(head, SpanHead) and head.no_answer == "last" else 0


def best_span(
    scores: Tensor, starts: list[int], last: int, max_answer_tokens: int = MAX_ANSWER_TOKENS
) -> tuple[int, int, float]:
    """Return start, end and score of the span with the largest scores[start, 0] + scores[end, 1].

    Args:
        scores: [tokens, 2].
        starts: Tokens that a span may start at.
        last: Last token that a span may end at.
        max_answer_tokens: Tokens of a span.
    """
    ends = F.pad(scores[: last + 1, 1], (0, max_answer_tokens - 1), value=float("-inf")).unfold(0, max_answer_tokens, 1)
    sums = scores[starts, :1] + ends[starts]  # [starts, lengths]
    index, length = divmod(int(sums.argmax()), max_answer_tokens)
    return starts[index], starts[index] + length, float(sums[index, length])


def _prediction(answer: Answer) -> SpanPrediction:
    return SpanPrediction.from_answer({"best_answer": answer["answer"], **answer})


def _columns(loaded: ModelBundle, generation: GenerationConfig) -> dict[str, object]:
    columns: dict[str, object] = {"answer": str, "start": int, "end": int, "score": float, "no_answer_score": float}
    return columns | ({"best_answer": str} if NO_ANSWER in loaded.thresholds else {}) | {"windows": int}


QA_HEAD = AnswerHead(
    expects='questions with their contexts, like [{"question": "Who?", "context": "Ada wrote it."}]',
    tokenizer_inputs=question_inputs,
    positions=all_positions,
    answer=span_answer,
    prediction=_prediction,
    columns=_columns,
)


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Task[QuestionExample]):
    """Start and end of the first answer: the mean of both cross-entropies over the window (Devlin et al. 2019, 4.2).

    The target are the tokens that overlap the answer, in windows that contain all of them. The target of other windows
    is the first token (`null_row` 0) or the last one (-1) if some questions have no answer (as in the published code
    for version 2.0), else they are skipped (as in that for 1.1). A question is skipped if its answer has no tokens, or
    no window contains all of it.
    """

    example: ClassVar[type[Example]] = QuestionExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (QA_HEAD,)
    metric: str = "f1"
    impossible: bool  # whether some questions have no answer
    max_answer_tokens: int = MAX_ANSWER_TOKENS
    null_row: int = 0  # of a window: target of "no answer", see `no_answer_row`

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings, impossible = setup.settings, setup.stats.has_unanswerable
        assert isinstance(settings, QASettings)
        max_answer_tokens, threshold = settings.max_answer_tokens, settings.no_answer_threshold
        task, bundle = cls.with_new_head(setup, impossible=impossible, max_answer_tokens=max_answer_tokens)
        bundle.thresholds = (
            {ANSWER_LIMIT: float(max_answer_tokens)} if max_answer_tokens != cls.max_answer_tokens else {}
        )
        if impossible:
            bundle.thresholds[NO_ANSWER] = 0.0 if threshold == "tuned" else float(threshold)
        return replace(task, null_row=no_answer_row(bundle.config.head)), bundle

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> TaskFields:
        """Return the fields for evaluation: "no answer" is allowed if the model has a threshold for it."""
        return {"impossible": NO_ANSWER in loaded.thresholds, "null_row": no_answer_row(loaded.config.head)}

    def for_split(
        self, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], split: str
    ) -> tuple[Task, ModelBundle]:
        """Allow "no answer" if some questions of the split have none."""
        if self.impossible or split not in read_stats().splits_with_unanswerable:
            return self, loaded
        loaded = copy(loaded)  # the argument is not changed
        loaded.thresholds = {NO_ANSWER: 0.0, **loaded.thresholds}
        return replace(self, impossible=True), loaded

    def for_unlabelled(self) -> Task:
        """Keep all windows, since answers are unknown."""
        return replace(self, impossible=True)

    def tune_thresholds(self, engine: AnswerInputs, examples: Iterable[QuestionExample]) -> dict[str, float]:
        return {NO_ANSWER: self.compute_metrics(evaluate_task(self, engine, examples))["best_f1_threshold"]}

    def tokenizer_inputs(self, example: QuestionExample) -> list[TokenizerInput]:
        return [(example.question, example.context)]

    def engine_input(self, example: QuestionExample) -> object:
        return {"question": example.question, "context": example.context}

    def make_samples(self, example: QuestionExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        (windows,) = item_windows
        targets: list[TokenPosition | None] = [None] * len(windows)
        if example.answers:
            targets = answer_tokens(windows, example.context, example.answers[0])
            if not any(targets):
                return []
        samples = [
            (window, target or (self.null_row % max(1, len(window)),) * 2)
            for window, target in zip(windows, targets, strict=True)
            if target or self.impossible
        ]
        return [
            Sample.of([window.ids], [window.types], target=target, weight=1 / len(samples))
            for window, target in samples
        ]

    def remarks(self, example: QuestionExample, item_windows: list[list[Encoding]]) -> list[str]:
        remarks = super().remarks(example, item_windows)
        # an answer has no more tokens than bytes
        if example.answers and len(example.answers[0].text.encode(errors="replace")) >= self.max_answer_tokens:
            targets = filter(None, answer_tokens(item_windows[0], example.context, example.answers[0]))
            if any(stop - start >= self.max_answer_tokens for start, stop in targets):
                remarks.append(f"have an answer that is longer than task.max_answer_tokens={self.max_answer_tokens}")
        return remarks

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        targets = torch.tensor([sample.target for sample in samples])
        return Batch(packed=pack_samples(samples), targets=targets, weights=weights_of_samples(samples))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        losses = [
            F.cross_entropy(window_scores.T, target, reduction="none").mean()
            for window_scores, target in zip(batch.packed.unpack(scores), batch.targets, strict=True)
        ]
        return torch.stack(losses)

    def new_metrics(self) -> EvalMetrics:
        metrics: dict[str, object] = {"squad": SquadScore(version="2.0" if self.impossible else "1.1")}
        if self.impossible:
            metrics["threshold"] = SquadThreshold()
        return EvalMetrics(
            metrics=metrics, bootstraps={"exact": bootstrap_stat(2, mean_of), "f1": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[QuestionExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        golds = {str(number): _golds(example) for number, example in zip(ids, examples, strict=True)}
        predicted = {str(number): answer["answer"] for number, answer in zip(ids, answers, strict=True)}
        updated = {"squad": metrics.metrics["squad"].update(predicted, golds)}
        if self.impossible:
            best = {
                str(number): answer.get("best_answer", answer["answer"])
                for number, answer in zip(ids, answers, strict=True)
            }
            null_scores = {str(number): _null(answer) for number, answer in zip(ids, answers, strict=True)}
            updated["threshold"] = metrics.metrics["threshold"].update(best, golds, null_scores)
        scores = [answer_scores(predicted[name], golds[name], self._version) for name in golds]
        return EvalMetrics(
            metrics=updated,
            bootstraps={
                name: metrics.bootstraps[name].update(ids, [(score[index], 1.0) for score in scores])
                for index, name in enumerate(("exact", "f1"))
            },
        )

    @property
    def _version(self) -> Literal["1.1", "2.0"]:
        return "2.0" if self.impossible else "1.1"

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["squad"].compute()
        return results | (metrics.metrics["threshold"].compute() if self.impossible else {})

    def score_answer(self, example: QuestionExample, answer: Answer) -> ScoredAnswer:
        golds = _golds(example)
        exact, f1 = answer_scores(answer["answer"], golds, self._version)
        return ScoredAnswer(golds or "", answer["answer"], exact == 1.0, 1 - f1)


def _golds(example: QuestionExample) -> list[str]:
    return [span.text for span in example.answers]


def _null(answer: Answer) -> float:
    """Return the lead of "no answer" over the best span (Devlin et al. 2019, 4.3)."""
    return float(answer["no_answer_score"] - answer["score"]) if answer["score"] is not None else 0.0


def answer_tokens(windows: Sequence[Encoding], context: str, span: AnswerSpan) -> list[TokenPosition | None]:
    """Return the first and the last token that overlap the answer, for each window that contains all such tokens."""
    start, stop = strip_span(context, span.start, span.start + len(span.text))
    all_context_positions = [
        [position for position, segment in enumerate(window.segments) if segment == 1] for window in windows
    ]
    answer_positions = [
        [
            position
            for position in positions
            if window.offsets[position][0] < stop and window.offsets[position][1] > start
        ]
        for window, positions in zip(windows, all_context_positions, strict=True)
    ]
    tokens = {
        window.start + position - context_positions[0]
        for window, context_positions, positions in zip(windows, all_context_positions, answer_positions, strict=True)
        for position in positions
    }
    if windows[-1].dropped and all(windows[-1].offsets[position][1] < stop for position in all_context_positions[-1]):
        return [None] * len(windows)  # the end of the answer was truncated
    return [
        (positions[0], positions[-1]) if positions and len(positions) == len(tokens) else None
        for positions in answer_positions
    ]
