"""Choose among candidates: each is scored beside the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from heedful.data import ChoiceExample, Example
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, sample_weights
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, dict_values, read_pair
from heedful.tasks.metrics import Accuracy, Result, TokenLoss, mean_of
from heedful.tasks.predictions import MultipleChoice
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, bootstrap_stat, log_loss
from heedful.tokenizer import Encoding, TokenizerInput
from heedful.tokenizer.encoding import window_at, window_starts


def choice_inputs(given: Any) -> list[TokenizerInput] | None:
    """{"prompt": ..., "choices": [...]}."""
    prompt, choices = dict_values(given, "prompt", "choices") or (None, None)
    if not isinstance(choices, list | tuple) or not choices:
        return None
    pairs = [read_pair((prompt, choice)) for choice in choices]
    return [pair[0] for pair in pairs if pair] if all(pairs) else None


def prompt_windows(encoded: list[Encoding], limit: int | None) -> list[list[Encoding]]:
    """A long prompt in windows that are the same beside each candidate; one of half the room is whole in each of them.

    Where the longest candidate takes more than half, candidates are windowed too, in what the prompt leaves, which is
    at least half, and those that have fewer windows come again.
    """
    if limit is None or max(map(len, encoded)) <= limit:
        return [[each] for each in encoded]
    prompt, longest = (max(each.segments.count(segment) for each in encoded) for segment in (0, 1))
    special = sum(encoded[0].special)
    if limit < special + 2:
        raise HeedfulError(
            f"this model reads {limit} tokens, of which {special} are special: there is no room to window"
        )
    room = limit - special
    kept = min(longest, room - min(prompt, room // 2))
    parts = [_windows(each, 1, each.segments.count(1), kept) for each in encoded]
    most = max(map(len, parts))
    return [
        [window for number in range(most) for window in _windows(mine[number % len(mine)], 0, prompt, room - kept)]
        for mine in parts
    ]


def _windows(encoded: Encoding, segment: int, length: int, room: int) -> list[Encoding]:
    starts = window_starts(length, room, max(1, room // 2))
    return [window_at(encoded, segment=segment, start=start, room=room) for start in starts]


def choice_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"choice", "number", "probability", "probabilities"}: softmax over the scores of this prompt's candidates.

    Where the prompt was seen in windows, the mean of their probabilities.
    """
    scores = torch.stack([window.scores for window in windows]).view(len(given["choices"]), -1)
    probabilities = scores.softmax(0).mean(1).tolist()
    number = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {
        "choice": given["choices"][number],
        "number": number,
        "probability": probabilities[number],
        "probabilities": probabilities,
        "windows": scores.shape[1],
    }


def _prediction(answer: Answer) -> MultipleChoice:
    return MultipleChoice(
        text=answer["choice"],
        index=answer["number"],
        probability=answer["probability"],
        scores=tuple(answer["probabilities"]),
        truncated_tokens=answer.get("cut", 0),
    )


MULTIPLE_CHOICE_HEAD = AnswerHead(
    expects='prompts with their candidates, like [{"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}]',
    tokenizer_inputs=choice_inputs,
    answer=choice_answer,
    windows=prompt_windows,
    prediction=_prediction,
    columns=lambda loaded, writing: {
        "choice": str,
        "number": int,
        "probability": float,
        "probabilities": [float],
        "windows": int,
    },
)


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceTask(Task):
    """One candidate of several: cross-entropy over the scores of a prompt's candidates, which may differ in number."""

    example: ClassVar[type[Example]] = ChoiceExample
    head: ClassVar[str] = "multiple_choice"
    answerers: ClassVar[tuple[AnswerHead, ...]] = (MULTIPLE_CHOICE_HEAD,)
    metric: str = "accuracy"

    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        return [(example.prompt, candidate) for candidate in example.candidates]

    def engine_input(self, example: Any) -> Any:
        return {"prompt": example.prompt, "choices": list(example.candidates)}

    def windows(self, items: list[TokenizerInput], seen: list[Encoding]) -> list[list[Encoding]]:
        return [[each] for each in seen] if self.long_inputs == "truncate" else prompt_windows(seen, self.limit)

    def make_samples(self, example: ChoiceExample, seen: list[list[Encoding]]) -> list[Sample]:
        return [
            Sample.of(
                [each.ids for each in mine],
                [each.types for each in mine],
                target=example.answer,
                weight=1 / len(seen[0]),
            )
            for mine in zip(*seen, strict=True)
        ]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        groups = tuple(len(sample.bounds) - 1 for sample in samples)
        starts = accumulate(groups, initial=0)
        targets = torch.tensor([start + sample.target for start, sample in zip(starts, samples, strict=False)])
        return Batch(packed=pack_samples(samples), targets=targets, weights=sample_weights(samples), groups=groups)

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        totals = torch.stack([group.logsumexp(0) for group in scores.split(batch.groups)])
        return totals - scores[batch.targets]

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(
            metrics={"accuracy": Accuracy(), "loss": TokenLoss()}, bootstraps={"accuracy": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[ChoiceExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        judged = [self.score_answer(example, answer) for example, answer in zip(examples, answers, strict=True)]
        said, gold = [each.prediction for each in judged], [each.label for each in judged]
        return EvalMetrics(
            metrics={
                "accuracy": metrics.metrics["accuracy"].update(said, gold),
                "loss": metrics.metrics["loss"].update([each.loss for each in judged], [1] * len(judged)),
            },
            bootstraps={"accuracy": metrics.bootstraps["accuracy"].update(ids, [(each.correct, 1) for each in judged])},
        )

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        found: Result = metrics.metrics["accuracy"].compute()
        return found | {"loss": metrics.metrics["loss"].compute()["loss"]}

    def score_answer(self, example: ChoiceExample, answer: Answer) -> ScoredAnswer:
        loss = log_loss(answer["probabilities"][example.answer])
        return ScoredAnswer(example.answer, answer["number"], answer["number"] == example.answer, loss)
