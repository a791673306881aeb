"""Outputs of a teacher for samples: scores, hidden states, and attention inputs (queries, keys and values)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.pooling import PooledClassesHead
from heedful.model.trace import Part, Trace
from heedful.nn.layout import AttentionArgs
from heedful.objectives.base import Batch, Sample
from heedful.packed import Packed

TeacherOutputs = dict[str, list[Tensor]]  # by name ("scores", "states.6", "q.5"): one tensor for each sample
ScoreLevel = Literal["rows", "positions", "documents", "sequences"]  # what a row of scores belongs to
ScoreKind = Literal["classes", "multiple", "numbers", "tokens", "span", "choice", "ranking", "vectors", "masked"]
LEVELS: dict[ScoreKind, ScoreLevel] = {  # kinds that are not listed: sequences
    "span": "rows",  # every token
    "tokens": "positions",  # the scored tokens
    "masked": "positions",
    "ranking": "documents",
}


@runtime_checkable
class ScoringObjective(Protocol):
    """An objective whose loss is a function of scores."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Collate samples into a batch."""

    def scores(self, loaded: ModelBundle, batch: Batch, hidden_states: Tensor | None = None) -> Tensor:
        """Return the head's scores. If the last `hidden_states` of the batch are None, they are computed."""

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """The layers whose hidden states and attention inputs are captured in a forward pass."""

    states: tuple[int, ...] = ()  # layers: 0 is the input of the first block, the number of layers the last output
    attention: tuple[int, ...] = ()  # layers, from 0, whose queries, keys and values are captured

    @property
    def names(self) -> list[str]:
        """The names of the captured tensors, such as "states.6" and "q.5"."""
        return [*(f"states.{layer}" for layer in self.states), *(f"{x}.{n}" for n in self.attention for x in "qkv")]


