"""Retrieval: is the second text of a pair the one whose vector is nearest to the first's?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from jaxtyping import Float64, Int64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, require_equal, require_examples, require_same_length
from heedful.tasks.metrics.bootstrap import Bootstrap, Sums, mean_of
from heedful.tasks.metrics.regression import RowStore

AT_ONCE = 1024  # first texts that are compared with all second ones together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Retrieval:
    """Accuracy at 1 and mean reciprocal rank by cosine among all second texts, whose vectors are kept.

    Second texts that equal a pair's own are no rivals of it. 16 bytes for each number of a pair's vectors: 10,000 pairs
    of width 384 take 61 MB.
    """

    kept: RowStore = field(default_factory=RowStore)
    width: int = 0

    def update(
        self, ids: Sequence[int], vectors: Float64[np.ndarray, "pairs 2 width"], seconds: Sequence[str] | None = None
    ) -> Retrieval:
        """With more pairs: the number of each in the data set, both vectors, and the second text; None: all differ.

        A vector of zeros, as a text without tokens has, is as far from all others: its cosines are 0.
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
        return self.merge_state(replace(self, kept=RowStore().added(rows), width=vectors.shape[-1]))

    def merge_state(self, other: Retrieval) -> Retrieval:
        """Both as one."""
        if self.width and other.width:
            require_equal(self.width, other.width, "widths")
        return Retrieval(kept=self.kept.merge_state(other.kept), width=self.width or other.width)

    def compute(self) -> Result:
        """{"accuracy", "mrr", "count"}; of equal cosines the pair's own comes last."""
        _, found = self.ranks()
        return {"accuracy": float((found == 1).mean()), "mrr": float((1 / found).mean()), "count": len(found)}

    def intervals(self, seed: int) -> dict[str, Result]:
        """Of "accuracy" and "mrr": the first texts are drawn anew, and all second ones stay."""
        ids, found = self.ranks()
        drawn = Bootstrap(seed=seed, statistics=3).update(ids, np.stack([found == 1, 1 / found, found > 0], 1))
        return {name: drawn.interval(formula) for name, formula in (("accuracy", accuracy_of), ("mrr", mrr_of))}

    def ranks(self) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
        """The number of each pair in the data set, and the place of its second text among its own and its rivals."""
        rows = self.kept.rows(2 + 2 * self.width)
        require_examples(len(rows), "retrieval")
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        texts, a, b = rows[:, 1], rows[:, 2 : 2 + self.width], rows[:, 2 + self.width :]
        ranks = []
        for start in range(0, len(rows), AT_ONCE):
            cosines = a[start : start + AT_ONCE] @ b.T
            own = cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))]
            rivals = texts[start : start + AT_ONCE, None] != texts
            ranks.append(1 + ((cosines >= own[:, None]) & rivals).sum(1))
        return rows[:, 0].astype(np.int64), np.concatenate(ranks)


def accuracy_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """From the sums of (found first, 1 / rank, 1)."""
    return mean_of(sums[:, [0, 2]])


def mrr_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """From the same sums."""
    return mean_of(sums[:, [1, 2]])


def _number(text: str) -> int:
    """Of a text: 48 bits of a hash, which a double holds; among 10^5 texts two are the same once in 56,000 times."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
