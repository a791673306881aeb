"""`Teacher`: a trained model that returns scores, hidden states, queries, keys and values for samples.

`align_samples` finds the teacher's samples for those of a student with another tokenizer or maximum length.
"""

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
ScoreLevel = Literal["rows", "positions", "documents", "sequences"]  # items that are scored
ScoreKind = Literal["classes", "multiple", "numbers", "tokens", "span", "choice", "ranking", "vectors", "masked"]
LEVELS: dict[ScoreKind, ScoreLevel] = {  # other kinds score sequences
    "span": "rows",  # all tokens
    "tokens": "positions",  # the tokens in `Batch.rows`
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

    # layers whose input is captured, and the last output at the index that equals the number of layers
    states: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()  # layers whose queries, keys and values are captured

    @property
    def names(self) -> list[str]:
        """The names of the captured tensors, such as "states.6" and "q.5"."""
        states = [f"states.{layer}" for layer in self.states]
        return [*states, *(f"{name}.{layer}" for layer in self.attention for name in "qkv")]


@dataclass(kw_only=True, eq=False)
class CaptureTrace(Trace):
    """A trace that stores tensors unchanged: all tokens of the batch, with the autograd graph."""

    spec: CaptureSpec
    captured: dict[str, Tensor] = field(default_factory=dict, init=False)

    def record_attention(
        self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Store queries, keys and values of a layer as [tokens, heads * head dimension]."""
        if part != "cross" and layer in self.spec.attention:
            for name, tensor in zip("qkv", (q, k, v), strict=True):
                self.captured[f"{name}.{layer}"] = tensor.flatten(1)

    def record_states(self, part: Part, layer: int, count: int, x: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Store the input of a block, or the output of the last block."""
        if layer in self.spec.states:
            self.captured[f"states.{layer}"] = x


def capture(loaded: ModelBundle, packed: Packed, spec: CaptureSpec) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Run the model; return its last hidden states, and the captured tensors in float32.

    If `spec` is empty, the model is not run, and None and {} are returned. The exception is a model with the head of
    classic models: its loss needs the hidden states.
    """
    if not spec.names and not isinstance(loaded.head, PooledClassesHead):
        return None, {}
    trace = CaptureTrace(what=(), spec=spec)
    hidden_states = loaded.hidden_states(packed, trace=trace)
    token_count = packed.bounds[-1]  # without padding
    return hidden_states, {name: trace.captured[name][:token_count].float() for name in spec.names}


class Teacher:
    """A frozen float32 model in eval mode that produces distillation targets.

    Args:
        loaded: The model.
        objective: Collates samples into batches, and scores them.
        kind: Kind of the scores.
        capture_spec: Layers that are captured in addition to the scores.
        classes: Return the scores of the first `classes` classes only. If None, all scores are returned.
    """

    def __init__(
        self,
        loaded: ModelBundle,
        objective: ScoringObjective,
        kind: ScoreKind,
        capture_spec: CaptureSpec,
        classes: int | None = None,
    ) -> None:
        self.loaded = loaded.requires_grad_(False).eval()
        self.objective = objective
        self.kind = kind
        self.capture_spec = capture_spec
        self.classes = classes

    @torch.no_grad()
    def outputs(self, samples: Sequence[Sample], keys: Sequence[int]) -> TeacherOutputs:
        """Return the scores and the captured tensors of each sample."""
        assert not self.loaded.training
        device = next(self.loaded.parameters()).device
        batch = self.objective.batch(samples, keys).to(device)
        with torch.autocast(device.type, enabled=False):
            hidden_states, captured = capture(self.loaded, batch.packed, self.capture_spec)
            scores = self.objective.scores(self.loaded, batch, hidden_states)[..., : self.classes]
        lengths = [len(sample) for sample in samples]
        outputs = {name: list(tensor.split(lengths)) for name, tensor in captured.items()}
        return outputs | {"scores": list(scores.split(score_counts(samples, batch, self.kind)))}


def score_counts(samples: Sequence[Sample], batch: Batch, kind: ScoreKind) -> list[int]:
    """Return the number of scored items of each sample."""
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

    same_tokens: bool  # whether the samples of student and teacher have equal tokens
    teacher_indices: list[tuple[int, ...]]  # for each sample of the student, indices of the teacher's samples
    # None except for tags of words with different tokens. Then, for each sample of the student, the slice of the
    # example's words that are in the sample; None if the example has a different number of words for the teacher
    words: list[slice | None] | None

    def fits(self, index: int) -> bool:
        """Whether the teacher has outputs for the student's sample with this index."""
        return self.words is None or self.words[index] is not None

    def scores(self, index: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return the teacher's scores for a sample of the student that `fits`.

        If tokens differ, the outputs are averaged, or, for tags of words, concatenated and cut to the sample's words.

        Args:
            index: Index of the student's sample.
            outputs: Scores of each of the teacher's samples of the same example.
        """
        if self.same_tokens:
            return outputs[0]
        if self.words is None:
            return torch.stack(list(outputs)).mean(0)
        sample_words = self.words[index]
        assert sample_words is not None
        return torch.cat(list(outputs))[sample_words]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedSamples:
    """Samples with the examples that they were made from."""

    samples: Sequence[Sample]
    example_indices: Sequence[int]  # index of the example of each sample


def align_samples(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, kind: ScoreKind, needs: Sequence[str] = ()
) -> SampleAlignment:
    """Align the student's samples with the teacher's.

    Args:
        student_samples: Samples of the student.
        teacher_samples: Samples of the teacher. They may have different tokens if whole texts or words are scored.
        kind: Kind of scores.
        needs: Names of losses that compare single tokens, for the error message.

    Raises:
        HeedfulError: If tokens differ, and a loss compares single tokens.
    """
    if _have_same_tokens(student_samples, teacher_samples):
        equal_indices: list[tuple[int, ...]] = [(index,) for index in range(len(student_samples.samples))]
        return SampleAlignment(same_tokens=True, teacher_indices=equal_indices, words=None)
    needs = [*needs, *([f"soft labels of {kind}"] if kind in ("span", "masked") else [])]
    if needs:
        raise HeedfulError(
            f"student and teacher split texts into different tokens or windows, but {' and '.join(needs)} compare "
            "token with token: give the student the teacher's vocabulary and a max_length that both read, or leave "
            "these losses out"
        )
    by_example: dict[int, list[int]] = {}  # indices of the teacher's samples
    for index, example in enumerate(teacher_samples.example_indices):
        by_example.setdefault(example, []).append(index)
    teacher_indices = [tuple(by_example.get(example, ())) for example in student_samples.example_indices]
    words = _align_words(student_samples, teacher_samples, teacher_indices) if kind == "tokens" else None
    return SampleAlignment(same_tokens=False, teacher_indices=teacher_indices, words=words)


def _have_same_tokens(student_samples: OwnedSamples, teacher_samples: OwnedSamples) -> bool:
    """Return whether the samples of student and teacher have equal tokens."""
    return len(student_samples.samples) == len(teacher_samples.samples) and all(
        a.bounds == b.bounds and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(student_samples.samples, teacher_samples.samples, strict=True)
    )


def _align_words(
    student_samples: OwnedSamples, teacher_samples: OwnedSamples, teacher_indices: Sequence[tuple[int, ...]]
) -> list[slice | None]:
    """Return, for each sample of the student, the slice of its example's words that are in the sample.

    The slice is None if the example has a different number of words for the teacher.
    """
    examples = student_samples.example_indices
    counts = [len(sample.target[0]) for sample in student_samples.samples]  # words of each sample
    totals: dict[int, int] = {}  # words of each example
    starts = []  # words in earlier samples of the same example
    for example, count in zip(examples, counts, strict=True):
        starts.append(totals.get(example, 0))
        totals[example] = starts[-1] + count
    words: list[slice | None] = []
    for example, indices, start, count in zip(examples, teacher_indices, starts, counts, strict=True):
        teacher_total = sum(len(teacher_samples.samples[index].target[0]) for index in indices)
        words.append(slice(start, start + count) if teacher_total == totals[example] else None)
    return words
