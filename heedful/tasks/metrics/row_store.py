"""Storage of the values of every example, for metrics that need them all at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

Rows = Float64[np.ndarray, "_ columns"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStore:
    """Rows of values in a few arrays. Adding n rows one at a time copies O(n log n) rows in all."""

    parts: tuple[Rows, ...] = ()

    def append(self, new: Rows) -> RowStore:
        """Return a store with rows added at the end."""
        parts = list(self.parts)
        while parts and len(parts[-1]) <= 2 * len(new):
            new = np.concatenate((parts.pop(), new))
        return RowStore(parts=(*parts, new)) if len(new) else self

    def merge_state(self, incoming: RowStore) -> RowStore:
        """Return a store with the rows of both stores."""
        store = self
        for part in incoming.parts:
            store = store.append(part)
        return store

    def rows(self, width: int) -> Rows:
        """Return all rows, [rows, width]; `width` is needed for an empty store."""
        return np.concatenate((np.zeros((0, width)), *self.parts))
