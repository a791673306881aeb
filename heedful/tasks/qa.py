"""Extractive question answering: the task and its answers, which are spans of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

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

NO_ANSWER = "no_answer"  # key of the threshold for "no answer" among a model's thresholds


def question_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return {"question": ..., "context": ...} as a pair to encode, or None for an input of another form."""
    return read_pair(dict_values(engine_input, "question", "context"))


def all_positions(windows: list[Encoding], tokenizer: Tokenizer) -> list[TokenPosition]:
    """Return the positions of all tokens of all windows."""
    return [(index, position) for index, window in enumerate(windows) for position in range(len(window))]


def span_answer(engine_input: object, windows: list[Window], answer_context: AnswerContext) -> Answer:
    """Return {"answer", "start", "end", "score", "no_answer_score", "windows"}.

    Start and end are in characters of the context. The score of a span is the start score of its first token plus the
    end score of its last token. The no-answer score of a window is the sum of both scores of its first token, or of its
    last token in a decoder, where the first token attends only to itself. The no-answer score of the input is the
    minimum over its windows.

    A model that was trained on questions without answers has a threshold. Its "answer" is "" if the no-answer score
    exceeds the best span's score by more than the threshold. Its "best_answer" is always the best span.
    """
    assert isinstance(engine_input, dict)
    context: str = engine_input["context"]
    result: Answer = {"answer": "", "start": 0, "end": 0, "score": None}
    best = _best_span_of_windows(windows, max_answer_tokens_of(answer_context.thresholds))
    if best is not None:
        offsets = best.window.encoded.offsets
        start, end = strip_span(context, offsets[best.first][0], offsets[best.last][1])
        result = {"answer": context[start:end], "start": start, "end": end, "score": best.score}
    null_position = no_answer_position(answer_context.head)
    # an input without tokens has no windows
    no_answer_score = min((float(window.scores[null_position].sum()) for window in windows), default=0.0)
    result |= {"no_answer_score": no_answer_score, "windows": len(windows)}
    threshold = answer_context.thresholds.get(NO_ANSWER)
    if threshold is None:
        return result
    result["best_answer"] = result["answer"]
    if result["score"] is None or no_answer_score - result["score"] > threshold:
        result |= {"answer": "", "start": 0, "end": 0}
    return result


class _BestSpan(NamedTuple):
    """A span of a window, from its first to its last token."""

    window: Window
    first: int  # position of the first token in the window
    last: int  # position of the last token in the window
    score: float  # start score plus end score


def _best_span_of_windows(windows: Sequence[Window], max_answer_tokens: int) -> _BestSpan | None:
    """Return the best span of all windows, or None if the context has no tokens.

    A span may start at a token only in the window where that token has the most context. If the question is split too,
    there is one such window for each window of the question. Among spans with equal scores the first one is chosen.
    """
    starts_by_window: dict[int, list[int]] = {}
    for window_index, position in best_context_positions([window.encoded for window in windows], segment=1):
        starts_by_window.setdefault(window_index, []).append(position)
    best: _BestSpan | None = None
    for window_index, starts in starts_by_window.items():
        window = windows[window_index]
        last_context_token = _context_positions(window.encoded)[-1]
        first, last, score = best_span(window.scores, starts, last_context_token, max_answer_tokens)
        if best is None or score > best.score:
            best = _BestSpan(window, first, last, score)
    return best


def _context_positions(window: Encoding) -> list[int]:
    """Return the positions in a window of the tokens of the context, which is the second text of the pair."""
    return [position for position, segment in enumerate(window.segments) if segment == 1]


def no_answer_position(head: Head | None) -> int:
    """Return the position of the token of a window that scores "no answer": 0, or -1 for the last token."""
    return -1 if isinstance(head, SpanHead) and head.no_answer == "last" else 0


