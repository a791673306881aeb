"""Base classes of training objectives, and their data: `Sample`, `Batch`, `Loss` (a sum with its count) and `Term`.

The trainer adds up the sums and the counts of all micro-batches and ranks, and divides the total sum by the total
count once. An update therefore does not depend on how a step is split into micro-batches and ranks.
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

CHUNK_ROWS = 32  # targets whose scores are processed at a time on a CPU, so that the scores stay in its cache


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a batch as a sum over its targets, so that losses of several batches can be added."""

    sum: Tensor  # sum of weight times loss over the targets, with its autograd graph
    count: float  # total weight of the targets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One training sample: one or more sequences of tokens, and their target."""

    tokens: NDArray[np.int32]  # token ids of all sequences, end to end
    types: NDArray[np.uint8]  # token type ids
    bounds: tuple[int, ...]  # index of the first token of each sequence, then the number of all tokens
    target: Any = None  # label or labels; the type depends on the objective
    weight: float = 1.0  # weight in the loss of objectives with labels, such as 1 / windows for each window of a text
    filler: int = 0  # number of padding tokens at the end
    states: Float[Tensor, "tokens hidden"] | None = None  # cached outputs of the frozen layers, or None

    def __len__(self) -> int:
        """Number of tokens, padding included."""
        return len(self.tokens)

    @classmethod
    def of(
        cls, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], target: object = None, weight: float = 1.0
    ) -> Sample:
        """Return a sample from the token ids and the token types of each sequence.

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
    """Samples as one packed batch, with the inputs of the loss. Each objective defines the meaning of `targets`."""

    packed: Packed
    targets: Tensor
    weights: Tensor  # weight of each target
    decoder_input: Packed | None = None  # input of the decoder; None without an encoder and a decoder
    rows: Tensor | None = None  # packed positions that the head scores; None for all tokens or whole sequences
    groups: tuple[int, ...] = ()  # number of sequences in each group, such as the candidates of a prompt
    labels: Tensor | None = None  # a label of each sequence, in addition to the targets
    draws: Tensor | None = None  # a uniform random number for each target, for a loss that samples
    distillation: Any = None  # positions and weights of the targets of a teacher, or None
    counts: tuple[float, ...] = ()  # number of targets of each term; () for a loss of one term
    scales: tuple[float, ...] = ()  # factor of each term's sum, set by the trainer; () if the batch is the whole step
    # sum of `weights`, stored before they move to a GPU, where reading it would wait for the GPU; see `total_weight`
    weight_sum: float | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Move the batch to a device."""
        return replace(
            self,
            weight_sum=self.total_weight,
            packed=self.packed.to(device),
            decoder_input=None if self.decoder_input is None else self.decoder_input.to(device),
            targets=self.targets.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=True),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
            draws=None if self.draws is None else self.draws.to(device, non_blocking=True),
        )

    @property
    def total_weight(self) -> float:
        """Sum of the weights, added up in float64."""
        return float(self.weights.sum(dtype=torch.float64)) if self.weight_sum is None else self.weight_sum


class PerEpochSamples(ABC, Sequence[Sample]):
    """Samples that differ from epoch to epoch, such as new random segments. All epochs have equally many samples."""

    @abstractmethod
    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the samples of an epoch, counted from 0. Calls with the same epoch return equal samples."""

    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample of the first epoch."""
        return self.at(0)[index]


class Objective(ABC):
    """Base class of objectives: collates samples into batches, and computes their loss."""

    group_size: int = 1  # samples compared with each other; a group is never split over micro-batches or ranks
    term_weights: tuple[float, ...] = (1.0,)  # weight of each term of the loss; a term is a mean over its targets
    num_static_masks: int | None = None  # masks of a sample, used in turn; None for a new mask in each epoch
    extra_module: nn.Module | None = None  # module trained together with the model; may share the model's tensors

    @abstractmethod
    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Collate samples into a batch.

        Args:
            samples: One or more samples.
            keys: Seed of the random choices of each sample, derived from (seed, epoch, sample index), so that they
                depend neither on the other samples of the batch nor on the number of ranks.
        """

    @abstractmethod
    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the sum of the losses of the batch's targets, and the total weight of the targets."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a loss: the loss of each target, in float32 or a higher precision."""

    name: str
    losses: Float[Tensor, " targets"]
    right: Bool[Tensor, " targets"] | None = None  # whether each prediction is correct; None in training
    weights: Float[Tensor, " targets"] | None = None  # 1 for a target, 0 for padding; None if all are 1

    @property
    def sum(self) -> Tensor:
        """Weighted sum of the losses."""
        return (self.losses if self.weights is None else self.losses * self.weights).sum()

    @property
    def count(self) -> float:
        """Number of targets, without padding."""
        return float(len(self.losses) if self.weights is None else self.weights.sum())