@dataclass(kw_only=True, eq=False)
class CaptureTrace(Trace):
    """A trace that stores tensors unchanged: all rows end to end, with their autograd graph."""

    spec: CaptureSpec
    captured: dict[str, Tensor] = field(default_factory=dict, init=False)

    def record_attention(
        self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Store queries, keys and values of a layer as [rows, heads x head width]."""
        if part != "cross" and layer in self.spec.attention:
            for name, rows in zip("qkv", (q, k, v), strict=True):
                self.captured[f"{name}.{layer}"] = rows.flatten(1)

    def record_states(self, part: Part, layer: int, count: int, x: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Store the input of a block, or the output of the last block."""
        if layer in self.spec.states:
            self.captured[f"states.{layer}"] = x


def capture(loaded: ModelBundle, packed: Packed, spec: CaptureSpec) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Run the model; return its last hidden states, and the captured tensors in float32.

    If nothing is to be captured, the model is not run and None and {} are returned, except for the head of a classic
    model, whose loss needs the hidden states.
    """
    if not spec.names and not isinstance(loaded.head, PooledClassesHead):
        return None, {}
    trace = CaptureTrace(what=(), spec=spec)
    rows = loaded.hidden_states(packed, trace=trace)
    count = packed.bounds[-1]  # without padding
    return rows, {name: trace.captured[name][:count].float() for name in spec.names}


class Teacher:
    """A frozen float32 model in eval mode that produces distillation targets.

    Args:
        loaded: The model.
        objective: Makes batches of samples and scores them.
        kind: Kind of the scores.
        capture_spec: Layers that are captured in addition to the scores.
        classes: Number of scores per target that are returned, the first ones; None: all.
    """

    def __init__(
        self,
        loaded: ModelBundle,
        objective: ScoringObjective,
        kind: ScoreKind,
        capture_spec: CaptureSpec,
        classes: int | None = None,
    ) -> None:
        self.loaded, self.objective, self.kind = loaded.requires_grad_(False).eval(), objective, kind
        self.capture_spec, self.classes = capture_spec, classes

    @torch.no_grad()
    def outputs(self, samples: Sequence[Sample], keys: Sequence[int]) -> TeacherOutputs:
        """Return the scores and the captured tensors of each sample."""
        assert not self.loaded.training
        device = next(self.loaded.parameters()).device
        batch = self.objective.batch(samples, keys).to(device)
        with torch.autocast(device.type, enabled=False):
            rows, captured = capture(self.loaded, batch.packed, self.capture_spec)
            scores = self.objective.scores(self.loaded, batch, rows)[..., : self.classes]
        lengths = [len(sample) for sample in samples]
        outputs = {name: list(tensor.split(lengths)) for name, tensor in captured.items()}
        return outputs | {"scores": list(scores.split(score_counts(samples, batch, self.kind)))}


def score_counts(samples: Sequence[Sample], batch: Batch, kind: ScoreKind) -> list[int]:
    """Return the number of scores of each sample."""
    match LEVELS.get(kind, "sequences"):
        case "rows":
            return [len(sample) for sample in samples]
        case "positions":
            assert batch.rows is not None
            sample_ends = np.array([*accumulate(map(len, samples))])
            sample_of = np.searchsorted(sample_ends, batch.rows.cpu().numpy(), side="right")
            counts: list[int] = np.bincount(sample_of, minlength=len(samples)).tolist()
            return counts
        case "documents":
            return list(batch.groups)
    return [len(sample.bounds) - 1 for sample in samples]


# -- alignment of the student's samples with the teacher's ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleAlignment:
    """For each sample of the student, the teacher's samples of the same example."""

    same_tokens: bool  # whether samples of student and teacher are equal, token for token
    teacher_numbers: list[tuple[int, ...]]  # numbers of the teacher's samples, for each sample of the student
    # for tags of words, if tokens differ: which of the example's words are in each sample of the student; None for a
    # sample whose example has a different number of words for the teacher
    words: list[slice | None] | None

    def fits(self, number: int) -> bool:
        """Whether the teacher has outputs for the sample."""
        return self.words is None or self.words[number] is not None

    def scores(self, number: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return the scores for a sample of the student that fits.

        Args:
            number: Number of the sample.
            outputs: Scores of each of its teacher's samples. If tokens differ, they are averaged, or for tags of words
                joined and cut to the words of the sample.
        """
        if self.same_tokens:
            return outputs[0]
        if self.words is None:
            return torch.stack(list(outputs)).mean(0)
        own_words = self.words[number]
        assert own_words is not None
        return torch.cat(list(outputs))[own_words]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedSamples:
    """Samples, and for each the number of its example."""

    samples: Sequence[Sample]
    owners: Sequence[int]


def align_samples(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, kind: ScoreKind, needs: Sequence[str] = ()
) -> SampleAlignment:
    """Align the student's samples with the teacher's.

    Args:
        student_samples: Samples of the student.
        teacher_samples: Samples of the teacher. They may have different tokens if whole texts or words are scored.
        kind: Kind of scores.
        needs: Names of losses that compare token with token.

    Raises:
        HeedfulError: If tokens differ, but have to be compared.
    """
    if _have_same_tokens(student_samples, teacher_samples):
        equal_numbers: list[tuple[int, ...]] = [(number,) for number in range(len(student_samples.samples))]
        return SampleAlignment(same_tokens=True, teacher_numbers=equal_numbers, words=None)
    needs = [*needs, *([f"soft labels of {kind}"] if kind in ("span", "masked") else [])]
    if needs:
        raise HeedfulError(
            f"student and teacher split texts into different tokens or windows, but {' and '.join(needs)} compare "
            "token with token: give the student the teacher's vocabulary and a max_length that both read, or leave "
            "these losses out"
        )
    numbers_by_owner: dict[int, list[int]] = {}
    for number, owner in enumerate(teacher_samples.owners):
        numbers_by_owner.setdefault(owner, []).append(number)
    numbers = [tuple(numbers_by_owner.get(owner, ())) for owner in student_samples.owners]
    words = _align_words(student_samples, teacher_samples, numbers) if kind == "tokens" else None
    return SampleAlignment(same_tokens=False, teacher_numbers=numbers, words=words)


def _have_same_tokens(student_samples: OwnedSamples, teacher_samples: OwnedSamples) -> bool:
    """Whether all samples are equal, token for token."""
    return len(student_samples.samples) == len(teacher_samples.samples) and all(
        a.bounds == b.bounds and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(student_samples.samples, teacher_samples.samples, strict=True)
    )


def _align_words(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, teacher_numbers: Sequence[tuple[int, ...]]
) -> list[slice | None]:
    """Return which of its example's words each sample of the student has.

    None marks a sample whose example has a different number of words for the teacher.
    """
    counts = [len(sample.target[0]) for sample in student_samples.samples]
    totals: dict[int, int] = {}  # words of each example
    starts = []  # number of words in earlier samples of the same example
    for owner, count in zip(student_samples.owners, counts, strict=True):
        starts.append(totals.get(owner, 0))
        totals[owner] = starts[-1] + count
    words: list[slice | None] = []
    for owner, numbers, start, count in zip(student_samples.owners, teacher_numbers, starts, counts, strict=True):
        teacher_total = sum(len(teacher_samples.samples[number].target[0]) for number in numbers)
        words.append(slice(start, start + count) if teacher_total == totals[owner] else None)
    return words
