"""BatchSampler: the order of samples is a permutation in every epoch that depends only on the seed and the epoch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.sampler import BatchSampler, derive_seed, epoch_order
from heedful.errors import HeedfulError

counts, batch_sizes, seeds, epochs = st.integers(1, 300), st.integers(1, 70), st.integers(0, 2**31), st.integers(0, 5)


@given(counts, seeds, epochs)
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 0  # the order is cached for the next step, so callers must not change it


@given(counts, batch_sizes, seeds, epochs)
def test_batches_cover_each_epoch_once(count: int, batch: int, seed: int, epoch: int) -> None:
    sampler = BatchSampler(num_samples=count, batch_size=batch, seed=seed)
    first_step = epoch * sampler.steps_per_epoch
    plans = [sampler.plan(step) for step in range(first_step, first_step + sampler.steps_per_epoch)]
    assert {plan.epoch for plan in plans} == {epoch}
    assert [len(plan.indices) for plan in plans[:-1]] == [batch] * (sampler.steps_per_epoch - 1)
    assert 1 <= len(plans[-1].indices) <= batch
    assert np.array_equal(np.concatenate([plan.indices for plan in plans]), epoch_order(count, seed, epoch))


@given(counts, batch_sizes, batch_sizes, seeds, epochs)
def test_keys_do_not_depend_on_the_batch_size(
    count: int, first_size: int, second_size: int, seed: int, epoch: int
) -> None:
    def key_by_index(batch_size: int) -> dict[int, int]:
        sampler = BatchSampler(num_samples=count, batch_size=batch_size, seed=seed)
        first_step = epoch * sampler.steps_per_epoch
        plans = [sampler.plan(step) for step in range(first_step, first_step + sampler.steps_per_epoch)]
        return {int(index): key for plan in plans for index, key in zip(plan.indices, plan.keys, strict=True)}

    keys = key_by_index(first_size)
    assert keys == key_by_index(second_size)
    assert len(set(keys.values())) == count


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    keys = {
        key
        for seed in range(4)
        for step in range(4)
        for key in BatchSampler(num_samples=50, batch_size=50, seed=seed).plan(step).keys
    }
    assert len(keys) == 4 * 4 * 50


def test_a_fixed_number_of_versions_repeats_the_keys() -> None:
    """With 2 versions, the third epoch has the keys of the first, in another order of the samples."""
    sampler = BatchSampler(num_samples=9, batch_size=4, seed=1)
    steps = range(6 * sampler.steps_per_epoch)
    two_versions = [sampler.plan(step, 2) for step in steps]
    unlimited = [sampler.plan(step, None) for step in steps]
    assert [plan.epoch for plan in two_versions] == [0, 0, 0, 1, 1, 1] * 3
    assert [plan.epoch for plan in unlimited] == [epoch for epoch in range(6) for _ in range(3)]
    for plan, unlimited_plan in zip(two_versions, unlimited, strict=True):
        assert np.array_equal(plan.indices, unlimited_plan.indices)

    def keys_of_epoch(epoch: int) -> set[tuple[int, int, int]]:
        plans = two_versions[3 * epoch : 3 * epoch + 3]
        return {
            (plan.epoch, int(index), key) for plan in plans for index, key in zip(plan.indices, plan.keys, strict=True)
        }

    assert keys_of_epoch(0) == keys_of_epoch(2)
    assert len(keys_of_epoch(0) | keys_of_epoch(1)) == 18


def test_every_sample_is_equally_likely_at_every_position() -> None:
    """Over 5000 epochs, each of 5 samples is at each position a fifth of the time, up to 5 standard deviations."""
    num_epochs = 5000
    orders = np.stack([epoch_order.__wrapped__(5, 1, epoch) for epoch in range(num_epochs)])
    standard_deviation = (num_epochs * 0.2 * 0.8) ** 0.5
    for sample in range(5):
        count_by_position = (orders == sample).sum(0)
        assert np.abs(count_by_position - num_epochs / 5).max() < 5 * standard_deviation


def test_the_order_is_the_same_everywhere() -> None:
    """The order must not change between processes or releases, since a resumed run relies on it."""
    assert epoch_order(8, 1, 0).tolist() == [4, 7, 3, 1, 0, 5, 2, 6]
    assert derive_seed(1, 2, 3) == 6520558355739401531
    code = "from heedful.data.sampler import epoch_order; print(epoch_order(8, 1, 0).tolist())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(epoch_order(8, 1, 0).tolist())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_derive_seed(numbers: list[int], other_numbers: list[int]) -> None:
    assert 0 <= derive_seed(*numbers) < 2**63
    assert (derive_seed(*numbers) == derive_seed(*other_numbers)) is (numbers == other_numbers)


@pytest.mark.parametrize(("count", "batch"), [(0, 1), (1, 0), (-3, 2)])
def test_a_sampler_needs_samples_and_a_batch_size(count: int, batch: int) -> None:
    with pytest.raises(HeedfulError, match=rf"^{count} samples in batches of {batch}: there must be one or more"):
        BatchSampler(num_samples=count, batch_size=batch, seed=0)
