"""Retrieval: for the first text of each pair, the rank of its second text among all second texts."""

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

CHUNK_TEXTS = 1024  # first texts that are compared with all second texts at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Retrieval:
    """Accuracy at 1 and mean reciprocal rank, by cosine among all second texts. It stores all vectors.

    Second texts that equal the pair's own second text do not compete with it. A pair needs 16 bytes for each dimension:
    10,000 pairs of width 384 need 61 MB.
    """

    store: RowStore = field(default_factory=RowStore)  # number of the pair, hash of its second text, both vectors
    width: int = 0  # numbers in a vector; 0: no examples yet

    def update(
        self, ids: Sequence[int], vectors: Float64[np.ndarray, "pairs 2 width"], seconds: Sequence[str] | None = None
    ) -> Retrieval:
        """Add pairs.

        Args:
            ids: Number of each pair in the data set.
            vectors: Vectors of both texts. A cosine with a vector of zeros, as for a text without tokens, is 0.
            seconds: The second texts; None: all are different.
        """
        require_same_length(len(ids), len(vectors), "ids", "pairs of vectors")
        texts = [-1 - number for number in ids] if seconds is None else list(map(_hash_text, seconds))
        require_same_length(len(ids), len(texts), "ids", "second texts")
        if not len(vectors):
            return self
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        if not np.isfinite(norms).all():
            raise HeedfulError("a vector is not finite: its direction means nothing")
        columns = np.array([ids, texts], dtype=np.float64).T
        rows = np.concatenate([columns, (vectors / np.where(norms, norms, 1)).reshape(len(ids), -1)], 1)
        return self.merge_state(replace(self, store=RowStore().append(rows), width=vectors.shape[-1]))

    def merge_state(self, incoming: Retrieval) -> Retrieval:
        """Return the metric over the examples of both metrics."""
        if self.width and incoming.width:
            require_equal(self.width, incoming.width, "widths")
        return Retrieval(store=self.store.merge_state(incoming.store), width=self.width or incoming.width)

    def compute(self) -> Result:
        """Return {"accuracy", "mrr", "count"}. Among equal cosines the pair's own comes last."""
        _, ranks = self.ranks()
        return {"accuracy": float((ranks == 1).mean()), "mrr": float((1 / ranks).mean()), "count": len(ranks)}

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the intervals of "accuracy" and "mrr". First texts are resampled, second texts are not."""
        ids, ranks = self.ranks()
        bootstrap = Bootstrap(seed=seed, statistics=3).update(ids, np.stack([ranks == 1, 1 / ranks, ranks > 0], 1))
        return {name: bootstrap.interval(formula) for name, formula in (("accuracy", accuracy_of), ("mrr", mrr_of))}

    def ranks(self) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
        """Return the number of each pair in the data set, and the rank of its second text."""
        rows = self.store.rows(2 + 2 * self.width)
        require_examples(len(rows), "retrieval")
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        texts, a, b = rows[:, 1], rows[:, 2 : 2 + self.width], rows[:, 2 + self.width :]
        ranks = []
        for start in range(0, len(rows), CHUNK_TEXTS):
            cosines = a[start : start + CHUNK_TEXTS] @ b.T
            own_cosines = cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))]
            rivals = texts[start : start + CHUNK_TEXTS, None] != texts
            ranks.append(1 + ((cosines >= own_cosines[:, None]) & rivals).sum(1))
        return rows[:, 0].astype(np.int64), np.concatenate(ranks)


def accuracy_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the accuracy, from the sums of (ranked first, 1 / rank, 1)."""
    return mean_of(sums[:, [0, 2]])


def mrr_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean reciprocal rank, from the sums of (ranked first, 1 / rank, 1)."""
    return mean_of(sums[:, [1, 2]])


def _hash_text(text: str) -> int:
    """Return 48 bits of a hash, which a double can hold; 10^5 texts collide with probability 1 / 56,000."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
