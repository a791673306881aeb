"""How the samples of a step are grouped, assigned to ranks and split into micro-batches within a token budget."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from heedful.data.sampler import assign_to_ranks, group, split_microbatches

sizes = st.lists(st.integers(0, 60), max_size=40)


@given(st.integers(0, 80), st.integers(1, 20))
def test_groups_are_of_consecutive_samples(count: int, group_size: int) -> None:
    groups = group(count, group_size)
    assert list(chain(*groups)) == list(range(count))
    assert all(len(members) == group_size for members in groups[:-1]) and all(groups)


@given(sizes, st.integers(1, 9))
def test_ranks_get_disjoint_and_similar_loads(sizes: list[int], ranks: int) -> None:
    shares = assign_to_ranks(sizes, ranks)
    assert len(shares) == ranks and sorted(chain(*shares)) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    assert shares == assign_to_ranks(list(sizes), ranks)
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(sizes, st.integers(1, 100))
def test_micro_batches_stay_within_the_budget(sizes: list[int], budget: int) -> None:
    microbatches = split_microbatches(sizes, budget)
    assert sorted(chain(*microbatches)) == list(range(len(sizes)))
    assert microbatches == split_microbatches(list(sizes), budget)
    for batch in microbatches:
        assert batch == sorted(batch) and batch
        assert sum(sizes[index] for index in batch) <= budget or len(batch) == 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 100))
def test_there_are_few_micro_batches(sizes: list[int], budget: int) -> None:
    """If no size exceeds the budget, micro-batches are at least half full on average."""
    assert len(split_microbatches(sizes, budget)) <= max(1, 2 * sum(sizes) / budget + 1)


@given(st.integers(0, 50), st.integers(1, 7), st.integers(1, 5), st.integers(1, 60), st.data())
def test_a_group_is_never_split_between_micro_batches(
    count: int, group_size: int, ranks: int, budget: int, data: st.DataObject
) -> None:
    """Like the trainer, it groups samples, assigns groups to ranks and splits those of a rank into micro-batches."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    groups = group(count, group_size)
    loads = [sum(lengths[sample] for sample in members) for members in groups]
    groups_in_batches = []
    for groups_of_rank in assign_to_ranks(loads, ranks):
        loads_of_rank = [loads[index] for index in groups_of_rank]
        for batch in split_microbatches(loads_of_rank, budget):
            groups_of_batch = [groups[groups_of_rank[position]] for position in batch]
            assert all(len(members) == group_size for members in groups_of_batch[:-1])  # the last may be smaller
            groups_in_batches += groups_of_batch
    assert sorted(chain(*groups_in_batches)) == list(range(count))
