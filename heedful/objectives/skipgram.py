"""Skip-gram with negative sampling: word vectors that predict neighbouring words (Mikolov et al. 2013, NIPS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data.sampler import derive_seed
from heedful.errors import HeedfulError
from heedful.objectives.base import Batch, Loss, Objective, Sample, full_precision, pack_samples, upcast
from heedful.objectives.random_numbers import scale_to_integers, uniform
from heedful.random_streams import Stream


@dataclass(frozen=True, kw_only=True, eq=False)
class SkipGram(Objective):
    """The loss -log sigmoid(u_o v_c) - Σ_n log sigmoid(-u_n v_c), over words c and their neighbours o.

    v are the word vectors, the model's token embeddings. u are output vectors, which only training uses. Before words
    are paired, each occurrence of a word with relative frequency f is left out with probability 1 - sqrt(t / f)
    (section 2.3). Negative samples n are drawn in proportion to count^0.75 (section 2.2), and one that equals o has
    weight 0. Neighbours are up to R positions away. R is random for each c, from 1 to `window` (Mikolov et al. 2013,
    ICLR, section 3.2). Random choices depend only on the key of a sample.
    """

    counts: NDArray[np.int64]  # occurrences of each token in all samples, or 0 if the token is not a word
    width: int  # dimension of the word vectors
    window: int = 5  # maximum distance of neighbouring words
    negatives: int = 5  # negative samples for each pair of neighbours
    frequent: float = 1e-3  # t, the relative frequency above which words are subsampled; 1e-5 in the paper (10^9 words)
    power: float = 0.75  # exponent of the counts in the distribution of negative samples
    extra_module: nn.Module | None = field(init=False, default=None)  # the output vectors u, initialised with 0

    def __post_init__(self) -> None:
        for name in ("window", "negatives", "width"):
            if getattr(self, name) < 1:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from 1")
        if not self.frequent > 0:
            raise HeedfulError(f"frequent is {self.frequent}; expected a share of all words above 0")
        if not self.counts.any():
            raise HeedfulError("the samples have no words: give texts with words")
        out = nn.Embedding(len(self.counts), self.width)
        nn.init.zeros_(out.weight)
        object.__setattr__(self, "extra_module", out)

    @classmethod
    def of(cls, samples: Sequence[Sample], size: int, *, ignored: Sequence[int] = (), **fields: Any) -> SkipGram:
        """Count the words of samples, and return the objective for these counts.

        Args:
            samples: All training samples.
            size: Vocabulary size.
            ignored: Token ids that are not words, such as the unknown token.
            fields: Other fields of the objective.
        """
        tokens = np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)])
        counts = np.bincount(tokens, minlength=size)
        counts[list(ignored)] = 0
        return cls(counts=counts, **fields)

    @cached_property
    def keep_probability(self) -> NDArray[np.float64]:
        """The probability that an occurrence of each token is used, [vocabulary]."""
        frequency = self.counts / self.counts.sum()
        ratio: NDArray[np.float64] = np.sqrt(self.frequent / np.where(frequency > 0, frequency, 1.0))
        probability: NDArray[np.float64] = np.where(frequency > 0, ratio.clip(max=1.0), 0.0)
        return probability

    @cached_property
    def _noise(self) -> NDArray[np.float64]:
        """The cumulative distribution of negative samples, [vocabulary]."""
        weights = np.where(self.counts > 0, self.counts.astype(np.float64) ** self.power, 0.0)
        cumulative: NDArray[np.float64] = np.cumsum(weights)
        cumulative /= cumulative[-1]
        return cumulative

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return a batch with one row for each pair (c, o): the packed position of c. Targets are o and negatives."""
        rows: list[NDArray[np.int64]] = []
        targets: list[NDArray[np.int64]] = []
        start = 0
        for sample, key in zip(samples, keys, strict=True):
            centres, neighbours = self._pairs(sample, key)
            draws = uniform(derive_seed(key, Stream.SKIPGRAM_NOISE), len(centres) * self.negatives)
            negatives = np.searchsorted(self._noise, draws.reshape(-1, self.negatives), side="right")
            rows.append(start + centres)
            targets.append(np.concatenate([sample.tokens[neighbours][:, None], negatives], 1))
            start += len(sample)
        words = torch.from_numpy(np.concatenate([np.zeros((0, 1 + self.negatives), np.int64), *targets]))
        weights = (words != words[:, :1]).float()
        weights[:, 0] = 1.0
        return Batch(
            packed=pack_samples(samples),
            targets=words,
            weights=weights,
            rows=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])),
        )

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the sum of the losses of all pairs of neighbours, and the number of pairs."""
        assert batch.rows is not None and self.extra_module is not None
        v = loaded.model.embedding.tokens(batch.packed.tokens[batch.rows])
        u = self.extra_module(batch.targets)
        return Loss((pair_losses(upcast(v), upcast(u)) * batch.weights).sum(), float(len(batch.rows)))

    def _pairs(self, sample: Sample, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of each word c and of its neighbours o in the same sequence, ordered by c."""
        draws = uniform(key, 2 * len(sample)).reshape(2, -1)
        used_positions = np.flatnonzero(draws[0] < self.keep_probability[sample.tokens])
        sequence_of = np.searchsorted(sample.bounds, used_positions, side="right")
        max_distance = 1 + scale_to_integers(draws[1, used_positions], self.window)  # R of each word
        distances = np.concatenate([np.arange(-self.window, 0), np.arange(1, self.window + 1)])
        # indices into `used_positions`, [words, distances]
        neighbours = np.arange(len(used_positions))[:, None] + distances
        is_pair = (neighbours >= 0) & (neighbours < len(used_positions)) & (abs(distances) <= max_distance[:, None])
        if len(used_positions):
            is_pair &= sequence_of[neighbours.clip(0, len(used_positions) - 1)] == sequence_of[:, None]
        centre, distance = np.nonzero(is_pair)
        return used_positions[centre], used_positions[neighbours[centre, distance]]


def pair_losses(v: Float[Tensor, "pairs dim"], u: Float[Tensor, "pairs targets dim"]) -> Float[Tensor, "pairs targets"]:
    """Return -log sigmoid(u v) of the first target of each pair, and -log sigmoid(-u v) of its other targets."""
    with full_precision(v):
        scores = torch.einsum("pd,ptd->pt", v, u)
    signs = torch.ones_like(scores)
    signs[:, 1:] = -1.0
    return -F.logsigmoid(signs * scores)
