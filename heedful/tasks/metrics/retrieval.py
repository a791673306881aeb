"""Retrieval: whether the second text of a pair has the vector nearest to the first's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from jaxtyping import Float64, Int64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, require_equal, require_examples, require_same_length
from heedful.tasks.metrics.bootstrap import Bootstrap, Sums, mean_of
from heedful.tasks.metrics.row_store import RowStore

CHUNK = 1024  # first texts that are compared with all second ones at once


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Retrieval:
    """Accuracy at 1 and mean reciprocal rank by cosine among all second texts; it stores their vectors.

    Second texts that equal a pair's own do not compete with it. Each number of a pair's vectors takes 16 bytes: 10,000
    pairs of width 384 take 61 MB.
    """

    store: RowStore = field(default_factory=RowStore)
    width: int = 0

    def update(
        self, ids: Sequence[int], vectors: Float64[np.ndarray, "pairs 2 width"], seconds: Sequence[str] | None = None
    ) -> Retrieval:
        """Add pairs: the number of each in the data set, both vectors, and the second text; None: all differ.

        The cosine of a vector of zeros, which a text without tokens has, is 0.
        """
        require_same_length(len(ids), len(vectors), "ids", "pairs of vectors")
        texts = [-1 - number for number in ids] if seconds is None else list(map(_number, seconds))
        require_same_length(len(ids), len(texts), "ids", "second texts")
        if not len(vectors):
            return self
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        if not np.isfinite(norms).all():
            raise HeedfulError("a vector is not finite: its direction means nothing")
        known = np.array([ids, texts], dtype=np.float64).T
        rows = np.concatenate([known, (vectors / np.where(norms, norms, 1)).reshape(len(ids), -1)], 1)
        return self.merge_state(replace(self, store=RowStore().append(rows), width=vectors.shape[-1]))

    def merge_state(self, incoming: Retrieval) -> Retrieval:
        """Return the metric over the examples of both metrics."""
        if self.width and incoming.width:
            require_equal(self.width, incoming.width, "widths")
        return Retrieval(store=self.store.merge_state(incoming.store), width=self.width or incoming.width)

    def compute(self) -> Result:
        """Return {"accuracy", "mrr", "count"}; of equal cosines the pair's own comes last."""
        _, ranks = self.ranks()
        return {"accuracy": float((ranks == 1).mean()), "mrr": float((1 / ranks).mean()), "count": len(ranks)}

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the intervals of "accuracy" and "mrr": first texts are resampled, all second texts stay."""
        ids, ranks = self.ranks()
        drawn = Bootstrap(seed=seed, statistics=3).update(ids, np.stack([ranks == 1, 1 / ranks, ranks > 0], 1))
        return {name: drawn.interval(formula) for name, formula in (("accuracy", accuracy_of), ("mrr", mrr_of))}

    def ranks(self) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
        """Return the number of each pair in the data set, and the rank of its second text."""
        rows = self.store.rows(2 + 2 * self.width)
        require_examples(len(rows), "retrieval")
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        texts, a, b = rows[:, 1], rows[:, 2 : 2 + self.width], rows[:, 2 + self.width :]
        ranks = []
        for start in range(0, len(rows), CHUNK):
            cosines = a[start : start + CHUNK] @ b.T
            own = cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))]
            rivals = texts[start : start + CHUNK, None] != texts
            ranks.append(1 + ((cosines >= own[:, None]) & rivals).sum(1))
        return rows[:, 0].astype(np.int64), np.concatenate(ranks)


def accuracy_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the accuracy, from the sums of (ranked first, 1 / rank, 1)."""
    return mean_of(sums[:, [0, 2]])


def mrr_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean reciprocal rank, from the same sums."""
    return mean_of(sums[:, [1, 2]])


def _number(text: str) -> int:
    """Return 48 bits of a hash, which fit a double; 10^5 texts have a collision with probability 1 / 56,000."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
