"""Tagging, such as named entity recognition: the task `Tag`, and its answers (labels of words, and entities)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import eq
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, TaggedExample
from heedful.data.tag_schemes import OUTSIDE, to_iob2, to_scheme
from heedful.model.config import TokenClasses
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    TokenPosition,
    Window,
    best_context_positions,
    group_by_window,
    strip_span,
)
from heedful.tasks.metrics import (
    Accuracy,
    EntityScores,
    Result,
    entity_counts,
    f1_of,
    mean_of,
    precision_of,
    recall_of,
)
from heedful.tasks.predictions import Entity, TokenClassification, Word
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, TaskSetup, bootstrap_stat
from heedful.tokenizer import Encoding, PreTokenized, Tokenizer, TokenizerInput

BEGIN = ("B", "S", "U")  # marks that begin an entity in IOB2, IOBES, BILOU and BMES
INSIDE = ("I", "E", "L", "M")  # marks that continue an entity
OPEN = ("B", "I", "M")  # marks after which the next word may continue the entity
MARKS = BEGIN + INSIDE


def tag_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return a text or a list of words as tokenizer input, or None if the input has a different form."""
    if isinstance(engine_input, list) and all(isinstance(word, str) for word in engine_input):
        return [PreTokenized(engine_input)]
    return [engine_input] if isinstance(engine_input, str | PreTokenized) else None


def word_positions(windows: list[Encoding], tokenizer: Tokenizer) -> list[TokenPosition]:
    """Return the position of the first token of each word, in the window where it has the most context."""
    first_tokens: dict[int | None, TokenPosition] = {}  # first token by index of the word
    for window_index, position in best_context_positions(windows):
        first_tokens.setdefault(windows[window_index].words[position], (window_index, position))
    return list(first_tokens.values())