def best_span(
    scores: Tensor, starts: list[int], last: int, max_answer_tokens: int = MAX_ANSWER_TOKENS
) -> tuple[int, int, float]:
    """Return (first token, last token, score) of the span with the largest start score + end score.

    Args:
        scores: Start and end score of each token, [tokens, 2].
        starts: Positions of the tokens at which a span may start.
        last: Position of the last token at which a span may end.
        max_answer_tokens: Maximum tokens in a span.
    """
    padded = F.pad(scores[: last + 1, 1], (0, max_answer_tokens - 1), value=float("-inf"))
    end_scores = padded.unfold(0, max_answer_tokens, 1)  # scores of the possible ends of spans from each token
    sums = scores[starts, :1] + end_scores[starts]  # [starts, lengths]
    index, length = divmod(int(sums.argmax()), max_answer_tokens)
    return starts[index], starts[index] + length, float(sums[index, length])


def _prediction(answer: Answer) -> SpanPrediction:
    """Convert an answer to its dataclass."""
    return SpanPrediction.from_answer({"best_answer": answer["answer"], **answer})


def _columns(loaded: ModelBundle, generation: GenerationConfig) -> dict[str, object]:
    """Return the type of each field of an answer."""
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
    """Extractive question answering: find the span of the context that answers the question.

    The loss is the mean of two cross-entropies over the tokens of a window, for start and end of the first gold answer
    (Devlin et al. 2019, section 4.2). If a window contains all tokens that overlap the answer, its targets are the
    first and the last of these tokens. If it does not, its target is the token at `null_position`, as in the published
    code for SQuAD 2.0, or the window is skipped if all questions have answers, as in the code for 1.1. A question is
    skipped if no window contains all tokens of its answer.
    """

    example: ClassVar[type[Example]] = QuestionExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (QA_HEAD,)
    metric: str = "f1"
    has_unanswerable: bool  # whether some questions have no answer
    max_answer_tokens: int = MAX_ANSWER_TOKENS  # maximum tokens in an answer
    null_position: int = 0  # position of the token of a window that is the target of "no answer"; -1: the last one

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings, has_unanswerable = setup.settings, setup.stats.has_unanswerable
        assert isinstance(settings, QASettings)
        max_answer_tokens, threshold = settings.max_answer_tokens, settings.no_answer_threshold
        task, bundle = cls.with_new_head(setup, has_unanswerable=has_unanswerable, max_answer_tokens=max_answer_tokens)
        bundle.thresholds = (
            {ANSWER_LIMIT: float(max_answer_tokens)} if max_answer_tokens != cls.max_answer_tokens else {}
        )
        if has_unanswerable:
            bundle.thresholds[NO_ANSWER] = 0.0 if threshold == "tuned" else float(threshold)
        return replace(task, null_position=no_answer_position(bundle.config.head)), bundle

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> TaskFields:
        """Return the fields for evaluation. "No answer" is allowed if the model has a threshold for it."""
        return {
            "has_unanswerable": NO_ANSWER in loaded.thresholds,
            "null_position": no_answer_position(loaded.config.head),
        }

    def for_split(
        self, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], split: str
    ) -> tuple[Task, ModelBundle]:
        """Return task and model for a split. Both allow "no answer" if some questions of the split have no answer."""
        if self.has_unanswerable or split not in read_stats().splits_with_unanswerable:
            return self, loaded
        loaded = copy(loaded)  # so that the argument is not changed
        loaded.thresholds = {NO_ANSWER: 0.0, **loaded.thresholds}
        return replace(self, has_unanswerable=True), loaded

    def for_unlabelled(self) -> Task:
        """Return a task that makes a sample of every window, since answers are unknown."""
        return replace(self, has_unanswerable=True)

    def tune_thresholds(self, engine: AnswerInputs, examples: Iterable[QuestionExample]) -> dict[str, float]:
        """Return the threshold of "no answer" with the best F1."""
        return {NO_ANSWER: self.compute_metrics(evaluate_task(self, engine, examples))["best_f1_threshold"]}

    def tokenizer_inputs(self, example: QuestionExample) -> list[TokenizerInput]:
        return [(example.question, example.context)]

    def engine_input(self, example: QuestionExample) -> object:
        return {"question": example.question, "context": example.context}

    def make_samples(self, example: QuestionExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return a sample for each window that is not skipped. The target is the first and last token of the answer."""
        (windows,) = item_windows
        targets: list[TokenPosition | None] = [None] * len(windows)
        if example.answers:
            targets = answer_tokens(windows, example.context, example.answers[0])
            if not any(targets):
                return []
        windows_and_targets: list[tuple[Encoding, TokenPosition]] = []
        for window, target in zip(windows, targets, strict=True):
            if target is not None:
                windows_and_targets.append((window, target))
            elif self.has_unanswerable:
                null_position = self.null_position % max(1, len(window))
                windows_and_targets.append((window, (null_position, null_position)))
        weight = 1 / max(1, len(windows_and_targets))
        return [
            Sample.of([window.ids], [window.types], target=target, weight=weight)
            for window, target in windows_and_targets
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
        """Return, for each window, the mean of the cross-entropies of start and end."""
        losses = [
            F.cross_entropy(window_scores.T, target, reduction="none").mean()
            for window_scores, target in zip(batch.packed.unpack(scores), batch.targets, strict=True)
        ]
        return torch.stack(losses)

    def new_metrics(self) -> EvalMetrics:
        metrics: dict[str, object] = {"squad": SquadScore(version=self._version)}
        if self.has_unanswerable:
            metrics["threshold"] = SquadThreshold()
        return EvalMetrics(
            metrics=metrics, bootstraps={"exact": bootstrap_stat(2, mean_of), "f1": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[QuestionExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        names = [str(id) for id in ids]
        answer_by_name = dict(zip(names, answers, strict=True))
        golds = {name: _golds(example) for name, example in zip(names, examples, strict=True)}
        predicted = {name: answer["answer"] for name, answer in answer_by_name.items()}
        updated = {"squad": metrics.metrics["squad"].update(predicted, golds)}
        if self.has_unanswerable:
            best_answers, null_scores = {}, {}
            for name, answer in answer_by_name.items():
                best_answers[name] = answer.get("best_answer", answer["answer"])
                null_scores[name] = _null_score(answer)
            updated["threshold"] = metrics.metrics["threshold"].update(best_answers, golds, null_scores)
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
        """The version of SQuAD whose metrics are computed."""
        return "2.0" if self.has_unanswerable else "1.1"

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["squad"].compute()
        return results | (metrics.metrics["threshold"].compute() if self.has_unanswerable else {})

    def score_answer(self, example: QuestionExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the gold answers. It is correct if it matches one exactly; the loss is 1 - F1."""
        golds = _golds(example)
        exact, f1 = answer_scores(answer["answer"], golds, self._version)
        return ScoredAnswer(golds or "", answer["answer"], exact == 1.0, 1 - f1)


def _golds(example: QuestionExample) -> list[str]:
    """Return the texts of the gold answers."""
    return [span.text for span in example.answers]


def _null_score(answer: Answer) -> float:
    """Return the score of "no answer" minus the score of the best span (Devlin et al. 2019, section 4.3)."""
    return float(answer["no_answer_score"] - answer["score"]) if answer["score"] is not None else 0.0


def answer_tokens(windows: Sequence[Encoding], context: str, span: AnswerSpan) -> list[TokenPosition | None]:
    """Return, for each window, the positions of the first and the last token that overlap the answer.

    The result is None for windows that do not contain the whole answer.
    """
    start, stop = strip_span(context, span.start, span.start + len(span.text))
    context_positions = [_context_positions(window) for window in windows]
    answer_positions: list[list[int]] = []  # positions in each window of the tokens that overlap the answer
    token_indices: set[int] = set()  # indices of these tokens among the tokens of the context
    for window, positions in zip(windows, context_positions, strict=True):
        overlapping = [
            position
            for position in positions
            if window.offsets[position][0] < stop and window.offsets[position][1] > start
        ]
        answer_positions.append(overlapping)
        token_indices.update(window.start + position - positions[0] for position in overlapping)
    last_window = windows[-1]
    if last_window.dropped and all(last_window.offsets[position][1] < stop for position in context_positions[-1]):
        return [None] * len(windows)  # truncation cut the end of the answer
    return [
        (positions[0], positions[-1]) if positions and len(positions) == len(token_indices) else None
        for positions in answer_positions
    ]
