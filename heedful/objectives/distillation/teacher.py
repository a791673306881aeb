"""Outputs of a teacher for samples: scores, hidden states of some layers, queries, keys and values of others."""

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

TeacherOutputs = dict[str, list[Tensor]]  # by name ("scores", "states.6", "q.5"), one tensor for each sample
ScoreLevel = Literal["rows", "places", "documents", "sequences"]  # what the scores belong to
ScoreKind = Literal["classes", "multiple", "numbers", "tokens", "span", "choice", "ranking", "vectors", "masked"]
LEVELS: dict[ScoreKind, ScoreLevel] = {  # all others: sequences
    "span": "rows",
    "tokens": "places",
    "masked": "places",
    "ranking": "documents",
}


@runtime_checkable
class ScoringObjective(Protocol):
    """An objective whose loss is a function of scores."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return samples as a batch."""

    def scores(self, loaded: ModelBundle, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Return the head's scores; `rows` are the model's last hidden states, if they are known."""

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """The layers whose hidden states and attention inputs are captured beside the scores."""

    states: tuple[
        int, ...
    ] = ()  # layers: 0 is the input of the first block, the number of layers the output of the last
    attention: tuple[int, ...] = ()  # layers, from 0, whose queries, keys and values are captured

    @property
    def names(self) -> list[str]:
        """The names of the captured tensors, such as "states.6" and "q.5"."""
        return [*(f"states.{layer}" for layer in self.states), *(f"{x}.{n}" for n in self.attention for x in "qkv")]


@dataclass(kw_only=True, eq=False)
class CaptureTrace(Trace):
    """A trace that keeps tensors unchanged: all rows end to end, with their graph."""

    wanted: CaptureSpec
    held: dict[str, Tensor] = field(default_factory=dict, init=False)

    def record_attention(
        self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Keep queries, keys and values of a layer, the heads side by side."""
        if part != "cross" and layer in self.wanted.attention:
            self.held |= {f"{name}.{layer}": rows.flatten(1) for name, rows in zip("qkv", (q, k, v), strict=True)}

    def record_states(self, part: Part, layer: int, count: int, x: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Keep the rows before a block, or after the last one."""
        if layer in self.wanted.states:
            self.held[f"states.{layer}"] = x


def capture(loaded: ModelBundle, packed: Packed, wanted: CaptureSpec) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the last hidden states, and captured tensors in float32; None and {} if only scores are wanted."""
    if not wanted.names and not isinstance(loaded.head, PooledClassesHead):
        return None, {}
    inside = CaptureTrace(what=(), wanted=wanted)
    rows = loaded.hidden_states(packed, trace=inside)
    count = packed.bounds[-1]  # without padding
    return rows, {name: inside.held[name][:count].float() for name in wanted.names}


class Teacher:
    """A frozen float32 model in eval mode that produces distillation targets."""

    def __init__(
        self,
        loaded: ModelBundle,
        learner: ScoringObjective,
        kind: ScoreKind,
        wanted: CaptureSpec,
        classes: int | None = None,
    ) -> None:
        self.loaded, self.learner, self.kind, self.wanted = loaded.requires_grad_(False).eval(), learner, kind, wanted
        self.classes = classes  # number of scores that are returned, of a vocabulary; None: all

    @torch.no_grad()
    def outputs(self, samples: Sequence[Sample], keys: Sequence[int]) -> TeacherOutputs:
        """Return the scores and the captured tensors of each sample."""
        assert not self.loaded.training
        device = next(self.loaded.parameters()).device
        batch = self.learner.batch(samples, keys).to(device)
        with torch.autocast(device.type, enabled=False):
            rows, inside = capture(self.loaded, batch.packed, self.wanted)
            scores = self.learner.scores(self.loaded, batch, rows)[..., : self.classes]
        sizes = [len(sample) for sample in samples]
        outputs = {name: list(rows.split(sizes)) for name, rows in inside.items()}
        return outputs | {"scores": list(scores.split(score_counts(samples, batch, self.kind)))}


def score_counts(samples: Sequence[Sample], batch: Batch, kind: ScoreKind) -> list[int]:
    """Return the number of scores of each sample."""
    match LEVELS.get(kind, "sequences"):
        case "rows":
            return [len(sample) for sample in samples]
        case "places":
            assert batch.rows is not None
            ends = np.array([*accumulate(map(len, samples))])
            where = np.searchsorted(ends, batch.rows.cpu().numpy(), side="right")
            counts: list[int] = np.bincount(where, minlength=len(samples)).tolist()
            return counts
        case "documents":
            return list(batch.groups)
    return [len(sample.bounds) - 1 for sample in samples]


# -- alignment of the student's samples with the teacher's ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleAlignment:
    """For each sample of the student, the samples of the same example that the teacher reads."""

    same: bool  # token for token
    teacher_numbers: list[tuple[int, ...]]  # of the teacher's samples
    words: list[slice | None] | None  # of tags in other tokens: which of the example's words; None: they do not fit

    def fits(self, number: int) -> bool:
        """Whether the teacher has outputs for the sample."""
        return self.words is None or self.words[number] is not None

    def scores(self, number: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return the scores for a sample that fits, from those of the teacher's samples: the mean over windows."""
        if self.same:
            return outputs[0]
        if self.words is None:
            return torch.stack(list(outputs)).mean(0)
        part = self.words[number]
        assert part is not None
        return torch.cat(list(outputs))[part]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedSamples:
    """Samples, and the number of each one's example."""

    samples: Sequence[Sample]
    owners: Sequence[int]


def align_samples(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, kind: ScoreKind, needs: Sequence[str] = ()
) -> SampleAlignment:
    """Align the student's samples with the teacher's.

    Args:
        student_samples: Of the student.
        teacher_samples: Of the teacher. They may have other tokens if texts are scored as a whole, or word by word.
        kind: Kind of scores.
        needs: Names of losses that compare token with token.

    Raises:
        HeedfulError: If tokens differ, but have to be compared.
    """
    if _same(student_samples, teacher_samples):
        return SampleAlignment(
            same=True, teacher_numbers=[(number,) for number in range(len(student_samples.samples))], words=None
        )
    needs = [*needs, *([f"soft labels of {kind}"] if kind in ("span", "masked") else [])]
    if needs:
        raise HeedfulError(
            f"student and teacher split texts into different tokens or windows, but {' and '.join(needs)} compare "
            "token with token: give the student the teacher's vocabulary and a max_length that both read, or leave "
            "these losses out"
        )
    of: dict[int, list[int]] = {}
    for number, owner in enumerate(teacher_samples.owners):
        of.setdefault(owner, []).append(number)
    several = [tuple(of.get(owner, ())) for owner in student_samples.owners]
    words = _words(student_samples, teacher_samples, several) if kind == "tokens" else None
    return SampleAlignment(same=False, teacher_numbers=several, words=words)


def _same(student_samples: OwnedSamples, teacher_samples: OwnedSamples) -> bool:
    return len(student_samples.samples) == len(teacher_samples.samples) and all(
        a.bounds == b.bounds and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(student_samples.samples, teacher_samples.samples, strict=True)
    )


def _words(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, several: Sequence[tuple[int, ...]]
) -> list[slice | None]:
    """The words of each sample among those of its example; None if teacher and student have other numbers of words."""
    counts = [len(sample.target[0]) for sample in student_samples.samples]
    totals: dict[int, int] = {}
    starts = []
    for owner, count in zip(student_samples.owners, counts, strict=True):
        starts.append(totals.get(owner, 0))
        totals[owner] = starts[-1] + count
    parts: list[slice | None] = []
    for owner, numbers, start, count in zip(student_samples.owners, several, starts, counts, strict=True):
        count_of_teacher = sum(len(teacher_samples.samples[number].target[0]) for number in numbers)
        parts.append(slice(start, start + count) if count_of_teacher == totals[owner] else None)
    return parts
