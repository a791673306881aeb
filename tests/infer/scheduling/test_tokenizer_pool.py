"""The tokenizer pool: order, turns, limits, and tasks that were cancelled or expired."""

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
    """Make pools, which are closed after the test."""
    pools: list[TokenizerPool] = []

    def make(threads: int = 1, max_characters: int = 10 * TURN_CHARACTERS) -> TokenizerPool:
        pools.append(TokenizerPool(threads, max_characters))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def occupy_thread(pool: TokenizerPool, **options: Any) -> threading.Event:
    """Occupy a thread of the pool until the returned event is set."""
    release, busy = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        assert release.wait(20)

    pool.submit(wait, **options)
    assert busy.wait(20)
    return release


def test_tasks_run_in_the_order_of_their_due_times(make_pool: Any) -> None:
    pool, order = make_pool(), []
    release = occupy_thread(pool)
    futures = [pool.submit(lambda due=due: order.append(due), due=due) for due in (3.0, 1.0, 2.0, 1.0)]
    release.set()
    for future in futures:
        future.result(20)
    assert order == [1.0, 1.0, 2.0, 3.0]


def test_short_tasks_run_between_the_turns_of_a_long_one(make_pool: Any) -> None:
    pool, order = make_pool(), []
    started, release = threading.Event(), threading.Event()

    def long() -> Generator[None, None, str]:
        for turn in range(4):
            order.append(f"long {turn}")
            started.set()
            assert release.wait(20)
            yield
        return "tokenized"

    future = pool.submit(long, characters=4 * TURN_CHARACTERS, longest=TURN_CHARACTERS, due=9.0)
    assert started.wait(20)
    short = pool.submit(lambda: order.append("short"), characters=5, due=1.0)
    release.set()
    assert future.result(20) == "tokenized" and short.done()
    assert order == ["long 0", "short", "long 1", "long 2", "long 3"]


def test_indivisible_tasks_leave_a_thread_to_others(make_pool: Any) -> None:
    pool = make_pool(3)
    releases = [occupy_thread(pool, characters=2 * TURN_CHARACTERS, longest=2 * TURN_CHARACTERS) for _ in range(2)]
    third = pool.submit(lambda: "long", characters=2 * TURN_CHARACTERS, longest=2 * TURN_CHARACTERS)
    for _ in range(5):
        assert pool.submit(lambda: "short", due=1e9).result(20) == "short"
    assert not third.running() and not third.done()
    releases[0].set()
    assert third.result(20) == "long"
    releases[1].set()


def test_characters_of_long_requests_are_bounded(make_pool: Any) -> None:
    pool = make_pool(2, 5 * TURN_CHARACTERS)
    release = occupy_thread(pool, characters=3 * TURN_CHARACTERS)
    waiting = pool.submit(lambda: None, characters=2 * TURN_CHARACTERS)
    with pytest.raises(QueueFullError) as raised:
        pool.submit(lambda: None, characters=TURN_CHARACTERS + 1)
    assert raised.value.retry >= 0
    assert pool.submit(lambda: "short", characters=TURN_CHARACTERS).result(20) == "short"
    release.set()
    waiting.result(20)
    end = time.monotonic() + 20
    while pool.queued_characters and time.monotonic() < end:
        time.sleep(0.001)
    assert pool.queued_characters == 0
    longer_than_the_limit = pool.submit(lambda: "accepted", characters=100 * TURN_CHARACTERS)  # nothing else waits
    assert longer_than_the_limit.result(20) == "accepted"


def test_cancelled_and_expired_tasks_take_no_turn(make_pool: Any) -> None:
    pool, log = make_pool(), []
    release = occupy_thread(pool)
    cancelled = pool.submit(lambda: log.append("cancelled"), characters=2 * TURN_CHARACTERS)
    left = pool.submit(lambda: log.append("left"), is_disconnected=lambda: True)
    late = pool.submit(lambda: log.append("late"), deadline=time.monotonic())
    assert cancelled.cancel() and pool.queued_characters == 0
    release.set()
    with pytest.raises(DeadlineExceededError):
        late.result(20)
    with pytest.raises(CancelledError):
        left.result(20)
    assert not log
    disconnected = threading.Event()

    def turns() -> Generator[None, None, None]:
        for _ in range(3):
            log.append("turn")
            disconnected.set()
            yield

    with pytest.raises(DeadlineExceededError):
        pool.submit(turns, is_disconnected=disconnected.is_set).result(20)
    assert log == ["turn"]


def test_errors_are_raised_by_the_future_and_threads_continue(make_pool: Any) -> None:
    pool = make_pool()

    def raise_in_second_turn(error: BaseException) -> Generator[None, None, None]:
        yield
        raise error

    with pytest.raises(HeedfulError, match="invalid"):
        pool.submit(lambda: raise_in_second_turn(HeedfulError("invalid"))).result(20)
    with pytest.raises(InferenceFailedError):
        pool.submit(lambda: raise_in_second_turn(BaseException("a panic"))).result(20)
    assert pool.submit(lambda: 1).result(20) == 1


def test_waiting_tasks_are_cancelled_when_the_pool_closes(make_pool: Any) -> None:
    pool = make_pool()
    release = occupy_thread(pool)
    future = pool.submit(lambda: None)
    pool.close()
    release.set()
    assert future.cancelled() and pool.submit(lambda: None).cancelled()


def test_a_task_between_two_turns_fails_when_the_pool_closes(make_pool: Any) -> None:
    pool = make_pool()
    started, blocker_queued, blocker_runs, end = (threading.Event() for _ in range(4))

    def turns() -> Generator[None, None, None]:
        started.set()
        assert blocker_queued.wait(20)
        yield

    def block() -> None:
        blocker_runs.set()
        assert end.wait(20)

    future = pool.submit(turns, characters=2 * TURN_CHARACTERS, due=9.0)
    assert started.wait(20)
    pool.submit(block, due=1.0)
    blocker_queued.set()
    assert blocker_runs.wait(20)
    pool.close()
    end.set()
    with pytest.raises(UnavailableError, match="this server is stopping"):
        future.result(0)
    assert pool.queued_characters == 0
