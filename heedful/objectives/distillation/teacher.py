"""What a teacher says of samples: its scores, the states of some layers, queries, keys and values of others."""

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
ScoreLevel = Literal["rows", "places", "sequences"]  # what the scores belong to
ScoreKind = Literal["classes", "multiple", "numbers", "tokens", "span", "choice", "vectors", "masked"]
LEVELS: dict[ScoreKind, ScoreLevel] = {"span": "rows", "tokens": "places", "masked": "places"}  # all others: sequences


@runtime_checkable
class ScoringObjective(Protocol):
    """An objective whose loss is one of scores."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Samples as a batch."""

    def scores(self, loaded: ModelBundle, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """What the head says of the model's rows."""

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """A loss for each target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """What is asked of a model beside its scores."""

    states: tuple[int, ...] = ()  # layers: 0 is what enters the first block, the number of layers what leaves the last
    attention: tuple[int, ...] = ()  # layers, from 0, of which queries, keys and values are wanted

    @property
    def names(self) -> list[str]:
        """As they are called."""
        return [*(f"states.{layer}" for layer in self.states), *(f"{x}.{n}" for n in self.attention for x in "qkv")]


@dataclass(kw_only=True, eq=False)
class CaptureTrace(Trace):
    """A trace that keeps what it is shown as it is: all rows end to end, with their graph."""

    wanted: CaptureSpec
    held: dict[str, Tensor] = field(default_factory=dict, init=False)

    def record_attention(
        self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Queries, keys and values of a layer, the heads side by side."""
        if part != "cross" and layer in self.wanted.attention:
            self.held |= {f"{name}.{layer}": each.flatten(1) for name, each in zip("qkv", (q, k, v), strict=True)}

    def record_states(self, part: Part, layer: int, count: int, x: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Rows before a block, or after the last one."""
        if layer in self.wanted.states:
            self.held[f"states.{layer}"] = x


def capture(loaded: ModelBundle, packed: Packed, wanted: CaptureSpec) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What is wanted of a model's inside, in float32, and with it the last rows; None where only scores are wanted."""
    if not wanted.names and not isinstance(loaded.head, PooledClassesHead):
        return None, {}
    inside = CaptureTrace(what=(), wanted=wanted)
    rows = loaded.hidden_states(packed, trace=inside)
    count = packed.bounds[-1]  # a batch may have been filled up
    return rows, {name: inside.held[name][:count].float() for name in wanted.names}


class Teacher:
    """A trained model in eval mode that says what it makes of its own samples; it learns nothing, in float32."""

    def __init__(
        self,
        loaded: ModelBundle,
        learner: ScoringObjective,
        kind: ScoreKind,
        wanted: CaptureSpec,
        classes: int | None = None,
    ) -> None:
        self.loaded, self.learner, self.kind, self.wanted = loaded.requires_grad_(False).eval(), learner, kind, wanted
        self.classes = classes  # of a vocabulary: the scores that are said; none: all

    @torch.no_grad()
    def says(self, samples: Sequence[Sample], keys: Sequence[int]) -> TeacherOutputs:
        """Of each sample: its scores, and what is wanted of its rows."""
        assert not self.loaded.training
        device = next(self.loaded.parameters()).device
        batch = self.learner.batch(samples, keys).to(device)
        with torch.autocast(device.type, enabled=False):
            rows, inside = capture(self.loaded, batch.packed, self.wanted)
            scores = self.learner.scores(self.loaded, batch, rows)[..., : self.classes]
        sizes = [len(sample) for sample in samples]
        found = {name: list(each.split(sizes)) for name, each in inside.items()}
        return found | {"scores": list(scores.split(score_counts(samples, batch, self.kind)))}


def score_counts(samples: Sequence[Sample], batch: Batch, kind: ScoreKind) -> list[int]:
    """How many scores each sample has."""
    match LEVELS.get(kind, "sequences"):
        case "rows":
            return [len(sample) for sample in samples]
        case "places":
            assert batch.rows is not None
            ends = np.array([*accumulate(map(len, samples))])
            where = np.searchsorted(ends, batch.rows.cpu().numpy(), side="right")
            counts: list[int] = np.bincount(where, minlength=len(samples)).tolist()
            return counts
    return [len(sample.bounds) - 1 for sample in samples]


# -- which of the teacher's samples a student's sample goes with ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleAlignment:
    """For each sample of the student, the samples of the same example that the teacher reads."""

    same: bool  # token for token
    theirs: list[tuple[int, ...]]
    words: list[slice | None] | None  # of tags in other tokens: which of the example's words; None: they do not fit

    def fits(self, number: int) -> bool:
        """Whether the teacher says something of it."""
        return self.words is None or self.words[number] is not None

    def scores(self, number: int, said: Sequence[Tensor]) -> Tensor:
        """The scores for a sample that fits, of those of its teacher's samples: the mean over windows."""
        if self.same:
            return said[0]
        if self.words is None:
            return torch.stack(list(said)).mean(0)
        part = self.words[number]
        assert part is not None
        return torch.cat(list(said))[part]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedSamples:
    """Samples, and of each the number of its example."""

    samples: Sequence[Sample]
    owners: Sequence[int]


def align_samples(
    mine: OwnedSamples, theirs: OwnedSamples, kind: ScoreKind, needs: Sequence[str] = ()
) -> SampleAlignment:
    """What goes with what; `needs` are losses that compare token with token.

    What the teacher scores as a whole, or word by word, may be parted into other tokens.
    """
    if _same(mine, theirs):
        return SampleAlignment(same=True, theirs=[(number,) for number in range(len(mine.samples))], words=None)
    needs = [*needs, *([f"soft labels of {kind}"] if kind in ("span", "masked") else [])]
    if needs:
        raise HeedfulError(
            f"student and teacher part texts into other tokens, or other windows, but {' and '.join(needs)} compare "
            "token with token: give the student the teacher's vocabulary and a max_length that both read, or leave "
            "these losses out"
        )
    of: dict[int, list[int]] = {}
    for number, owner in enumerate(theirs.owners):
        of.setdefault(owner, []).append(number)
    several = [tuple(of.get(owner, ())) for owner in mine.owners]
    words = _words(mine, theirs, several) if kind == "tokens" else None
    return SampleAlignment(same=False, theirs=several, words=words)


def _same(mine: OwnedSamples, theirs: OwnedSamples) -> bool:
    return len(mine.samples) == len(theirs.samples) and all(
        a.bounds == b.bounds and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(mine.samples, theirs.samples, strict=True)
    )


def _words(mine: OwnedSamples, theirs: OwnedSamples, several: Sequence[tuple[int, ...]]) -> list[slice | None]:
    """Where the words of each sample stand among those of its example, where both have as many."""
    counts = [len(sample.target[0]) for sample in mine.samples]
    totals: dict[int, int] = {}
    starts = []
    for owner, count in zip(mine.owners, counts, strict=True):
        starts.append(totals.get(owner, 0))
        totals[owner] = starts[-1] + count
    found: list[slice | None] = []
    for owner, numbers, start, count in zip(mine.owners, several, starts, counts, strict=True):
        taught = sum(len(theirs.samples[number].target[0]) for number in numbers)
        found.append(slice(start, start + count) if taught == totals[owner] else None)
    return found
