"""How a step is cut: samples to ranks of like load, and a rank's samples to micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def units(count: int, together: int) -> list[list[int]]:
    """Numbers below `count` in groups that stay together.

    >>> units(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + together, count))) for start in range(0, count, together)]


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the units that each rank takes: the largest first, each to the rank that has least so far.

    >>> share([5, 1, 4, 3], 2)
    [[0, 1], [2, 3]]
    """
    loads, taken = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        taken[rank].append(number)
    return [sorted(numbers) for numbers in taken]


def cut(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Units in as few micro-batches as their tokens need, of about equal load; one unit may exceed the budget alone.

    >>> cut([3, 3, 3, 9], 8)
    [[3], [0, 2], [1]]
    """
    count = max(1, -(-sum(sizes) // budget))
    while True:
        batches = [batch for batch in share(sizes, count) if batch]
        loads = [sum(sizes[number] for number in batch) for batch in batches]
        if all(load <= budget or len(batch) == 1 for load, batch in zip(loads, batches, strict=True)):
            return batches
        count += 1
