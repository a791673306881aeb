"""Packed: sequences are concatenated, and their boundaries are on the host."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.packed import Packed


@given(st.lists(st.lists(st.integers(0, 99), max_size=7), max_size=6))
def test_of_concatenates_sequences(sequences: list[list[int]]) -> None:
    batch = Packed.of(sequences)
    assert [batch.tokens[span].tolist() for span in batch.spans()] == sequences
    positions = [batch.positions[span].tolist() for span in batch.spans()]
    assert positions == [list(range(len(sequence))) for sequence in sequences]
    assert batch.types.tolist() == [0] * sum(map(len, sequences))
    assert batch.lengths == [len(sequence) for sequence in sequences]
    assert len(batch) == len(sequences)
    assert batch.bounds[0] == 0 and batch.bounds[-1] == len(batch.tokens)


def test_of_keeps_types() -> None:
    assert Packed.of([[5, 6, 7], [8]], types=[[0, 0, 1], [1]]).types.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("types", "types_text"),
    [([[0, 0], [0]], "[2, 1]"), ([[0, 0, 0]], "[3]"), ([[0] * 3, [0], []], "[3, 1, 0]"), ([], "[]")],
)
def test_types_with_wrong_lengths_are_refused(types: list[list[int]], types_text: str) -> None:
    text = f"types have lengths {types_text} but the sequences have lengths [3, 1]: give one type for each token"
    with pytest.raises(HeedfulError, match=re.escape(text)):
        Packed.of([[5, 6, 7], [8]], types=types)


def test_unpack_returns_one_tensor_for_each_sequence() -> None:
    batch = Packed.of([[1, 2], [], [3]])
    rows = torch.randn(3, 4, 5)
    unpacked = batch.unpack(rows)
    assert [tuple(tensor.shape) for tensor in unpacked] == [(2, 4, 5), (0, 4, 5), (1, 4, 5)]
    assert torch.equal(torch.cat(unpacked), rows)


def test_unpack_refuses_a_wrong_number_of_rows() -> None:
    with pytest.raises(HeedfulError, match=r"has 4 rows, but this batch has 3$"):
        Packed.of([[1, 2], [3]]).unpack(torch.zeros(4, 2))


def test_first_rows_are_those_of_first_tokens() -> None:
    batch = Packed.of([[7, 1], [8], [9, 2, 3]])
    assert batch.tokens[batch.first_rows()].tolist() == [7, 8, 9]


def test_first_rows_refuse_empty_sequences() -> None:
    text = "sequences [0, 2] are empty: they have no first token to summarise them"
    with pytest.raises(HeedfulError, match=re.escape(text)):
        Packed.of([[], [1], []]).first_rows()


def test_spans_are_the_slices_of_the_sequences() -> None:
    assert Packed.of([[1, 2], [], [3]]).spans() == [slice(0, 2), slice(2, 2), slice(2, 3)]


def test_an_empty_batch() -> None:
    batch = Packed.of([])
    assert (len(batch), batch.bounds, batch.lengths, batch.spans()) == (0, (0,), [], [])
    assert batch.unpack(torch.zeros(0, 3)) == []
    for indices in (batch.tokens, batch.positions, batch.types, batch.first_rows()):
        assert indices.shape == (0,) and indices.dtype == torch.long


def test_to_moves_every_tensor_and_leaves_the_bounds() -> None:
    batch = Packed.of([[1, 2], [3]])
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in (moved.tokens, moved.positions, moved.types)} == {"meta"}
    assert moved.bounds == batch.bounds
    assert torch.equal(batch.to("cpu").tokens, batch.tokens)


def test_pad_to_bucket_adds_at_most_three_percent_and_has_few_numbers_of_rows() -> None:
    padded_sizes = set()
    for rows in range(2000):
        batch = Packed.of([[7] * rows])
        padded = batch.pad_to_bucket()
        padding = padded.bounds[-1] - rows
        assert 0 <= padding <= rows / 32 and padded.bounds[:-1] == batch.bounds
        assert len(padded.tokens) == len(padded.positions) == len(padded.types) == padded.bounds[-1]
        padded_sizes.add(padded.bounds[-1])
    assert len([size for size in padded_sizes if size >= 64]) <= 32 * 5 + 1
