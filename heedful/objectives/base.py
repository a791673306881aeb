"""What every objective shares: samples, batches, and a loss that is a sum with its count.

The trainer divides the sum over all micro-batches and ranks by the count over all of them, once; so an update does
not depend on how a step was cut up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.checkpoint import ModelBundle
from heedful.nn import cpu_ops
from heedful.packed import Packed

CHUNK = 32  # rows of scores that are treated at once, so that they stay near the processor


@dataclass(frozen=True, slots=True)
class Loss:
    """The sum over the targets of a batch, with its graph, and how many targets there are (or what they weigh)."""

    sum: Tensor
    count: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """What is learned from at once, compactly: one or more sequences of tokens and their target."""

    tokens: NDArray[np.int32]  # all sequences end to end
    types: NDArray[np.uint8]
    bounds: tuple[int, ...]  # sequences + 1
    target: Any = None  # what the objective makes of it
    weight: float = 1.0  # in the loss: 1 / windows for one window of a text
    filler: int = 0  # tokens at its end that only fill it up

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], **rest: Any) -> Sample:
        """A sample of sequences of token ids and types.

        >>> Sample.of([[5, 6], [7]], [[0, 0], [1]], target=1).bounds
        (0, 2, 3)
        """
        return cls(
            tokens=np.fromiter(chain.from_iterable(ids), dtype=np.int32),
            types=np.fromiter(chain.from_iterable(types), dtype=np.uint8),
            bounds=(0, *accumulate(map(len, ids))),
            **rest,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Samples as one packed batch, with what the loss needs; targets are the objective's own."""

    packed: Packed
    targets: Tensor
    weights: Tensor  # one for each target
    target: Packed | None = None  # what a decoder beside an encoder reads
    rows: Tensor | None = None  # the rows that are scored; None: all of them, or whole sequences
    groups: tuple[int, ...] = ()  # how many sequences belong together, where several do
    labels: Tensor | None = None  # one for each sequence, beside the targets
    draws: Tensor | None = None  # a random number for each target, where the loss draws: of its sample's key alone
    words: Any = None  # which rows are which words, where the objective asks
    counts: tuple[float, ...] = ()  # of the targets of each term, where the loss has several
    scales: tuple[float, ...] = ()  # what the trainer multiplies their sums by; (): as if the batch were the whole step

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on the given device."""
        return replace(
            self,
            packed=self.packed.to(device),
            target=None if self.target is None else self.target.to(device),
            targets=self.targets.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=True),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
            draws=None if self.draws is None else self.draws.to(device, non_blocking=True),
        )


class PerEpochSamples(ABC, Sequence[Sample]):
    """Samples that are made anew for each epoch; there are as many in each."""

    @abstractmethod
    def at(self, epoch: int) -> Sequence[Sample]:
        """Those of an epoch, counted from 0; a pure function of it."""

    def __getitem__(self, number: Any) -> Any:
        """One of the first epoch."""
        return self.at(0)[number]


class Objective(ABC):
    """What is learned: the trainer knows this and nothing else of a model's purpose."""

    together: int = 1  # samples that one loss sees; they are never parted over micro-batches or ranks
    balance: tuple[float, ...] = (1.0,)  # what each term of the loss weighs, as a mean over its own targets
    num_static_masks: int | None = None  # draws of a sample, used in turn; None: new ones in each epoch
    beside: nn.Module | None = None  # what learns with the model; it may share tensors with it

    @abstractmethod
    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Samples as a batch; each key depends on (seed, epoch, sample) alone and decides what is drawn for it."""

    @abstractmethod
    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """The sum of the losses of the batch's targets and their weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a loss: what is lost at each target, in float32 with its graph; without gradients also the found."""

    name: str
    losses: Float[Tensor, " targets"]
    right: Bool[Tensor, " targets"] | None = None  # None: nothing is right or wrong
    weights: Float[Tensor, " targets"] | None = None  # 1, or 0 for what only fills up; None: all 1

    @property
    def sum(self) -> Tensor:
        """Of the losses."""
        return (self.losses if self.weights is None else self.losses * self.weights).sum()

    @property
    def count(self) -> float:
        """Of the targets."""
        return float(len(self.losses) if self.weights is None else self.weights.sum())


