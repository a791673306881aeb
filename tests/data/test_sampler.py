"""The order of samples: a permutation in each epoch, and a pure function of seed and epoch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.sampler import BatchSampler, derive_seed, epoch_order
from heedful.errors import HeedfulError

count, batch, seed, epoch = st.integers(1, 300), st.integers(1, 70), st.integers(0, 2**31), st.integers(0, 5)


@given(count, seed, epoch)
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 0  # it is kept for the next step


@given(count, batch, seed, epoch)
def test_batches_cover_each_epoch_once(count: int, batch: int, seed: int, epoch: int) -> None:
    sampler = BatchSampler(num_samples=count, batch_size=batch, seed=seed)
    plans = [
        sampler.plan(step) for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    ]
    assert {plan.epoch for plan in plans} == {epoch}
    assert [len(plan.indices) for plan in plans[:-1]] == [batch] * (sampler.steps_per_epoch - 1)
    assert 1 <= len(plans[-1].indices) <= batch
    assert np.array_equal(np.concatenate([plan.indices for plan in plans]), epoch_order(count, seed, epoch))


@given(count, batch, batch, seed, epoch)
def test_keys_do_not_depend_on_the_batch_size(count: int, one: int, other: int, seed: int, epoch: int) -> None:
    def keys(batch: int) -> dict[int, int]:
        sampler = BatchSampler(num_samples=count, batch_size=batch, seed=seed)
        plans = [
            sampler.plan(step) for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        ]
        return {int(n): key for plan in plans for n, key in zip(plan.indices, plan.keys, strict=True)}

    assert keys(one) == keys(other)
    assert len(set(keys(one).values())) == count


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


def test_versions_return_in_another_order() -> None:
    """The same samples, of the same epoch, with the same keys, however often they came."""
    sampler = BatchSampler(num_samples=9, batch_size=4, seed=1)
    every = [sampler.plan(step, versions) for versions in (2, None) for step in range(6 * sampler.steps_per_epoch)]
    static, dynamic = every[: len(every) // 2], every[len(every) // 2 :]
    assert [plan.epoch for plan in static] == [0, 0, 0, 1, 1, 1] * 3
    assert [plan.epoch for plan in dynamic] == [number for number in range(6) for _ in range(3)]
    assert all(np.array_equal(one.indices, other.indices) for one, other in zip(static, dynamic, strict=True))
    keys = [{(plan.epoch, int(n), key) for n, key in zip(plan.indices, plan.keys, strict=True)} for plan in static]
    one, two, three = (set().union(*keys[at : at + 3]) for at in (0, 3, 6))
    assert one == three and len(one | two) == 18


def test_every_place_is_as_likely() -> None:
    """Over many epochs each of 5 samples stands on each place a fifth of the time, give or take 5 deviations."""
    times = 5000
    places = np.stack([epoch_order.__wrapped__(5, 1, epoch) for epoch in range(times)])
    for number in range(5):
        counts = (places == number).sum(0)
        assert np.abs(counts - times / 5).max() < 5 * (times * 0.2 * 0.8) ** 0.5


def test_the_order_is_the_same_everywhere() -> None:
    """In another process, and in ten years: these numbers are a promise to runs that are resumed."""
    assert epoch_order(8, 1, 0).tolist() == [4, 7, 3, 1, 0, 5, 2, 6]
    assert derive_seed(1, 2, 3) == 6520558355739401531
    code = "from heedful.data.sampler import epoch_order; print(epoch_order(8, 1, 0).tolist())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(epoch_order(8, 1, 0).tolist())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_mixed_numbers_are_seeds(one: list[int], other: list[int]) -> None:
    assert 0 <= derive_seed(*one) < 2**63
    assert (derive_seed(*one) == derive_seed(*other)) is (one == other)


@pytest.mark.parametrize(("count", "batch"), [(0, 1), (1, 0), (-3, 2)])
def test_nothing_has_no_order(count: int, batch: int) -> None:
    with pytest.raises(HeedfulError, match=rf"^{count} samples in batches of {batch}: there must be one or more"):
        BatchSampler(num_samples=count, batch_size=batch, seed=0)
