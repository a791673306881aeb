"""A pool of tokenizing threads with a bounded queue, in which short texts overtake long ones."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from heedful.infer.scheduling.errors import DeadlineExceededError, QueueFullError, UnavailableError, public_error

TURN_CHARACTERS = 16_384  # maximum characters tokenized in one turn; a request with more is a long request
SPEED_DECAY = 0.9  # weight of earlier tasks in the measured speed, applied once for each new task
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class _Task:
    """A function to run, in one turn or (if it returns a generator) in several, and the future of its result."""

    function: Callable[[], object]
    future: Future[Any]
    characters: int  # characters of all its texts
    indivisible: bool  # whether one of its turns has more than TURN_CHARACTERS
    due: float  # time.monotonic() that orders the queue; the earliest runs first
    deadline: float  # time.monotonic() after which it takes no further turn
    is_disconnected: Callable[[], bool]  # whether its client disconnected
    generator: Generator[None, None, object] | None = None  # each step is a turn; None before the first turn
    seconds: float = 0.0  # duration of its turns so far
    order: int = 0  # number in the order of queueing, which decides between tasks with equal due times

    def __lt__(self, task: _Task) -> bool:
        """Return whether this task runs before another one."""
        return (self.due, self.order) < (task.due, task.order)


class TokenizerPool:
    """Threads that run tokenizing functions, those with the earliest due time first.

    If a function returns a generator, each step is a turn, and functions that are due earlier run between turns. A text
    of more than TURN_CHARACTERS is indivisible: one turn tokenizes it. Functions with such texts occupy at most all
    threads but one, so that short texts overtake them.
    """

    def __init__(self, threads: int, max_characters: int) -> None:
        """Start the threads.

        Args:
            threads: Number of threads.
            max_characters: Maximum of `queued_characters`, except that a single request may have more.
        """
        self.max_characters = max_characters
        self.queued_characters = 0  # characters of long requests that wait or are being tokenized
        self._divisible: list[_Task] = []  # heap of waiting tasks whose turns have at most TURN_CHARACTERS
        self._indivisible: list[_Task] = []  # heap of waiting tasks with a larger turn
        self._running_indivisible = 0  # indivisible tasks that run now
        self._max_indivisible = max(1, threads - 1)  # indivisible tasks that may run at once
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._measured_characters = 0.0  # characters of finished long requests, decayed by SPEED_DECAY
        self._measured_seconds = 0.0  # seconds that threads needed for them, decayed by SPEED_DECAY
        self._threads = [
            threading.Thread(target=self._work, name=f"heedful-tokens_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        function: Callable[[], T | Generator[None, None, T]],
        *,
        characters: int = 0,
        longest: int = 0,
        due: float = 0.0,
        deadline: float = math.inf,
        is_disconnected: Callable[[], bool] = lambda: False,
    ) -> Future[T]:
        """Queue a function and return the future of its result.

        Args:
            function: Returns the result, or a generator that yields after each turn and returns the result.
            characters: Characters of all texts that it tokenizes.
            longest: Characters of the longest of these texts, since one turn tokenizes a whole text.
            due: time.monotonic() that orders the queue; the earliest runs first.
            deadline: time.monotonic() after which the function takes no further turn.
            is_disconnected: Whether the client disconnected, after which the function takes no further turn.

        Raises:
            QueueFullError: If the request is long and too many characters of long requests are queued.
        """
        is_long = characters > TURN_CHARACTERS
        future: Future[T] = Future()
        task = _Task(
            function=function,
            future=future,
            characters=characters,
            indivisible=longest > TURN_CHARACTERS,
            due=due,
            deadline=deadline,
            is_disconnected=is_disconnected,
        )
        with self._changed:
            if is_long and self.queued_characters and self.queued_characters + characters > self.max_characters:
                raise QueueFullError("too many long texts are queued: try again later", self.estimated_wait())
            self.queued_characters += characters if is_long else 0
            self._push(task)
        if is_long:
            future.add_done_callback(lambda _: self._release(characters))
        return future

    def estimated_wait(self) -> float:
        """Estimate the seconds until all long requests that are queued now are tokenized."""
        seconds_per_character = self._measured_seconds / max(self._measured_characters, 1.0)
        return self.queued_characters * seconds_per_character / self._max_indivisible

    def close(self) -> None:
        """Stop the threads after their current turns. Tasks that have not started are cancelled; started ones fail."""
        with self._changed:
            self._closed = True
            tasks = [*self._divisible, *self._indivisible]
            self._divisible.clear()
            self._indivisible.clear()
            self._changed.notify_all()
        for task in tasks:
            self._abandon(task)

    def _abandon(self, task: _Task) -> None:
        """Cancel or fail the future of a task that takes no further turn because the pool is closed."""
        if not task.future.cancel():  # the task has started
            task.future.set_exception(UnavailableError("this server is stopping"))

    def _release(self, characters: int) -> None:
        """Stop counting the characters of a long request as queued."""
        with self._changed:
            self.queued_characters -= characters

    def _push(self, task: _Task) -> None:
        """Queue a task for its next turn. The caller holds the lock."""
        if self._closed:
            self._abandon(task)
            return
        task.order = next(self._order)
        heapq.heappush(self._indivisible if task.indivisible else self._divisible, task)
        self._changed.notify()

    def _pop(self) -> _Task | None:
        """Remove and return the next task that may run now; None if no task may run. The caller holds the lock."""
        heaps = [self._divisible]
        if self._running_indivisible < self._max_indivisible:
            heaps.append(self._indivisible)
        heap = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return None if heap is None else heapq.heappop(heap)

    def _work(self) -> None:
        """Run turns of tasks until the pool is closed; the body of each thread."""
        while True:
            with self._changed:
                while (task := self._pop()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                self._running_indivisible += task.indivisible
            start = time.monotonic()
            done = self._run_turn(task)
            task.seconds += time.monotonic() - start
            with self._changed:
                self._running_indivisible -= task.indivisible
                if not done:
                    self._push(task)
                elif task.characters > TURN_CHARACTERS and not task.future.cancelled():
                    self._measured_characters = SPEED_DECAY * self._measured_characters + task.characters
                    self._measured_seconds = SPEED_DECAY * self._measured_seconds + task.seconds
                if task.indivisible:
                    self._changed.notify()  # another indivisible task may run
            del task  # frees its texts while the thread waits

    def _run_turn(self, task: _Task) -> bool:
        """Run one turn of a task; return whether the task is done, and with it its future."""
        is_first = task.generator is None
        if is_first:
            if task.is_disconnected():
                task.future.cancel()
            if not task.future.set_running_or_notify_cancel():
                return True
        try:
            if time.monotonic() >= task.deadline or (not is_first and task.is_disconnected()):
                raise DeadlineExceededError("the deadline passed before the request was tokenized")
            if task.generator is None:
                result = task.function()
                if not isinstance(result, Generator):
                    task.future.set_result(result)
                    return True
                task.generator = result
            next(task.generator)
            return False
        except StopIteration as stop:
            task.future.set_result(stop.value)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                task.future.set_exception(public_error(error))
        return True