class SelfSupervised(Objective):
    """An objective that makes its own targets of texts, so that nobody has to label them."""

    head: str = "masked_lm"  # which one of the family it trains

    @abstractmethod
    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """The terms of the loss, in the order of `balance`."""

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Sum over the terms of balance times mean, written as a sum over the targets of the first term that has some.

        The trainer divides by their count over all micro-batches and ranks, and sets the scales so that every other
        term is divided by its own.
        """
        first, *others = self.terms(loaded, batch)
        counts = batch.counts or (first.count,)
        scales = batch.scales or term_scales(counts)
        total = first.sum * self.balance[0]
        for term, balance, scale in zip(others, self.balance[1:], scales[1:], strict=True):
            total = total + term.sum * (balance * scale)
        return Loss(total, counts[next((place for place, scale in enumerate(scales) if scale), 0)])

    @torch.no_grad()
    def measure(self, loaded: ModelBundle, batch: Batch) -> dict[str, tuple[float, float]]:
        """Sum and count by name: the loss of each term, and the targets that were found."""
        found = {}
        for term in self.terms(loaded, batch):
            found[f"{term.name}_loss"] = (float(term.sum), term.count)
            if term.right is not None:
                right = term.right if term.weights is None else term.right * term.weights
                found[f"{term.name}_accuracy"] = (float(right.sum()), term.count)
        return found


def term_scales(counts: Sequence[float]) -> tuple[float, ...]:
    """What turns sums into means over as many targets as the first term that has some; 0 where a term has none.

    >>> term_scales((6.0, 2.0, 0.0)), term_scales((0.0, 2.0, 4.0))
    ((1.0, 3.0, 0.0), (0.0, 1.0, 0.5))
    """
    first = next((count for count in counts if count), 0.0)
    return tuple(first / count if count else 0.0 for count in counts)


def cross_entropy_term(
    name: str,
    scores: Float[Tensor, "targets classes"],
    targets: Int[Tensor, " targets"],
    weights: Float[Tensor, " targets"] | None = None,
) -> Term:
    """Cross-entropy at each target, -log softmax(scores)[target]; without gradients also which ones were found."""
    if torch.is_grad_enabled():
        losses: Tensor = _CrossEntropy.apply(scores, targets)  # type: ignore[no-untyped-call]
        return Term(name, losses, None, weights)
    losses = torch.nn.functional.cross_entropy(upcast(scores), targets, reduction="none")
    return Term(name, losses, scores.argmax(-1) == targets, weights)


class _CrossEntropy(torch.autograd.Function):
    """The same with its gradient, softmax(scores) - onehot(target), made at once, a few rows at a time.

    Over a vocabulary the scores are the largest tensor of a step: so they are read once, and only one more is written.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        if (made := cpu_ops.cross_entropy(scores, targets)) is not None:
            losses, gradients = made
            ctx.save_for_backward(gradients)
            return losses
        gradients = torch.empty_like(scores)
        losses = scores.new_empty(len(scores), dtype=torch.promote_types(scores.dtype, torch.float32))
        chunk = CHUNK if scores.device.type == "cpu" else max(1, len(scores))  # elsewhere launches are what costs
        for start in range(0, len(scores), chunk):
            rows = slice(start, start + chunk)
            at = targets[rows, None]
            part = upcast(scores[rows])
            part = part - part.amax(-1, keepdim=True)
            chosen = part.gather(-1, at)
            total = part.exp_().sum(-1, keepdim=True)
            losses[rows] = (total.log() - chosen)[:, 0]
            gradients[rows] = part.div_(total).scatter_add_(-1, at, part.new_full(at.shape, -1.0))
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * given[0][:, None].to(gradients.dtype), None


def pack_samples(samples: Sequence[Sample]) -> Packed:
    """The sequences of all samples end to end."""
    lengths = [stop - start for sample in samples for start, stop in pairwise(sample.bounds)]
    positions = [np.arange(length) for length in lengths]
    return Packed(
        tokens=concat_long([sample.tokens for sample in samples]),
        positions=concat_long(positions),
        types=concat_long([sample.types for sample in samples]),
        bounds=(0, *accumulate(lengths)),
    )


def sample_weights(samples: Sequence[Sample]) -> Float[Tensor, " samples"]:
    """The weight of each sample, float32."""
    return torch.tensor([sample.weight for sample in samples], dtype=torch.float32)


def upcast(scores: Tensor) -> Tensor:
    """Scores in float32 at least: losses are never of half precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def full_precision(scores: Tensor) -> AbstractContextManager[None]:
    """Where products in a loss are of the precision of their factors, whatever the model's are computed in."""
    return torch.autocast(scores.device.type, enabled=False)


def weighted_loss(losses: Float[Tensor, " targets"], weights: Float[Tensor, " targets"]) -> Loss:
    """Sum of loss times weight, and the sum of the weights."""
    return Loss((losses * weights).sum(), float(weights.sum(dtype=torch.float64)))


def concat_long(parts: Sequence[NDArray[Any]]) -> Tensor:
    """Arrays end to end, int64."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.long)
