"""Retrieval over pairs of texts: for each first text, the rank of its second text among all second texts."""

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
    """Accuracy at 1 and mean reciprocal rank, where second texts are ranked by cosine with the first text.

    Second texts equal to the pair's own second text are left out of the ranking. All vectors are stored, in 16 bytes
    per pair and dimension: 10,000 pairs with an embedding dimension of 384 need 61 MB.
    """

    store: RowStore = field(default_factory=RowStore)  # columns: index of the pair, hash of its second text, vectors
    dimension: int = 0  # embedding dimension; 0: no examples yet

    def update(
        self,
        ids: Sequence[int],
        vectors: Float64[np.ndarray, "pairs 2 dimension"],
        seconds: Sequence[str] | None = None,
    ) -> Retrieval:
        """Add pairs.

        Args:
            ids: Index of each pair in the data set.
            vectors: Vectors of both texts. A cosine with a vector of zeros, as for a text without tokens, is 0.
            seconds: The second texts. If None, all second texts are different.
        """
        require_same_length(len(ids), len(vectors), "ids", "pairs of vectors")
        text_ids = [-1 - pair_id for pair_id in ids] if seconds is None else list(map(_hash_text, seconds))
        require_same_length(len(ids), len(text_ids), "ids", "second texts")
        if not len(vectors):
            return self
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        if not np.isfinite(norms).all():
            raise HeedfulError("a vector is not finite: its direction means nothing")
        unit_vectors = vectors / np.where(norms, norms, 1)
        id_columns = np.array([ids, text_ids], dtype=np.float64).T
        rows = np.concatenate([id_columns, unit_vectors.reshape(len(ids), -1)], 1)
        return self.merge_state(replace(self, store=RowStore().append(rows), dimension=vectors.shape[-1]))

    def merge_state(self, incoming: Retrieval) -> Retrieval:
        """Return the metric over the examples of both metrics."""
        if self.dimension and incoming.dimension:
            require_equal(self.dimension, incoming.dimension, "dimensions")
        return Retrieval(store=self.store.merge_state(incoming.store), dimension=self.dimension or incoming.dimension)

    def compute(self) -> Result:
        """Return {"accuracy", "mrr", "count"}. Among equal cosines, the pair's own second text comes last."""
        _, ranks = self.ranks()
        return {"accuracy": float((ranks == 1).mean()), "mrr": float((1 / ranks).mean()), "count": len(ranks)}

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the intervals of "accuracy" and "mrr". First texts are resampled, second texts are not."""
        ids, ranks = self.ranks()
        bootstrap = Bootstrap(seed=seed, statistics=3).update(ids, np.stack([ranks == 1, 1 / ranks, ranks > 0], 1))
        return {name: bootstrap.interval(formula) for name, formula in (("accuracy", accuracy_of), ("mrr", mrr_of))}

    def ranks(self) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
        """Return the index of each pair in the data set, and the rank of its second text."""
        rows = self.store.rows(2 + 2 * self.dimension)
        require_examples(len(rows), "retrieval")
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        text_ids = rows[:, 1]
        first_vectors = rows[:, 2 : 2 + self.dimension]
        second_vectors = rows[:, 2 + self.dimension :]
        ranks = []
        for start in range(0, len(rows), CHUNK_TEXTS):
            cosines = first_vectors[start : start + CHUNK_TEXTS] @ second_vectors.T
            own_cosines = cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))]
            rivals = text_ids[start : start + CHUNK_TEXTS, None] != text_ids
            ranks.append(1 + ((cosines >= own_cosines[:, None]) & rivals).sum(1))
        return rows[:, 0].astype(np.int64), np.concatenate(ranks)


def accuracy_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the accuracy, from the sums of (ranked first, 1 / rank, 1)."""
    return mean_of(sums[:, [0, 2]])


def mrr_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean reciprocal rank, from the sums of (ranked first, 1 / rank, 1)."""
    return mean_of(sums[:, [1, 2]])


def _hash_text(text: str) -> int:
    """Return 48 bits of a hash, which a double can represent. Among 10^5 texts, two collide with probability 2e-5."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
