"""Samples, batches and weighted losses: packing, weights, and moves to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, upcast, weighted_loss, weights_of_samples
from heedful.packed import Packed

token = st.integers(0, 2**31 - 1)
sequence = st.lists(st.tuples(token, st.integers(0, 255)), max_size=6)
groups = st.lists(st.lists(sequence, min_size=1, max_size=4), max_size=5)


def make_sample(group: list[list[tuple[int, int]]]) -> Sample:
    """Return a sample of sequences, which are lists of token ids and types."""
    return Sample.of([[id for id, _ in tokens] for tokens in group], [[type for _, type in tokens] for tokens in group])


@given(groups)
def test_packed_samples_have_their_sequences_end_to_end(groups_of_texts: list[list[list[tuple[int, int]]]]) -> None:
    samples = [make_sample(group) for group in groups_of_texts]
    assert [len(sample) for sample in samples] == [sum(map(len, group)) for group in groups_of_texts]
    sequences = [tokens for group in groups_of_texts for tokens in group]
    expected = Packed.of(
        [[id for id, _ in tokens] for tokens in sequences], [[type for _, type in tokens] for tokens in sequences]
    )
    packed = pack_samples(samples)
    assert packed.bounds == expected.bounds
    for name in ("tokens", "positions", "types"):
        packed_values, expected_values = getattr(packed, name), getattr(expected, name)
        assert packed_values.dtype == expected_values.dtype == torch.long, name
        assert torch.equal(packed_values, expected_values), name


def test_samples_are_compact() -> None:
    labelled = Sample.of([[1, 2], [3]], [[0, 1], [0]], target="t", weight=0.5)
    assert (labelled.tokens.dtype, labelled.types.dtype) == (np.int32, np.uint8)
    assert (labelled.bounds, labelled.target, labelled.weight) == ((0, 2, 3), "t", 0.5)
    equal_values = Sample.of([[1, 2], [3]], [[0, 1], [0]], target="t", weight=0.5)
    assert labelled == labelled and labelled != equal_values  # the identity is compared, since arrays cannot be
    with pytest.raises(OverflowError):
        Sample.of([[2**31]], [[0]])


def batch_with_weights(weights: torch.Tensor) -> Batch:
    """Return a batch without tokens, whose targets have these weights."""
    return Batch(packed=Packed.of([]), targets=torch.zeros(len(weights)), weights=weights)


@given(st.lists(st.tuples(st.floats(0, 10, width=32), st.floats(0.015625, 1, width=32)), min_size=1, max_size=20))
def test_a_weighted_loss_has_the_sum_and_the_total_weight(pairs: list[tuple[float, float]]) -> None:
    losses, weights = torch.tensor([loss for loss, _ in pairs]), torch.tensor([weight for _, weight in pairs])
    total = weighted_loss(losses.double(), batch_with_weights(weights))
    assert float(total.sum) == pytest.approx(sum(loss * weight for loss, weight in pairs), abs=1e-9)
    assert total.count == pytest.approx(sum(weight for _, weight in pairs), abs=1e-12)
    reversed_total = weighted_loss(losses.double().flip(0), batch_with_weights(weights.flip(0)))
    assert reversed_total.count == total.count


def test_a_loss_keeps_its_graph() -> None:
    losses = torch.ones(3, requires_grad=True)
    weighted_loss(losses, batch_with_weights(torch.tensor([1.0, 0.5, 0.25]))).sum.backward()
    assert losses.grad is not None and losses.grad.tolist() == [1.0, 0.5, 0.25]


def test_weights_of_samples_and_upcast() -> None:
    samples = [Sample.of([[1]], [[0]], weight=weight) for weight in (1.0, 1 / 3)]
    assert torch.equal(weights_of_samples(samples), torch.tensor([1.0, 1 / 3])) and weights_of_samples([]).shape == (0,)
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert upcast(torch.ones(2, dtype=dtype)).dtype == expected


def test_all_tensors_of_a_batch_move() -> None:
    batch = Batch(packed=Packed.of([[1, 2]]), targets=torch.ones(1), weights=torch.ones(1), groups=(1,))
    with_rows = Batch(packed=batch.packed, targets=batch.targets, weights=batch.weights, rows=torch.zeros(1))
    for original in (batch, with_rows):
        moved = original.to("meta")
        tensors = (moved.packed.tokens, moved.targets, moved.weights, *([] if moved.rows is None else [moved.rows]))
        assert all(tensor.is_meta for tensor in tensors)
        assert (moved.rows is None) is (original.rows is None) and moved.groups == original.groups
