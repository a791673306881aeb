"""Base classes of objectives: samples, batches, and a loss that is a sum with its count.

The trainer divides the sum over all micro-batches and ranks by their count, once; so an update does not depend on how
a step was split.
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
from heedful.nn.autograd import AutogradContext
from heedful.packed import Packed

CHUNK = 32  # rows of scores that are computed at once, so that they fit into the processor's cache


@dataclass(frozen=True, slots=True)
class Loss:
    """The sum of the losses of a batch's targets, with its graph, and their count or total weight."""

    sum: Tensor
    count: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The smallest unit of training data: one or more sequences of tokens and their target."""

    tokens: NDArray[np.int32]  # all sequences end to end
    types: NDArray[np.uint8]
    bounds: tuple[int, ...]  # sequences + 1
    target: Any = None  # of a type that the objective chooses
    weight: float = 1.0  # in the loss: 1 / windows for one window of a text
    filler: int = 0  # tokens of padding at its end
    states: Float[Tensor, "tokens width"] | None = None  # outputs of frozen layers, if they are known

    def __len__(self) -> int:
        """Number of tokens, padding included."""
        return len(self.tokens)

    @classmethod
    def of(
        cls, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], target: object = None, weight: float = 1.0
    ) -> Sample:
        """Return a sample of sequences of token ids and types.

        >>> Sample.of([[5, 6], [7]], [[0, 0], [1]], target=1).bounds
        (0, 2, 3)
        """
        return cls(
            tokens=np.fromiter(chain.from_iterable(ids), dtype=np.int32),
            types=np.fromiter(chain.from_iterable(types), dtype=np.uint8),
            bounds=(0, *accumulate(map(len, ids))),
            target=target,
            weight=weight,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Samples as one packed batch, with the inputs of the loss; the meaning of targets is the objective's."""

    packed: Packed
    targets: Tensor
    weights: Tensor  # one for each target
    target: Packed | None = None  # input of a decoder beside an encoder
    rows: Tensor | None = None  # the rows that are scored; None: all of them, or whole sequences
    groups: tuple[int, ...] = ()  # number of sequences of each group, where several belong together
    labels: Tensor | None = None  # one for each sequence, beside the targets
    draws: Tensor | None = None  # a random number for each target, if the loss samples; from the sample's key alone
    words: Any = None  # alignment of rows with words, for objectives that use it
    counts: tuple[float, ...] = ()  # number of targets of each term, if the loss has several
    scales: tuple[float, ...] = ()  # factors of their sums, set by the trainer; (): the batch is the whole step
    weight_sum: float | None = None  # sum of the weights, known on the host; None: see total_weight

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return replace(
            self,
            weight_sum=self.total_weight,
            packed=self.packed.to(device),
            target=None if self.target is None else self.target.to(device),
            targets=self.targets.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=True),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
            draws=None if self.draws is None else self.draws.to(device, non_blocking=True),
        )

    @property
    def total_weight(self) -> float:
        """The sum of the weights, added up in float64."""
        return float(self.weights.sum(dtype=torch.float64)) if self.weight_sum is None else self.weight_sum


class PerEpochSamples(ABC, Sequence[Sample]):
    """Samples that differ from epoch to epoch, equally many in each."""

    @abstractmethod
    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the samples of an epoch, counted from 0; a pure function of it."""

    def __getitem__(self, number: int | slice) -> Any:
        """Return a sample of the first epoch."""
        return self.at(0)[number]


class Objective(ABC):
    """Base class of objectives: batches of samples, and their loss."""

    group_size: int = 1  # samples that one loss compares; never split over micro-batches or ranks
    term_weights: tuple[float, ...] = (1.0,)  # weight of each term of the loss, a mean over its own targets
    num_static_masks: int | None = None  # random masks of a sample, used in turn; None: new ones in each epoch
    extra_module: nn.Module | None = None  # trained with the model; it may share tensors with it

    @abstractmethod
    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return samples as a batch.

        Args:
            samples: One or more.
            keys: The seed of each sample's random choices; a function of (seed, epoch, sample) alone.
        """

    @abstractmethod
    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the sum of the losses of the batch's targets, and their weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a loss: the loss of each target in float32; `right` (correct predictions) only under no_grad."""

    name: str
    losses: Float[Tensor, " targets"]
    right: Bool[Tensor, " targets"] | None = None  # None: unknown, or not defined
    weights: Float[Tensor, " targets"] | None = None  # 0 for padding, else 1; None: all 1

    @property
    def sum(self) -> Tensor:
        """The sum of the losses."""
        return (self.losses if self.weights is None else self.losses * self.weights).sum()

    @property
    def count(self) -> float:
        """The number of targets."""
        return float(len(self.losses) if self.weights is None else self.weights.sum())