def tag_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"words": [{"text", "label", "probability", "start", "end"}], "entities": [...], "windows"}.

    Start and end are in characters of the text, for which the words of a list are joined by single spaces. A word gets
    the label of its first token. A word without tokens, such as a control character, gets the probability None and the
    label "O", or None if the model does not have that label.
    """
    head = context.head
    assert isinstance(head, TokenClasses)
    text, spans = _text_and_spans(engine_input, context.windows or [window.encoded for window in windows])
    word_labels: dict[int | None, tuple[str, float]] = {}
    for window in windows:
        probabilities, label_ids = window.scores.softmax(-1).max(-1)
        columns = zip(window.positions, probabilities.tolist(), label_ids.tolist(), strict=True)
        for position, probability, label_id in columns:
            word_labels[window.encoded.words[position]] = head.labels[label_id], probability
    without_tokens = (OUTSIDE if OUTSIDE in head.labels else None, None)
    words = []
    for word_index, (start, stop) in spans.items():
        label, probability = word_labels.get(word_index, without_tokens)
        words.append(
            {"text": text[start:stop], "label": label, "probability": probability, "start": start, "end": stop}
        )
    return {"words": words, "entities": join_entities(text, words), "windows": len(windows)}


def _text_and_spans(engine_input: object, windows: Sequence[Encoding]) -> tuple[str, dict[int, tuple[int, int]]]:
    """Return the text of an input, and the character span of each word by the index of the word."""
    if not isinstance(engine_input, str):
        words = engine_input.words if isinstance(engine_input, PreTokenized) else engine_input
        assert isinstance(words, Sequence)
        starts = accumulate((len(word) + 1 for word in words), initial=0)
        starts_and_words = enumerate(zip(starts, words, strict=False))
        return " ".join(words), {index: (start, start + len(word)) for index, (start, word) in starts_and_words}
    spans: dict[int, tuple[int, int]] = {}
    for window in windows:
        for word, (start, stop) in zip(window.words, window.offsets, strict=True):
            if word is not None:
                low, high = spans.get(word, (start, stop))
                spans[word] = min(low, start), max(high, stop)
    return engine_input, {word: strip_span(engine_input, *spans[word]) for word in sorted(spans)}


def join_entities(text: str, words: Sequence[Answer]) -> list[Answer]:
    """Join neighbouring words into entities. I-x begins an entity unless it continues one of type x (conlleval)."""
    groups: list[list[Answer]] = []  # the words of each entity
    open_kind = ""  # type of the entity that the next word may continue; "": none
    for word in words:
        mark, dash, kind = (word["label"] or OUTSIDE).partition("-")
        continues = dash and mark in INSIDE and kind == open_kind
        if continues:
            groups[-1].append(word)
        elif dash and mark in MARKS:
            groups.append([word])
        open_kind = kind if dash and mark in OPEN else ""
    return [
        {
            "label": group[0]["label"].partition("-")[2],
            "text": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
            "probability": sum(word["probability"] for word in group) / len(group),
        }
        for group in groups
    ]


def _prediction(answer: Answer) -> TokenClassification:
    """Convert an answer to its dataclass."""
    entities = tuple(Entity(**fields) for fields in answer["entities"])
    words = tuple(Word(**fields) for fields in answer["words"])
    return TokenClassification.from_answer({**answer, "entities": entities, "words": words})


WORD_COLUMNS = {"text": str, "label": str, "probability": float, "start": int, "end": int}
ENTITY_COLUMNS = {"label": str, "text": str, "start": int, "end": int, "probability": float}
TAG_HEAD = AnswerHead(
    expects='lists of words or whole texts, like [["Ada", "lives", "here"], "a whole text"]',
    tokenizer_inputs=tag_inputs,
    positions=word_positions,
    answer=tag_answer,
    prediction=_prediction,
    columns=lambda loaded, generation: {"words": [WORD_COLUMNS], "entities": [ENTITY_COLUMNS], "windows": int},
)


@dataclass(frozen=True, kw_only=True)
class Tag(Task[TaggedExample]):
    """Tagging: a label for every word.

    The loss is the cross-entropy at the first token of each word, in the window where that token has the most context.
    So every word contributes once, regardless of how many windows contain it. Words without tokens are skipped.
    """

    example: ClassVar[type[Example]] = TaggedExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (TAG_HEAD,)
    metric: str = ""  # "": F1 of entities, or accuracy if the labels do not mark entities

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        return cls.with_new_head(setup, labels=setup.labels)

    def __post_init__(self) -> None:
        if not self.metric:
            object.__setattr__(self, "metric", "f1" if self.marks_entities else "accuracy")

    @property
    def marks_entities(self) -> bool:
        """Whether the labels mark entities: all are O or a mark with a type, such as B-x."""
        return all(label == OUTSIDE or (label[:1] in MARKS and label[1:2] == "-") for label in self.labels)

    @property
    def has_unbegun_types(self) -> bool:
        """Whether some type has a label I-x but no label that begins an entity, as in IO and often in IOB1."""
        begun_types = {label[2:] for label in self.labels if label[:1] in BEGIN}
        return self.marks_entities and any(label[:1] == "I" and label[2:] not in begun_types for label in self.labels)

    def tokenizer_inputs(self, example: TaggedExample) -> list[TokenizerInput]:
        return [PreTokenized(example.words)]

    def engine_input(self, example: TaggedExample) -> object:
        return list(example.words)

    def make_samples(self, example: TaggedExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return a sample for each window with scored words. The target is (positions of the words, label ids)."""
        (windows,) = item_windows
        tags = to_scheme(example.tags, self.labels) if self.marks_entities else example.tags
        positions_by_window = group_by_window(word_positions(windows, self.tokenizer), len(windows))
        samples = []
        for window, positions in zip(windows, positions_by_window, strict=True):
            if positions:
                words = [word for position in positions if (word := window.words[position]) is not None]
                label_ids = tuple(self.labels.index(tags[word]) for word in words)
                samples.append(Sample.of([window.ids], [window.types], target=(tuple(positions), label_ids)))
        return samples

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch, scored at the first token of each word."""
        packed = pack_samples(samples)
        starts = zip(packed.bounds, samples, strict=False)
        rows = [start + position for start, sample in starts for position in sample.target[0]]
        targets = torch.tensor([label for sample in samples for label in sample.target[1]])
        return Batch(packed=packed, targets=targets, weights=torch.ones(len(targets)), rows=torch.tensor(rows))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of each word."""
        return F.cross_entropy(scores, batch.targets, reduction="none")

    def new_metrics(self) -> EvalMetrics:
        if not self.marks_entities:
            return EvalMetrics(metrics={"words": Accuracy()}, bootstraps={"accuracy": bootstrap_stat(2, mean_of)})
        metrics = {"conlleval": EntityScores(scheme="conlleval"), "strict": EntityScores(scheme="strict-iob2")}
        formulas = {"precision": precision_of, "recall": recall_of, "f1": f1_of, "strict_f1": f1_of}
        return EvalMetrics(
            metrics=metrics, bootstraps={name: bootstrap_stat(3, formula) for name, formula in formulas.items()}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[TaggedExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        gold = [list(example.tags) for example in examples]
        predicted = [self._tags(answer) for answer in answers]
        if not self.marks_entities:
            words = metrics.metrics["words"].update(list(chain(*predicted)), list(chain(*gold)))
            tag_pairs = zip(predicted, gold, strict=True)
            correct = [(sum(map(eq, tags, gold_tags)), len(gold_tags)) for tags, gold_tags in tag_pairs]
            return EvalMetrics(
                metrics={"words": words}, bootstraps={"accuracy": metrics.bootstraps["accuracy"].update(ids, correct)}
            )
        # precision, recall and f1 have the same sums, which are computed once
        sums = metrics.bootstraps["f1"].sums.update(ids, entity_counts(predicted, gold, "conlleval"))
        strict = metrics.bootstraps["strict_f1"].update(ids, entity_counts(predicted, gold, "strict-iob2"))
        bootstraps = {name: replace(bootstrap, sums=sums) for name, bootstrap in metrics.bootstraps.items()}
        return EvalMetrics(
            metrics={name: metric.update(predicted, gold) for name, metric in metrics.metrics.items()},
            bootstraps=bootstraps | {"strict_f1": strict},
        )

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        if not self.marks_entities:
            word_results: Result = metrics.metrics["words"].compute()
            return word_results
        strict = metrics.metrics["strict"].compute()["f1"]
        results: Result = metrics.metrics["conlleval"].compute()
        return results | {"strict_f1": strict}

    def score_answer(self, example: TaggedExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the tags. It is correct if all tags are.

        The loss of a wrong answer is 1 plus the probabilities of its wrong tags, so that confident mistakes come first.
        The loss of a correct answer is 1 minus the lowest probability of a tag.
        """
        predicted = self._tags(answer)
        probabilities = [word["probability"] for word in answer["words"]]
        wrong = [
            probability or 0.0
            for probability, tag, gold in zip(probabilities, predicted, example.tags, strict=True)
            if tag != gold
        ]
        lowest = min((probability for probability in probabilities if probability is not None), default=1.0)
        return ScoredAnswer(list(example.tags), predicted, not wrong, 1 + sum(wrong) if wrong else 1 - lowest)

    def _tags(self, answer: Answer) -> list[str]:
        """Return the predicted tag of each word, in IOB2 if tags mark entities. A word without tokens gets "O"."""
        tags = [word["label"] or OUTSIDE for word in answer["words"]]
        return list(to_iob2(tags, strict=not self.has_unbegun_types)) if self.marks_entities else tags
