"""Masked language modelling: find the tokens that were hidden (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.objectives.base import Batch, Loss, Sample, pack, weighted
from heedful.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A share of each sequence's tokens is to be found: 80 % of them hidden, 10 % replaced by any token, 10 % kept.

    Special tokens are never chosen. What is drawn depends on the sample's key alone, so it changes with the epoch.
    """

    tokenizer: Tokenizer
    rate: float = 0.15
    together: int = 1

    def __post_init__(self) -> None:
        if self.tokenizer.special.mask is None:
            raise HeedfulError("this tokenizer has no mask token: masked language modelling needs one")

    def samples(self, texts: Sequence[str], limit: int | None) -> list[Sample]:
        """Texts as samples; what is longer than the limit is cut into windows without overlap."""
        special = {getattr(self.tokenizer.special, name) for name in ("pad", "first", "separator", "mask")}
        found = []
        for encoded in self.tokenizer.encode_batch(list(texts)):
            ids = encoded.ids
            for start in range(0, len(ids), limit or len(ids) or 1):
                part = ids[start : start + (limit or len(ids))]
                free = tuple(place for place, token in enumerate(part) if token not in special)
                if free:
                    found.append(Sample.of([part], [encoded.types[start : start + len(part)]], target=free))
        return found

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """The batch with tokens hidden, and which rows were chosen."""
        packed, mask = pack(samples), self.tokenizer.special.mask
        assert mask is not None
        rows: list[int] = []
        for start, sample, key in zip(packed.bounds, samples, keys, strict=False):
            count = max(1, round(self.rate * len(sample.target)))
            draw = np.random.Generator(np.random.Philox(key))
            chosen = np.sort(draw.choice(np.array(sample.target), count, replace=False))
            how, other = draw.random(count), draw.integers(0, self.tokenizer.size, count)
            for place, share, token in zip(chosen.tolist(), how.tolist(), other.tolist(), strict=True):
                rows.append(start + place)
                if share < 0.9:
                    packed.tokens[start + place] = mask if share < 0.8 else token
        where = torch.tensor(rows)
        original = torch.from_numpy(np.concatenate([sample.tokens for sample in samples]).astype(np.int64))
        return Batch(packed=packed, targets=original[where], weights=torch.ones(len(rows)), rows=where)

    def loss(self, loaded: Loaded, batch: Batch) -> Loss:
        """Cross-entropy over the vocabulary at the chosen rows alone."""
        assert loaded.head is not None and batch.rows is not None
        scores = loaded.head(loaded.model(batch.packed)[batch.rows], batch.packed).float()
        return weighted(F.cross_entropy(scores, batch.targets, reduction="none"), batch.weights)
