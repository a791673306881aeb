"""Brute-force search for the vectors with the largest inner products, in float32, int8 or binary with rescoring.

An int8 row has one scale, max |x| / 127. A query is rounded to 15 bits, not 8, so that almost all of the error comes
from the rows. A binary row has the signs of its coordinates: a query is compared with all rows by the Hamming distance,
and then with the nearest rows in int8, so that the result is approximate. int8 scores and Hamming distances are
computed by the C++ kernels; without them, by PyTorch and NumPy, with the same results.
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
BLOCK = 1 << 16  # rows that are compared with queries at once
CANDIDATES_PER_RESULT = 10  # rows that binary search rescores in int8 for each result; see benchmarks/search.py
GROUP = 64  # neighbouring rows whose maximum is taken to find a lower bound of the largest scores
DIGIT_BASE = 128  # base of the two int8 digits of a query's coordinate
MAX_WIDTH = 1024  # widest rows for which the kernel's 32-bit sums cannot overflow
FILES = {"rows": "vectors.bin", "scales": "scales.bin", "bits": "signs.bin"}


def check_vector_format(name: str) -> VectorFormat:
    """Return the format of this name; raises HeedfulError for another name."""
    for vector_format in VECTOR_FORMATS:
        if name == vector_format:
            return vector_format
    raise HeedfulError(
        f"the format of the vectors is {name!r}{did_you_mean(name, VECTOR_FORMATS)}; "
        f"expected {', '.join(VECTOR_FORMATS)}"
    )


def normalized_rows(vectors: NDArray[np.float32]) -> Float32[np.ndarray, "rows width"]:
    """Return vectors scaled to length 1; a vector of zeros, as a text without tokens has, stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    units: NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return units


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorTable:
    """Unit vectors in one format, in memory or memory-mapped."""

    rows: Float32[np.ndarray, "rows width"] | Int8[np.ndarray, "rows width"]
    scales: Float32[np.ndarray, " rows"] | None = None  # scales of int8 rows; None: the rows are float32
    bits: UInt64[np.ndarray, "rows words"] | None = None  # signs of the coordinates, 64 in a word; None: not binary

    @classmethod
    def of(cls, vectors: Float32[np.ndarray, "rows width"], vector_format: VectorFormat = "float32") -> VectorTable:
        """Return a table of unit vectors in a format."""
        if vector_format == "float32":
            return cls(rows=vectors)
        scales = (np.abs(vectors).max(axis=1, initial=0) / 127).astype(np.float32)
        rows = np.rint(vectors / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        return cls(rows=rows, scales=scales, bits=sign_bits(vectors) if vector_format == "binary" else None)

    @classmethod
    def open(cls, folder: Path, count: int, width: int, vector_format: VectorFormat) -> VectorTable:
        """Memory-map the files of a folder.

        Raises:
            HeedfulError: If a file is missing or has another size.
        """
        rows = mapped_array(
            folder / FILES["rows"], (count, width), np.float32 if vector_format == "float32" else np.int8
        )
        if vector_format == "float32":
            return cls(rows=rows)
        scales = mapped_array(folder / FILES["scales"], (count,), np.float32)
        binary = vector_format == "binary"
        words = mapped_array(folder / FILES["bits"], (count, _words(width)), np.uint64) if binary else None
        return cls(rows=rows, scales=scales, bits=words)

    def scores(
        self, queries: Float32[np.ndarray, "queries width"], start: int, stop: int
    ) -> Float32[np.ndarray, "queries rows"]:
        """Return the inner products of queries with rows `start` to `stop`."""
        if self.scales is None:
            products = torch.from_numpy(np.ascontiguousarray(queries)) @ torch.from_numpy(self.rows[start:stop]).T
            scores: NDArray[np.float32] = products.numpy()
            return scores
        query_scales = (np.abs(queries).max(axis=1, initial=0) / (127 * DIGIT_BASE)).astype(np.float32)
        integers = np.rint(queries / np.where(query_scales > 0, query_scales, 1)[:, None]).astype(np.int16)
        rows, scales = self.rows[start:stop], self.scales[start:stop]
        if queries.shape[1] <= MAX_WIDTH and (library := kernels()) is not None:
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

    def at(self, numbers: NDArray[np.int64]) -> VectorTable:
        """Return a table of the rows with these numbers, in memory."""
        return VectorTable(
            rows=np.asarray(self.rows[numbers]),
            scales=None if self.scales is None else np.asarray(self.scales[numbers]),
            bits=None if self.bits is None else np.asarray(self.bits[numbers]),
        )

    def nearest(
        self, queries: Float32[np.ndarray, "queries width"], count: int, alive: NDArray[np.bool_] | None = None
    ) -> tuple[Float32[np.ndarray, "queries count"], Int64[np.ndarray, "queries count"]]:
        """Return the largest inner products of each query, in descending order, and the numbers of their rows.

        With binary rows, the search is approximate.

        Args:
            queries: Unit vectors.
            count: Number of rows for each query; all of them if there are fewer.
            alive: Whether each row may be returned; None: all may. If fewer than `count` may, the last scores are -inf.
        """
        if self.bits is not None:
            return self._rescored(queries, count, alive)
        return _blockwise(len(self.rows), len(queries), count, alive, lambda a, b: self.scores(queries, a, b))

    def _rescored(
        self, queries: Float32[np.ndarray, "queries width"], count: int, alive: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the nearest rows of a binary table: candidates by Hamming distance, ranked by their int8 scores."""
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
        for number, (query, rows) in enumerate(zip(queries, candidates, strict=True)):
            scores = self.at(rows).scores(query[None], 0, len(rows))[0]
            best.add_row(number, np.where(np.isneginf(bit_scores[number]), -np.inf, scores), rows)
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


def sign_bits(vectors: Float32[np.ndarray, "rows width"]) -> UInt64[np.ndarray, "rows words"]:
    """Return a bit for each coordinate, 1 where it is positive, as integers of 64 bits."""
    packed = np.zeros((len(vectors), 8 * _words(vectors.shape[1])), np.uint8)
    signs = np.packbits(vectors > 0, axis=1)
    packed[:, : signs.shape[1]] = signs
    return packed.view(np.uint64)


def _words(width: int) -> int:
    """Return the number of 64-bit words for the signs of a vector."""
    return -(-width // 64)


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
        alive: Whether each row may be returned; None: all may.
        scores_of: Returns the scores for rows `start` to `stop`, [queries, stop - start].
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
    """Collects the rows with the largest scores for each query."""

    def __init__(self, queries: int, count: int) -> None:
        """Take the number of queries, and the number of rows that are kept for each."""
        self.count = count
        self._scores = [np.zeros(0, np.float32)] * queries
        self._numbers = [np.zeros(0, np.int64)] * queries

    def add(self, scores: Float32[np.ndarray, "queries rows"], first: int) -> None:
        """Add the scores of a block of rows, whose first row has the number `first`."""
        for query, query_scores in enumerate(scores):
            candidates = np.flatnonzero(query_scores >= self._lower_bound(query, query_scores))
            self.add_row(query, query_scores[candidates], candidates + first)

    def _lower_bound(self, query: int, scores: NDArray[np.float32]) -> float:
        """Return a lower bound of the scores that will be kept; it costs less than a partial sort of the block."""
        if len(self._scores[query]) == self.count > 0:
            return float(self._scores[query].min())
        groups = len(scores) // GROUP
        if not 0 < self.count <= groups:
            return -np.inf
        maxima = scores[: groups * GROUP].reshape(groups, GROUP).max(axis=1)
        return float(np.partition(maxima, groups - self.count)[groups - self.count])  # at least `count` maxima reach it

    def add_row(self, query: int, scores: NDArray[np.float32], numbers: NDArray[np.int64]) -> None:
        """Add scores of one query with the numbers of their rows."""
        scores = np.concatenate([self._scores[query], scores.astype(np.float32)])
        numbers = np.concatenate([self._numbers[query], numbers])
        if len(scores) > self.count:
            largest = np.argpartition(-scores, self.count)[: self.count]
            scores, numbers = scores[largest], numbers[largest]
        self._scores[query], self._numbers[query] = scores, numbers

    def result(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the kept scores in descending order, and the numbers of their rows, both [queries, count]."""
        scores, numbers = np.stack(self._scores), np.stack(self._numbers)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(numbers, order, axis=1)


def write_tables(folder: Path, tables: Sequence[VectorTable]) -> None:
    """Write tables of one format, one after the other, as files of a folder."""
    for name, file in FILES.items():
        arrays = [getattr(table, name) for table in tables]
        if arrays[0] is not None:
            write_synced(folder / file, (np.ascontiguousarray(array).tobytes() for array in arrays))


def nearest_in_tables(
    tables: Sequence[VectorTable],
    queries: Float32[np.ndarray, "queries width"],
    count: int,
    alive: Iterable[NDArray[np.bool_]],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the nearest rows of several tables, as `VectorTable.nearest` does; rows are numbered over all tables.

    Args:
        tables: The tables.
        queries: Unit vectors.
        count: Number of rows for each query.
        alive: Whether each row may be returned, by table.
    """
    first = 0  # number of the table's first row
    table_scores, table_numbers = [np.zeros((len(queries), 0), np.float32)], [np.zeros((len(queries), 0), np.int64)]
    for table, table_alive in zip(tables, alive, strict=True):
        scores, numbers = table.nearest(queries, count, table_alive)
        table_scores.append(scores)
        table_numbers.append(numbers + first)
        first += len(table.rows)
    scores, numbers = np.concatenate(table_scores, axis=1), np.concatenate(table_numbers, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(numbers, order, axis=1)


def mapped_array(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Memory-map an array, copy-on-write: PyTorch warns about arrays that cannot be written.

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