class SelfSupervised(Objective):
    """Base class of objectives whose targets come from the text itself, without labels."""

    head: str = "masked_lm"  # kind of the trained head

    @abstractmethod
    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the terms of the loss, in the order of `term_weights`."""

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the weighted sum of the terms, and the target count by which the trainer divides that sum.

        Each term is a mean over its own targets, but the trainer divides one sum by one count. The sum of term i is
        therefore rescaled: total = sum over i of weight_i * sum_i * (count_first / count_i), where count_first belongs
        to the first term with targets. The counts are those of the whole step, over all micro-batches and ranks: the
        trainer passes the quotients as `Batch.scales`. Without scales, the batch is the whole step.
        """
        first, *others = self.terms(loaded, batch)
        # the total weight is known on the CPU; `first.count` may have to wait for the GPU
        counts = batch.counts or (batch.total_weight if first.weights is batch.weights else first.count,)
        scales = batch.scales or term_scales(counts)
        total = first.sum * self.term_weights[0]
        for term, weight, scale in zip(others, self.term_weights[1:], scales[1:], strict=True):
            total = total + term.sum * (weight * scale)
        first_with_targets = next((index for index, scale in enumerate(scales) if scale), 0)
        return Loss(total, counts[first_with_targets])

    @torch.no_grad()
    def measure(self, loaded: ModelBundle, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of the loss and of the correct predictions of each term, by metric name."""
        sums = {}
        for term in self.terms(loaded, batch):
            sums[f"{term.name}_loss"] = (float(term.sum), term.count)
            if term.right is not None:
                right = term.right if term.weights is None else term.right * term.weights
                sums[f"{term.name}_accuracy"] = (float(right.sum()), term.count)
        return sums


def term_scales(counts: Sequence[float]) -> tuple[float, ...]:
    """Return, for each term, the first nonzero count divided by the term's count; 0 for a term without targets.

    These are the factors count_first / count_i of `SelfSupervised.loss`.

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
    """Return the term of -log softmax(scores)[target]. Under no_grad the term also marks the correct predictions."""
    if torch.is_grad_enabled():
        losses: Tensor = _CrossEntropy.apply(scores, targets)  # type: ignore[no-untyped-call]
        return Term(name, losses, None, weights)
    losses = torch.nn.functional.cross_entropy(upcast(scores), targets, reduction="none")
    return Term(name, losses, scores.argmax(-1) == targets, weights)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradient, softmax(scores) - onehot(target), is computed in the forward pass.

    Scores over a vocabulary are the largest tensor of a step. Only one tensor of their size and dtype, the gradient, is
    stored for the backward pass. On a GPU, which processes all targets as one chunk, the forward pass also needs memory
    for a copy of all scores in float32, and briefly for two copies if the scores have a lower precision. On a CPU such
    copies have at most CHUNK_ROWS rows, and the C++ kernel makes none.
    """

    @staticmethod
    def forward(ctx: AutogradContext, scores: Tensor, targets: Tensor) -> Tensor:
        if (fused := cpu_ops.cross_entropy(scores, targets)) is not None:
            losses, gradients = fused
            ctx.save_for_backward(gradients)
            return losses
        gradients = torch.empty_like(scores)
        losses = scores.new_empty(len(scores), dtype=torch.promote_types(scores.dtype, torch.float32))
        # a GPU gets all targets at once: its time would otherwise go into launching kernels for small chunks
        chunk_rows = CHUNK_ROWS if scores.device.type == "cpu" else max(1, len(scores))
        for start in range(0, len(scores), chunk_rows):
            rows = slice(start, start + chunk_rows)  # the targets of this chunk
            target_columns = targets[rows, None]
            chunk = upcast(scores[rows])
            chunk = chunk - chunk.amax(-1, keepdim=True)  # softmax is unchanged, and exp cannot overflow
            target_scores = chunk.gather(-1, target_columns)
            ones = torch.ones_like(target_columns, dtype=chunk.dtype)
            total = chunk.exp_().sum(-1, keepdim=True)
            losses[rows] = (total.log() - target_scores)[:, 0]
            gradients[rows] = chunk.div_(total).scatter_add_(-1, target_columns, -ones)  # softmax - onehot
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * grad_outputs[0][:, None].to(gradients.dtype), None


def pack_samples(samples: Sequence[Sample]) -> Packed:
    """Pack the sequences of all samples end to end."""
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
    """Convert scores of a lower precision to float32, the precision of losses. Float64 scores are returned as such."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def full_precision(scores: Tensor) -> AbstractContextManager[None]:
    """Return a context that disables autocast, so that matrix products of a loss keep the precision of their inputs."""
    return torch.autocast(scores.device.type, enabled=False)


def weighted_loss(losses: Float[Tensor, " targets"], batch: Batch) -> Loss:
    """Return the sum of loss times weight over the targets, and the total weight."""
    return Loss((losses * batch.weights).sum(), batch.total_weight)


def concat_long(parts: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate arrays into one int64 tensor."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.long)