class SelfSupervised(Objective):
    """An objective whose targets are made from the text itself, without labels."""

    head: str = "masked_lm"  # kind of the head that it trains

    @abstractmethod
    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the terms of the loss, in the order of `term_weights`."""

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the sum over terms of weight times mean, as a sum over the targets of the first term that has targets.

        The trainer divides it by their count over all micro-batches and ranks, and sets `Batch.scales` so that every
        other term is divided by its own count.
        """
        first, *others = self.terms(loaded, batch)
        counts = batch.counts or (batch.total_weight if first.weights is batch.weights else first.count,)
        scales = batch.scales or term_scales(counts)
        total = first.sum * self.term_weights[0]
        for term, weight, scale in zip(others, self.term_weights[1:], scales[1:], strict=True):
            total = total + term.sum * (weight * scale)
        return Loss(total, counts[next((place for place, scale in enumerate(scales) if scale), 0)])

    @torch.no_grad()
    def measure(self, loaded: ModelBundle, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return sum and count of each term's loss, and of its correct predictions, by name."""
        sums = {}
        for term in self.terms(loaded, batch):
            sums[f"{term.name}_loss"] = (float(term.sum), term.count)
            if term.right is not None:
                right = term.right if term.weights is None else term.right * term.weights
                sums[f"{term.name}_accuracy"] = (float(right.sum()), term.count)
        return sums


def term_scales(counts: Sequence[float]) -> tuple[float, ...]:
    """Return factors that turn sums into means times the count of the first term that has targets; 0 without targets.

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
    """Return -log softmax(scores)[target] of each target; under no_grad also which predictions are correct."""
    if torch.is_grad_enabled():
        losses: Tensor = _CrossEntropy.apply(scores, targets)  # type: ignore[no-untyped-call]
        return Term(name, losses, None, weights)
    losses = torch.nn.functional.cross_entropy(upcast(scores), targets, reduction="none")
    return Term(name, losses, scores.argmax(-1) == targets, weights)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradient, softmax(scores) - onehot(target), in the forward pass, row by row.

    Scores over a vocabulary are the largest tensor of a step: they are read once, and one tensor more is written.
    """

    @staticmethod
    def forward(ctx: AutogradContext, scores: Tensor, targets: Tensor) -> Tensor:
        if (fused := cpu_ops.cross_entropy(scores, targets)) is not None:
            losses, gradients = fused
            ctx.save_for_backward(gradients)
            return losses
        gradients = torch.empty_like(scores)
        losses = scores.new_empty(len(scores), dtype=torch.promote_types(scores.dtype, torch.float32))
        chunk = CHUNK if scores.device.type == "cpu" else max(1, len(scores))  # on a GPU kernel launches cost most
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
    def backward(ctx: AutogradContext, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * grad_outputs[0][:, None].to(gradients.dtype), None


def pack_samples(samples: Sequence[Sample]) -> Packed:
    """Return the sequences of all samples end to end."""
    lengths = [stop - start for sample in samples for start, stop in pairwise(sample.bounds)]
    positions = [np.arange(length) for length in lengths]
    states = [sample.states for sample in samples if sample.states is not None]
    return Packed(
        tokens=concat_long([sample.tokens for sample in samples]),
        positions=concat_long(positions),
        types=concat_long([sample.types for sample in samples]),
        bounds=(0, *accumulate(lengths)),
        states=torch.cat(states) if states and len(states) == len(samples) else None,
    )


def weights_of_samples(samples: Sequence[Sample]) -> Float[Tensor, " samples"]:
    """Return the weight of each sample, in float32."""
    return torch.tensor([sample.weight for sample in samples], dtype=torch.float32)


def upcast(scores: Tensor) -> Tensor:
    """Return scores in float32 or more, in which losses are computed."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def full_precision(scores: Tensor) -> AbstractContextManager[None]:
    """Context without autocast: products in a loss have the precision of their factors."""
    return torch.autocast(scores.device.type, enabled=False)


def weighted_loss(losses: Float[Tensor, " targets"], batch: Batch) -> Loss:
    """Return the sum of loss times weight, and the sum of the weights."""
    return Loss((losses * batch.weights).sum(), batch.total_weight)


def concat_long(parts: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate arrays into one int64 tensor."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.long)
