"""What every objective shares: samples, batches, and a loss that is a sum with its count.

The trainer divides the sum over all micro-batches and ranks by the count over all of them, once; so an update does
not depend on how a step was cut up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from heedful.checkpoint import Loaded
from heedful.packed import Packed


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

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on the given device."""
        return Batch(
            packed=self.packed.to(device),
            target=None if self.target is None else self.target.to(device),
            targets=self.targets.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=True),
            groups=self.groups,
        )


@runtime_checkable
class Objective(Protocol):
    """What is learned: the trainer knows this and nothing else of a model's purpose."""

    @property
    def together(self) -> int:
        """How many samples one term of the loss sees; they are never parted over micro-batches or ranks."""

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Samples as a batch; each key depends on (seed, epoch, sample) alone and decides what is drawn for it."""

    def loss(self, loaded: Loaded, batch: Batch) -> Loss:
        """The sum of the losses of the batch's targets and their weight."""


def pack(samples: Sequence[Sample]) -> Packed:
    """The sequences of all samples end to end."""
    lengths = [stop - start for sample in samples for start, stop in pairwise(sample.bounds)]
    positions = [np.arange(length) for length in lengths]
    return Packed(
        tokens=_long([sample.tokens for sample in samples]),
        positions=_long(positions),
        types=_long([sample.types for sample in samples]),
        bounds=(0, *accumulate(lengths)),
    )


def weights(samples: Sequence[Sample]) -> Float[Tensor, " samples"]:
    """The weight of each sample, float32."""
    return torch.tensor([sample.weight for sample in samples], dtype=torch.float32)


def wide(scores: Tensor) -> Tensor:
    """Scores in float32 at least: losses are never of half precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def weighted(losses: Float[Tensor, " targets"], weights: Float[Tensor, " targets"]) -> Loss:
    """Sum of loss times weight, and the sum of the weights."""
    return Loss((losses * weights).sum(), float(weights.sum(dtype=torch.float64)))


def _long(parts: Sequence[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.long)
