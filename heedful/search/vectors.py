"""`VectorTable`: brute-force search for the vectors with the largest inner products, in three formats.

A row of the table is one vector:

* float32: the vector itself.
* int8: rounded coordinates and one scale, max |x| / 127. A query is rounded to 15 bits, not 8, so that almost all of
  the error comes from the rows.
* binary: the signs of the coordinates beside the int8 row. A query is compared with all rows by the Hamming distance,
  and the nearest rows are rescored in int8. The result is therefore approximate.

The C++ kernels compute int8 scores and Hamming distances. Without them, PyTorch and NumPy compute the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32, Int8, Int64, UInt64
from numpy.typing import NDArray

from heedful.atomic_io import write_synced
from heedful.csrc import kernels
from heedful.errors import HeedfulError, did_you_mean

VectorFormat = Literal["float32", "int8", "binary"]
VECTOR_FORMATS: tuple[VectorFormat, ...] = ("float32", "int8", "binary")
BLOCK = 1 << 16  # rows that are compared with the queries at once
CANDIDATES_PER_RESULT = 10  # rows that binary search rescores in int8 for each result; see benchmarks/search.py
GROUP = 64  # consecutive rows in a group; the maxima of groups bound the largest scores from below
DIGIT_BASE = 128  # base of the two int8 digits of a query's coordinate
MAX_DIM = 1024  # maximum dimension for which the kernel's 32-bit sums cannot overflow
FILES = {"rows": "vectors.bin", "scales": "scales.bin", "bits": "signs.bin"}  # file of each field of VectorTable


def check_vector_format(name: str) -> VectorFormat:
    """Return the name as a `VectorFormat`, or raise a HeedfulError if it is unknown."""
    for vector_format in VECTOR_FORMATS:
        if name == vector_format:
            return vector_format
    raise HeedfulError(
        f"the format of the vectors is {name!r}{did_you_mean(name, VECTOR_FORMATS)}; "
        f"expected {', '.join(VECTOR_FORMATS)}"
    )


def normalized_rows(vectors: NDArray[np.float32]) -> Float32[np.ndarray, "rows dim"]:
    """Scale vectors to length 1. A zero vector, such as that of a text without tokens, is not changed."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit_vectors: NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit_vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorTable:
    """Unit vectors in one format, in memory or memory-mapped."""

    rows: Float32[np.ndarray, "rows dim"] | Int8[np.ndarray, "rows dim"]
    scales: Float32[np.ndarray, " rows"] | None = None  # scale of each int8 row; None for float32
    bits: UInt64[np.ndarray, "rows words"] | None = None  # signs, 64 coordinates in a word; None if not binary

    @classmethod
    def of(cls, vectors: Float32[np.ndarray, "rows dim"], vector_format: VectorFormat = "float32") -> VectorTable:
        """Return a table of unit vectors in a format."""
        if vector_format == "float32":
            return cls(rows=vectors)
        scales = (np.abs(vectors).max(axis=1, initial=0) / 127).astype(np.float32)
        rows = np.rint(vectors / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        return cls(rows=rows, scales=scales, bits=sign_bits(vectors) if vector_format == "binary" else None)

    @classmethod
    def open(cls, folder: Path, count: int, dim: int, vector_format: VectorFormat) -> VectorTable:
        """Memory-map the files of a folder.

        Args:
            folder: The folder.
            count: Number of vectors.
            dim: Dimension of the vectors.
            vector_format: Format of the files.

        Raises:
            HeedfulError: If a file is missing or has another size.
        """
        dtype = np.float32 if vector_format == "float32" else np.int8
        rows = mapped_array(folder / FILES["rows"], (count, dim), dtype)
        if vector_format == "float32":
            return cls(rows=rows)
        scales = mapped_array(folder / FILES["scales"], (count,), np.float32)
        bits = None
        if vector_format == "binary":
            bits = mapped_array(folder / FILES["bits"], (count, _sign_words(dim)), np.uint64)
        return cls(rows=rows, scales=scales, bits=bits)

    def scores(
        self, queries: Float32[np.ndarray, "queries dim"], start: int, stop: int
    ) -> Float32[np.ndarray, "queries rows"]:
        """Return the inner products of queries with rows `start` to `stop`."""
        if self.scales is None:
            products = torch.from_numpy(np.ascontiguousarray(queries)) @ torch.from_numpy(self.rows[start:stop]).T
            scores: NDArray[np.float32] = products.numpy()
            return scores
        query_scales = (np.abs(queries).max(axis=1, initial=0) / (127 * DIGIT_BASE)).astype(np.float32)
        integers = np.rint(queries / np.where(query_scales > 0, query_scales, 1)[:, None]).astype(np.int16)
        rows, scales = self.rows[start:stop], self.scales[start:stop]
        if queries.shape[1] <= MAX_DIM and (library := kernels()) is not None:
            scores = np.empty((len(queries), len(rows)), np.float32)
            row_args = (rows.ctypes.data, scales.ctypes.data, *rows.shape)
            query_args = (integers.ctypes.data, query_scales.ctypes.data, len(queries))
            library.scores8(*row_args, *query_args, scores.ctypes.data, torch.get_num_threads())
            return scores
        high_digits = np.rint(integers / DIGIT_BASE).astype(np.int16)
        digits = torch.from_numpy(np.concatenate([high_digits, integers - DIGIT_BASE * high_digits]).astype(np.int8))
        by_digit = torch._int_mm(torch.from_numpy(rows), digits.T).numpy().T.astype(np.int64)  # [2 queries, rows]
        scores = (DIGIT_BASE * by_digit[: len(queries)] + by_digit[len(queries) :]).astype(np.float32, order="C")
        scores *= scales
        scores *= query_scales[:, None]
        return scores

    def at(self, indices: NDArray[np.int64]) -> VectorTable:
        """Copy the rows with these indices into a new table in memory."""
        return VectorTable(
            rows=np.asarray(self.rows[indices]),
            scales=None if self.scales is None else np.asarray(self.scales[indices]),
            bits=None if self.bits is None else np.asarray(self.bits[indices]),
        )

    def nearest(
        self, queries: Float32[np.ndarray, "queries dim"], count: int, alive: NDArray[np.bool_] | None = None
    ) -> tuple[Float32[np.ndarray, "queries count"], Int64[np.ndarray, "queries count"]]:
        """Return the largest inner products of each query, in descending order, and the indices of their rows.

        The search is approximate for binary rows.

        Args:
            queries: Unit vectors.
            count: Number of results for each query, at most the number of rows.
            alive: Marks the rows that may be returned. If None, all rows may be. If fewer than `count` rows are marked,
                the last scores are -inf.
        """
        if self.bits is not None:
            return self._rescored(queries, count, alive)
        return _blockwise(len(self.rows), len(queries), count, alive, lambda a, b: self.scores(queries, a, b))

    def _rescored(
        self, queries: Float32[np.ndarray, "queries dim"], count: int, alive: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Search a binary table: choose candidates by Hamming distance, and rank them by their int8 scores."""
        assert self.bits is not None
        bits, query_bits = self.bits, sign_bits(queries)
        bit_scores, candidates = _blockwise(
            len(bits),
            len(queries),
            CANDIDATES_PER_RESULT * count,
            alive,
            lambda start, stop: bit_matches(bits[start:stop], query_bits),
        )
        best = TopRows(len(queries), count)
        for query_index, (query, rows) in enumerate(zip(queries, candidates, strict=True)):
            scores = self.at(rows).scores(query[None], 0, len(rows))[0]
            best.add_row(query_index, np.where(np.isneginf(bit_scores[query_index]), -np.inf, scores), rows)
        return best.result()


def bit_matches(
    rows: UInt64[np.ndarray, "rows words"], queries: UInt64[np.ndarray, "queries words"]
) -> Float32[np.ndarray, "queries rows"]:
    """Return the negated Hamming distance of each row to each query."""
    if (library := kernels()) is None:
        return -np.stack([np.bitwise_count(rows ^ query).sum(axis=1, dtype=np.float32) for query in queries])
    matches = np.empty((len(queries), len(rows)), np.float32)
    arguments = (rows.ctypes.data, *rows.shape, queries.ctypes.data, len(queries))
    library.matches(*arguments, matches.ctypes.data, torch.get_num_threads())
    return matches


def sign_bits(vectors: Float32[np.ndarray, "rows dim"]) -> UInt64[np.ndarray, "rows words"]:
    """Pack the signs of the coordinates into 64-bit words; a bit is 1 if the coordinate is positive."""
    packed = np.zeros((len(vectors), 8 * _sign_words(vectors.shape[1])), np.uint8)
    signs = np.packbits(vectors > 0, axis=1)
    packed[:, : signs.shape[1]] = signs
    return packed.view(np.uint64)


def _sign_words(dim: int) -> int:
    """Return the number of 64-bit words for the signs of a vector."""
    return -(-dim // 64)


def _blockwise(
    rows: int,
    queries: int,
    count: int,
    alive: NDArray[np.bool_] | None,
    scores_of: Callable[[int, int], NDArray[np.float32]],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the largest scores of each query in descending order, and their rows, both [queries, count].

    Args:
        rows: Number of rows.
        queries: Number of queries.
        count: Number of results for each query.
        alive: Marks the rows that may be returned. If None, all rows may be.
        scores_of: Returns the scores of rows `start` to `stop`, [queries, stop - start].
    """
    best = TopRows(queries, min(count, rows))
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        scores = scores_of(start, stop)
        if alive is not None:
            scores[:, ~alive[start:stop]] = -np.inf
        best.add(scores, start)
    return best.result()


class TopRows:
    """Collects the rows with the largest scores for each query, over blocks of rows."""

    def __init__(self, queries: int, count: int) -> None:
        """Start without rows.

        Args:
            queries: Number of queries.
            count: Number of rows to keep for each query.
        """
        self.count = count
        self._scores = [np.zeros(0, np.float32)] * queries
        self._indices = [np.zeros(0, np.int64)] * queries

    def add(self, scores: Float32[np.ndarray, "queries rows"], first: int) -> None:
        """Add the scores of a block of rows; `first` is the index of the block's first row."""
        for query, query_scores in enumerate(scores):
            candidates = np.flatnonzero(query_scores >= self._lower_bound(query, query_scores))
            self.add_row(query, query_scores[candidates], candidates + first)

    def _lower_bound(self, query: int, scores: NDArray[np.float32]) -> float:
        """Return a lower bound of the `count` largest scores, which costs less than a partial sort of the block."""
        if len(self._scores[query]) == self.count > 0:
            return float(self._scores[query].min())
        groups = len(scores) // GROUP
        if not 0 < self.count <= groups:
            return -np.inf
        maxima = scores[: groups * GROUP].reshape(groups, GROUP).max(axis=1)
        return float(np.partition(maxima, groups - self.count)[groups - self.count])  # the `count`-th largest maximum

    def add_row(self, query: int, scores: NDArray[np.float32], indices: NDArray[np.int64]) -> None:
        """Add scores of one query, and the indices of their rows."""
        scores = np.concatenate([self._scores[query], scores.astype(np.float32)])
        indices = np.concatenate([self._indices[query], indices])
        if len(scores) > self.count:
            largest = np.argpartition(-scores, self.count)[: self.count]
            scores, indices = scores[largest], indices[largest]
        self._scores[query], self._indices[query] = scores, indices

    def result(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the largest scores in descending order, and the indices of their rows, both [queries, count]."""
        scores, indices = np.stack(self._scores), np.stack(self._indices)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(indices, order, axis=1)


def write_tables(folder: Path, tables: Sequence[VectorTable]) -> None:
    """Concatenate tables of one format, and write the result as files of a folder."""
    for name, file in FILES.items():
        arrays = [getattr(table, name) for table in tables]
        if arrays[0] is not None:
            write_synced(folder / file, (np.ascontiguousarray(array).tobytes() for array in arrays))


def nearest_in_tables(
    tables: Sequence[VectorTable],
    queries: Float32[np.ndarray, "queries dim"],
    count: int,
    alive: Iterable[NDArray[np.bool_]],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search the concatenation of several tables, as `VectorTable.nearest` searches one.

    Args:
        tables: The tables.
        queries: Unit vectors.
        count: Number of results for each query.
        alive: For each table, marks the rows that may be returned.

    Returns:
        Scores in descending order, and indices of rows in the concatenation of the tables.
    """
    first = 0  # index of the table's first row in the concatenation
    table_scores = [np.zeros((len(queries), 0), np.float32)]
    table_indices = [np.zeros((len(queries), 0), np.int64)]
    for table, table_alive in zip(tables, alive, strict=True):
        scores, indices = table.nearest(queries, count, table_alive)
        table_scores.append(scores)
        table_indices.append(indices + first)
        first += len(table.rows)
    scores, indices = np.concatenate(table_scores, axis=1), np.concatenate(table_indices, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(indices, order, axis=1)


def mapped_array(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Memory-map an array as copy-on-write, since PyTorch warns about read-only arrays.

    Raises:
        HeedfulError: If the file is missing or has another size.
    """
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size == expected:
            return np.memmap(path, dtype, "c", shape=shape) if size else np.zeros(shape, dtype)
    except OSError as error:
        raise HeedfulError(f"{path} cannot be read: {error.strerror}; build the index again") from None
    raise HeedfulError(f"{path} has {size} bytes, expected {expected}: it is damaged; build the index again")
