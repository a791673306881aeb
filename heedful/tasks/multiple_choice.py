"""Multiple choice: the task and its answers. Each candidate is scored in a pair with the prompt; the best one wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

import torch
from torch import Tensor

from heedful.data import ChoiceExample, Example
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, weights_of_samples
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, dict_values, read_pair
from heedful.tasks.metrics import Accuracy, Result, TokenLoss, mean_of
from heedful.tasks.predictions import MultipleChoice
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, bootstrap_stat, log_loss
from heedful.tokenizer import Encoding, TokenizerInput
from heedful.tokenizer.encoding import window_at, window_starts


def choice_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return the pairs of {"prompt": ..., "choices": [...]} as tokenizer inputs, or None for another form of input."""
    prompt, choices = dict_values(engine_input, "prompt", "choices") or (None, None)
    if not isinstance(choices, list | tuple) or not choices:
        return None
    pairs = [read_pair((prompt, choice)) for choice in choices]
    return [pair[0] for pair in pairs if pair] if all(pairs) else None


def prompt_windows(encodings: list[Encoding], limit: int | None) -> list[list[Encoding]]:
    """Split a long prompt into the same windows for each candidate.

    A prompt of up to half the limit is never split. Candidates are split if the longest one does not fit into the rest
    of a window, which is at least half the limit. Windows of candidates with fewer windows are repeated.

    Args:
        encodings: The pair of prompt and candidate, for each candidate.
        limit: Maximum tokens in a window. If None, nothing is split.

    Returns:
        The windows of each candidate; all candidates have equally many.
    """
    if limit is None or max(map(len, encodings)) <= limit:
        return [[encoding] for encoding in encodings]
    prompt_length = max(encoding.segments.count(0) for encoding in encodings)
    longest_choice = max(encoding.segments.count(1) for encoding in encodings)
    special_tokens = sum(encodings[0].special)
    if limit < special_tokens + 2:
        raise HeedfulError(
            f"this model reads {limit} tokens, and {special_tokens} of them are special: that leaves no room for text"
        )
    room = limit - special_tokens  # tokens of text in a window
    choice_room = min(longest_choice, room - min(prompt_length, room // 2))
    choice_windows = [_windows(encoding, 1, encoding.segments.count(1), choice_room) for encoding in encodings]
    count = max(map(len, choice_windows))
    all_windows: list[list[Encoding]] = []
    for own_windows in choice_windows:
        repeated = [own_windows[index % len(own_windows)] for index in range(count)]
        prompts = [_windows(window, 0, prompt_length, room - choice_room) for window in repeated]
        all_windows.append(list(chain.from_iterable(prompts)))
    return all_windows


def _windows(encoded: Encoding, segment: int, length: int, room: int) -> list[Encoding]:
    """Split one text of a pair, of `length` tokens, into windows of `room` tokens that overlap by half."""
    starts = window_starts(length, room, max(1, room // 2))
    return [window_at(encoded, segment=segment, start=start, room=room) for start in starts]


def choice_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"choice", "index", "probability", "probabilities", "windows"}.

    Probabilities are the softmax over the scores of the candidates, and the mean over the windows of the prompt.
    """
    assert isinstance(engine_input, dict)
    # [candidates, windows]
    scores = torch.stack([window.scores for window in windows]).view(len(engine_input["choices"]), -1)
    probabilities = scores.softmax(0).mean(1).tolist()
    index = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {
        "choice": engine_input["choices"][index],
        "index": index,
        "probability": probabilities[index],
        "probabilities": probabilities,
        "windows": scores.shape[1],
    }


def _prediction(answer: Answer) -> MultipleChoice:
    """Convert an answer to its dataclass."""
    return MultipleChoice.from_answer({**answer, "probabilities": tuple(answer["probabilities"])})


MULTIPLE_CHOICE_HEAD = AnswerHead(
    expects='prompts with their candidates, like [{"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}]',
    tokenizer_inputs=choice_inputs,
    answer=choice_answer,
    windows=prompt_windows,
    prediction=_prediction,
    columns=lambda loaded, generation: {
        "choice": str,
        "index": int,
        "probability": float,
        "probabilities": [float],
        "windows": int,
    },
)


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceTask(Task[ChoiceExample]):
    """Multiple choice: the loss is the cross-entropy over the scores of a prompt's candidates.

    Prompts may have different numbers of candidates.
    """

    example: ClassVar[type[Example]] = ChoiceExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (MULTIPLE_CHOICE_HEAD,)
    metric: str = "accuracy"

    def tokenizer_inputs(self, example: ChoiceExample) -> list[TokenizerInput]:
        return [(example.prompt, candidate) for candidate in example.candidates]

    def engine_input(self, example: ChoiceExample) -> object:
        return {"prompt": example.prompt, "choices": list(example.candidates)}

    def windows(self, inputs: list[TokenizerInput], encodings: list[Encoding]) -> list[list[Encoding]]:
        """Return the windows of each candidate; all candidates have equally many."""
        if self.long_inputs == "truncate":
            return [[encoding] for encoding in encodings]
        return prompt_windows(encodings, self.limit)

    def make_samples(self, example: ChoiceExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return a sample for each window of the prompt, with a sequence for each candidate."""
        return [
            Sample.of(
                [window.ids for window in windows],
                [window.types for window in windows],
                target=example.answer,
                weight=1 / len(item_windows[0]),
            )
            for windows in zip(*item_windows, strict=True)
        ]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch. A group is the candidates of a prompt; a target is the index of the correct sequence."""
        groups = tuple(len(sample.bounds) - 1 for sample in samples)
        starts = accumulate(groups, initial=0)
        targets = torch.tensor([start + sample.target for start, sample in zip(starts, samples, strict=False)])
        return Batch(packed=pack_samples(samples), targets=targets, weights=weights_of_samples(samples), groups=groups)

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy over the candidates of each prompt."""
        totals = torch.stack([group.logsumexp(0) for group in scores.split(batch.groups)])
        return totals - scores[batch.targets]

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(
            metrics={"accuracy": Accuracy(), "loss": TokenLoss()}, bootstraps={"accuracy": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[ChoiceExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        scored = [self.score_answer(example, answer) for example, answer in zip(examples, answers, strict=True)]
        predicted = [answer_score.prediction for answer_score in scored]
        gold = [answer_score.label for answer_score in scored]
        losses = [answer_score.loss for answer_score in scored]
        correct = [(answer_score.correct, 1) for answer_score in scored]
        return EvalMetrics(
            metrics={
                "accuracy": metrics.metrics["accuracy"].update(predicted, gold),
                "loss": metrics.metrics["loss"].update(losses, [1] * len(losses)),
            },
            bootstraps={"accuracy": metrics.bootstraps["accuracy"].update(ids, correct)},
        )

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["accuracy"].compute()
        return results | {"loss": metrics.metrics["loss"].compute()["loss"]}

    def score_answer(self, example: ChoiceExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the label. The loss is -log of the probability of the correct candidate."""
        loss = log_loss(answer["probabilities"][example.answer])
        return ScoredAnswer(example.answer, answer["index"], answer["index"] == example.answer, loss)
