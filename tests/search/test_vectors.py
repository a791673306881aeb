"""`VectorTable`: the nearest vectors in each format equal those of plain matrix products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from heedful.csrc import Kernels
from heedful.errors import HeedfulError
from heedful.search import vectors as module
from heedful.search.vectors import (
    VectorTable,
    bit_matches,
    check_vector_format,
    nearest_in_tables,
    normalized_rows,
    sign_bits,
    write_tables,
)


def random_units(count: int, dim: int = 40, seed: int = 0) -> NDArray[np.float32]:
    """Return random unit vectors, [count, dim]."""
    return normalized_rows(np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32))


@pytest.mark.parametrize("block", [1 << 16, 7])
def test_float32_is_the_plain_product(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    rows, queries = random_units(50), random_units(3, seed=1)
    alive = np.arange(50) % 3 > 0
    scores, indices = VectorTable.of(rows).nearest(queries, 10, alive)
    for query, values, rows_of_query in zip(queries, scores, indices, strict=True):
        expected = np.where(alive, rows @ query, -np.inf)
        assert rows_of_query.tolist() == np.argsort(-expected)[:10].tolist()
        assert values == pytest.approx(expected[rows_of_query], abs=1e-6)


def test_int8_scores_are_products_of_rounded_rows() -> None:
    """The query is rounded to 15 bits, so that its error is much smaller than that of the rows."""
    rows, queries = random_units(200, 37), random_units(5, 37, seed=1)
    table = VectorTable.of(rows, "int8")
    assert table.rows.dtype == np.int8 and table.scales is not None
    rounded = table.rows * table.scales[:, None]
    assert np.abs(rounded - rows).max() <= 0.5001 * table.scales.max()
    scores = table.scores(queries, 0, 200)
    assert np.abs(scores - queries @ rounded.T).max() < 1e-4
    assert np.array_equal(table.scores(queries, 50, 60), scores[:, 50:60])


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (515, 37), (1030, 384), (3, 1024), (5, 1100)])
def test_kernels_give_the_same_bits(native: Kernels, monkeypatch: pytest.MonkeyPatch, count: int, dim: int) -> None:
    """The kernels compute the same scores as PyTorch and NumPy, with any number of threads."""
    rows, queries = random_units(count, dim), random_units(3, dim, seed=1)
    rows[0] = 0
    int8, bits, query_bits = VectorTable.of(rows, "int8"), sign_bits(rows), sign_bits(queries)
    threads_before = torch.get_num_threads()
    by_kernels = []  # (scores, matches) for each number of threads
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            by_kernels.append((int8.scores(queries, 0, count), bit_matches(bits, query_bits)))
    finally:
        torch.set_num_threads(threads_before)
    monkeypatch.setattr(module, "kernels", lambda: None)
    expected_scores, expected_matches = int8.scores(queries, 0, count), bit_matches(bits, query_bits)
    for scores, matches in by_kernels:
        assert np.array_equal(scores, expected_scores)
        assert np.array_equal(matches, expected_matches)
    assert expected_matches.max() <= 0 and -expected_matches.min() <= dim


@pytest.mark.parametrize("block", [1 << 16, 64])
def test_binary_finds_by_signs_and_ranks_by_int8(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    rows = random_units(500, 100)
    queries = normalized_rows(rows[:4] + 0.05 * random_units(4, 100, seed=2))
    alive = np.ones(500, bool)
    alive[1] = False
    table, int8 = VectorTable.of(rows, "binary"), VectorTable.of(rows, "int8")
    scores, indices = table.nearest(queries, 3, alive)
    assert indices[0, 0] == 0 and indices[2, 0] == 2 and 1 not in indices
    for query, values, rows_of_query in zip(queries, scores, indices, strict=True):
        assert values == pytest.approx(int8.scores(query[None], 0, 500)[0, rows_of_query])
        assert (np.diff(values) <= 0).all()
    all_scores, _ = table.nearest(queries, 500, alive)  # all rows are candidates, so the result is exact
    assert all_scores[:, :-1] == pytest.approx(int8.nearest(queries, 500, alive)[0][:, :-1])
    assert np.isneginf(all_scores[:, -1]).all(), "the row that is not alive is last"


@pytest.mark.parametrize("vector_format", ["float32", "int8", "binary"])
def test_files_are_mapped_as_they_were_saved(tmp_path: Path, vector_format: module.VectorFormat) -> None:
    table = VectorTable.of(random_units(30, 70), vector_format)
    write_tables(tmp_path, [table.at(np.arange(20)), table.at(np.arange(20, 30))])
    opened = VectorTable.open(tmp_path, 30, 70, vector_format)
    queries = random_units(2, 70, seed=1)
    (scores, indices), (opened_scores, opened_indices) = table.nearest(queries, 5), opened.nearest(queries, 5)
    assert np.array_equal(opened_scores, scores) and np.array_equal(opened_indices, indices)
    with pytest.raises(HeedfulError, match=r"vectors.bin has \d+ bytes, expected \d+: it is damaged"):
        VectorTable.open(tmp_path, 31, 70, vector_format)
    with pytest.raises(HeedfulError, match="cannot be read"):
        VectorTable.open(tmp_path / "missing", 30, 70, vector_format)


def test_tables_are_searched_as_one() -> None:
    rows, queries = random_units(90), random_units(4, seed=1)
    alive = np.arange(90) % 2 == 0
    bounds = ((0, 10), (10, 10), (10, 80), (80, 90))  # the second table is empty
    tables = [VectorTable.of(rows[start:stop]) for start, stop in bounds]
    scores, indices = nearest_in_tables(tables, queries, 20, [alive[start:stop] for start, stop in bounds])
    expected, expected_rows = VectorTable.of(rows).nearest(queries, 20, alive)
    assert np.array_equal(indices, expected_rows) and scores == pytest.approx(expected)


def test_a_vector_of_zeros_has_the_score_zero() -> None:
    zero = np.zeros((1, 8), np.float32)
    for vector_format in module.VECTOR_FORMATS:
        table = VectorTable.of(normalized_rows(zero), vector_format)
        assert table.nearest(random_units(1, 8), 1)[0].tolist() == [[0.0]]
        assert VectorTable.of(random_units(3, 8), vector_format).nearest(zero, 2)[0].tolist() == [[0.0, 0.0]]


def test_an_unknown_format_is_refused() -> None:
    assert check_vector_format("int8") == "int8"
    with pytest.raises(HeedfulError, match=r"'int4' \(did you mean \"int8\"\?\); expected float32, int8, binary"):
        check_vector_format("int4")
