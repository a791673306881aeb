"""Retrieval: is the second text of a pair the one whose vector is nearest to the first's?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, need_examples, need_length, need_same
from heedful.tasks.metrics.numbers import Kept

AT_ONCE = 1024  # first texts that are compared with all second ones together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Retrieval:
    """Accuracy at 1 and mean reciprocal rank by cosine among all second texts, whose vectors are kept.

    16 bytes for each number of a pair's vectors: 10,000 pairs of width 384 take 61 MB.
    """

    kept: Kept = field(default_factory=Kept)
    width: int = 0

    def updated(self, ids: Sequence[int], vectors: Float64[np.ndarray, "pairs 2 width"]) -> Retrieval:
        """With more pairs: the number of each in the data set, and both vectors."""
        need_length(len(ids), len(vectors), "ids", "pairs of vectors")
        if not len(vectors):
            return self
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        if not (np.isfinite(norms).all() and norms.all()):
            raise HeedfulError("a vector is zero or not finite: its direction means nothing")
        rows = np.concatenate([np.array(ids, dtype=np.float64)[:, None], (vectors / norms).reshape(len(ids), -1)], 1)
        return self.merged(replace(self, kept=Kept().added(rows), width=vectors.shape[-1]))

    def merged(self, other: Retrieval) -> Retrieval:
        """Both as one."""
        if self.width and other.width:
            need_same(self.width, other.width, "widths")
        return Retrieval(kept=self.kept.merged(other.kept), width=self.width or other.width)

    def result(self) -> Result:
        """{"accuracy", "mrr", "count"}; of equal cosines the pair's own comes last."""
        rows = self.kept.rows(1 + 2 * self.width)
        need_examples(len(rows), "retrieval")
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        a, b = rows[:, 1 : 1 + self.width], rows[:, 1 + self.width :]
        ranks = []
        for start in range(0, len(rows), AT_ONCE):
            cosines = a[start : start + AT_ONCE] @ b.T
            own = cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))]
            ranks.append((cosines >= own[:, None]).sum(1))
        found = np.concatenate(ranks)
        return {"accuracy": float((found == 1).mean()), "mrr": float((1 / found).mean()), "count": len(found)}
