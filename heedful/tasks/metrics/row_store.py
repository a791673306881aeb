"""RowStore: storage of a few values per example, for metrics that need the values of all examples at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

Rows = Float64[np.ndarray, "_ columns"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStore:
    """A table with a row for each example, stored as a few arrays. Appending n single rows copies O(n log n) rows."""

    parts: tuple[Rows, ...] = ()

    def append(self, new: Rows) -> RowStore:
        """Return a store with rows appended, [rows, columns]."""
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

    def rows(self, columns: int) -> Rows:
        """Return all rows, [rows, columns]. An empty store does not know how many `columns` it has."""
        return np.concatenate((np.zeros((0, columns)), *self.parts))
