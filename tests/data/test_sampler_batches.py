"""How a step is cut: everything once, the same each time, within the budget, groups whole."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from heedful.data.sampler import assign_to_ranks, group, split_microbatches

sizes = st.lists(st.integers(0, 60), max_size=40)


@given(st.integers(0, 80), st.integers(1, 20))
def test_units_keep_neighbours_together(count: int, together: int) -> None:
    groups = group(count, together)
    assert list(chain(*groups)) == list(range(count))
    assert all(len(unit) == together for unit in groups[:-1]) and all(groups)


@given(sizes, st.integers(1, 9))
def test_shares_cover_all_once_and_are_alike(sizes: list[int], ranks: int) -> None:
    shares = assign_to_ranks(sizes, ranks)
    assert len(shares) == ranks and sorted(chain(*shares)) == list(range(len(sizes)))
    assert all(numbers == sorted(numbers) for numbers in shares)
    assert shares == assign_to_ranks(list(sizes), ranks)
    loads = [sum(sizes[number] for number in numbers) for numbers in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(sizes, st.integers(1, 100))
def test_micro_batches_keep_the_budget(sizes: list[int], budget: int) -> None:
    microbatches = split_microbatches(sizes, budget)
    assert sorted(chain(*microbatches)) == list(range(len(sizes)))
    assert microbatches == split_microbatches(list(sizes), budget)
    for batch in microbatches:
        assert batch == sorted(batch) and batch
        assert sum(sizes[number] for number in batch) <= budget or len(batch) == 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 100))
def test_there_are_few_micro_batches(sizes: list[int], budget: int) -> None:
    """Where no unit exceeds the budget, half-full batches cannot be the rule."""
    assert len(split_microbatches(sizes, budget)) <= max(1, 2 * sum(sizes) / budget + 1)


@given(st.integers(0, 50), st.integers(1, 7), st.integers(1, 5), st.integers(1, 60), st.data())
def test_groups_are_never_parted(count: int, together: int, ranks: int, budget: int, data: st.DataObject) -> None:
    """As the trainer does it: samples to units, units to ranks, a rank's units to micro-batches."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    groups = group(count, together)
    loads = [sum(lengths[number] for number in group) for group in groups]
    seen = []
    for mine in assign_to_ranks(loads, ranks):
        for batch in split_microbatches([loads[unit] for unit in mine], budget):
            members = [groups[mine[place]] for place in batch]
            assert all(len(group) == together for group in members[:-1])  # only the last may be smaller
            seen += members
    assert sorted(chain(*seen)) == list(range(count))
