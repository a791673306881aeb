"""The tokenizer pool: order, turns, bounds, and tasks that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.infer.scheduling.errors import (
    DeadlineExceededError,
    InferenceFailedError,
    QueueFullError,
    UnavailableError,
)
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS, TokenizerPool


@pytest.fixture
def make_pool() -> Iterator[Callable[..., TokenizerPool]]:
    """Make pools that are closed afterwards."""
    pools: list[TokenizerPool] = []

    def make(threads: int = 1, max_characters: int = 10 * TURN_CHARACTERS) -> TokenizerPool:
        pools.append(TokenizerPool(threads, max_characters))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def held(pool: TokenizerPool, **more: Any) -> threading.Event:
    """One of the threads is busy until this is set."""
    go, busy = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        assert go.wait(20)

    pool.submit(wait, **more)
    assert busy.wait(20)
    return go


def test_what_is_due_first_is_read_first(make_pool: Any) -> None:
    pool, order = make_pool(), []
    go = held(pool)
    futures = [pool.submit(lambda due=due: order.append(due), due=due) for due in (3.0, 1.0, 2.0, 1.0)]
    go.set()
    for future in futures:
        future.result(20)
    assert order == [1.0, 1.0, 2.0, 3.0]


def test_short_ones_slip_in_between_the_turns_of_a_long_one(make_pool: Any) -> None:
    pool, order = make_pool(), []
    begun, go = threading.Event(), threading.Event()

    def long() -> Generator[None, None, str]:
        for turn in range(4):
            order.append(f"long {turn}")
            begun.set()
            assert go.wait(20)
            yield
        return "read"

    future = pool.submit(long, characters=4 * TURN_CHARACTERS, longest=TURN_CHARACTERS, due=9.0)
    assert begun.wait(20)
    short = pool.submit(lambda: order.append("short"), characters=5, due=1.0)
    go.set()
    assert future.result(20) == "read" and short.done()
    assert order == ["long 0", "short", "long 1", "long 2", "long 3"]


def test_texts_that_cannot_be_divided_leave_a_thread_to_others(make_pool: Any) -> None:
    pool = make_pool(3)
    gates = [held(pool, characters=2 * TURN_CHARACTERS, longest=2 * TURN_CHARACTERS) for _ in range(2)]
    third = pool.submit(lambda: "long", characters=2 * TURN_CHARACTERS, longest=2 * TURN_CHARACTERS)
    for _ in range(5):
        assert pool.submit(lambda: "short", due=1e9).result(20) == "short"
    assert not third.running() and not third.done()
    gates[0].set()
    assert third.result(20) == "long"
    gates[1].set()


def test_characters_of_long_requests_are_bounded(make_pool: Any) -> None:
    pool = make_pool(2, 5 * TURN_CHARACTERS)
    go = held(pool, characters=3 * TURN_CHARACTERS)
    waits = pool.submit(lambda: None, characters=2 * TURN_CHARACTERS)
    with pytest.raises(QueueFullError) as caught:
        pool.submit(lambda: None, characters=TURN_CHARACTERS + 1)
    assert caught.value.retry >= 0
    assert pool.submit(lambda: "short", characters=TURN_CHARACTERS).result(20) == "short"
    go.set()
    waits.result(20)
    end = time.monotonic() + 20
    while pool.queued_characters and time.monotonic() < end:
        time.sleep(0.001)
    assert pool.queued_characters == 0
    assert (
        pool.submit(lambda: "alone", characters=100 * TURN_CHARACTERS).result(20) == "alone"
    )  # where nothing else waits


def test_nothing_is_read_for_nobody(make_pool: Any) -> None:
    pool, read = make_pool(), []
    go = held(pool)
    cancelled = pool.submit(lambda: read.append("cancelled"), characters=2 * TURN_CHARACTERS)
    left = pool.submit(lambda: read.append("left"), is_disconnected=lambda: True)
    late = pool.submit(lambda: read.append("late"), deadline=time.monotonic())
    assert cancelled.cancel() and pool.queued_characters == 0
    go.set()
    with pytest.raises(DeadlineExceededError):
        late.result(20)
    with pytest.raises(CancelledError):
        left.result(20)
    assert not read
    gone = threading.Event()

    def turns() -> Generator[None, None, None]:
        for _ in range(3):
            read.append("turn")
            gone.set()
            yield

    with pytest.raises(DeadlineExceededError):
        pool.submit(turns, is_disconnected=gone.is_set).result(20)
    assert read == ["turn"]


def test_errors_are_told_and_the_threads_live(make_pool: Any) -> None:
    pool = make_pool()

    def wrong(error: BaseException) -> Generator[None, None, None]:
        yield
        raise error

    with pytest.raises(HeedfulError, match="the askers"):
        pool.submit(lambda: wrong(HeedfulError("the askers"))).result(20)
    with pytest.raises(InferenceFailedError):
        pool.submit(lambda: wrong(BaseException("a panic"))).result(20)
    assert pool.submit(lambda: 1).result(20) == 1


def test_what_waits_when_it_closes_is_cancelled(make_pool: Any) -> None:
    pool = make_pool()
    go = held(pool)
    future = pool.submit(lambda: None)
    pool.close()
    go.set()
    assert future.cancelled() and pool.submit(lambda: None).cancelled()


def test_a_task_between_two_turns_fails_when_the_pool_closes(make_pool: Any) -> None:
    pool = make_pool()
    begun, blocker_queued, blocker_runs, end = (threading.Event() for _ in range(4))

    def turns() -> Generator[None, None, None]:
        begun.set()
        assert blocker_queued.wait(20)
        yield

    def block() -> None:
        blocker_runs.set()
        assert end.wait(20)

    future = pool.submit(turns, characters=2 * TURN_CHARACTERS, due=9.0)
    assert begun.wait(20)
    pool.submit(block, due=1.0)
    blocker_queued.set()
    assert blocker_runs.wait(20)
    pool.close()
    end.set()
    with pytest.raises(UnavailableError, match="this server is stopping"):
        future.result(0)
    assert pool.queued_characters == 0
