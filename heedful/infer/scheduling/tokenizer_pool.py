"""Threads that tokenise: short texts pass long ones, long texts take several turns, and what waits is bounded."""

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

TURN_CHARACTERS = 16_384  # characters that are tokenised in one turn; a request of more counts as long
T = TypeVar("T")
DECAY = 0.9  # of characters and seconds in the threads' speed, after each task


@dataclass(kw_only=True, eq=False)
class _Task:
    function: Callable[[], object]
    future: Future[Any]
    characters: int
    whole: bool  # whether one of its turns may take more than TURN characters
    deadline: float
    left: Callable[[], bool]
    turns: Generator[None, None, object] | None = None  # what is left of it after its first turn
    seconds: float = 0.0


class TokenizerPool:
    """A pool of tokenising threads with a queue in order of due time.

    A function may be, or return, a generator: then each of its parts is a turn, and what is due earlier slips in
    between. Texts that cannot be tokenised in parts occupy all threads but one, so that short texts pass them.
    """

    def __init__(self, threads: int, most: int) -> None:
        """`most` bounds the characters of long requests (more than TURN characters) that wait or are tokenised."""
        self.most = most
        self.characters = 0  # of long requests that wait or are tokenised
        self._short: list[tuple[float, int, _Task]] = []
        self._whole: list[tuple[float, int, _Task]] = []  # tasks with turns of more than TURN characters
        self._wholes = 0
        self._wholes_most = max(1, threads - 1)
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._read = 0.0  # characters, and the seconds for them, the latest counting most
        self._took = 0.0  # characters, and the seconds for them, the latest counting most
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
        left: Callable[[], bool] = lambda: False,
    ) -> Future[T]:
        """Run it in its turn. `longest` is the most characters of it that are tokenised at once.

        Raises Full if too many characters of long requests wait. A task whose deadline passed, or whose client has
        `left`, takes no further turn.
        """
        long = characters > TURN_CHARACTERS
        future: Future[T] = Future()
        task = _Task(
            function=function,
            future=future,
            characters=characters,
            whole=longest > TURN_CHARACTERS,
            deadline=deadline,
            left=left,
        )
        with self._changed:
            if long and self.characters and self.characters + characters > self.most:
                raise QueueFullError("too many long texts wait already; try again later", self.wait())
            self.characters += characters if long else 0
            self._push(due, task)
        if long:
            future.add_done_callback(lambda _: self._give_back(characters))
        return future

    def wait(self) -> float:
        """In about how many seconds all long requests that wait now will have been tokenised."""
        return self.characters * self._took / max(self._read, 1.0) / self._wholes_most

    def close(self) -> None:
        """End the threads after their turns; what waits is cancelled."""
        with self._changed:
            self._closed = True
            tasks = [task for _, _, task in (*self._short, *self._whole)]
            self._short.clear()
            self._whole.clear()
            self._changed.notify_all()
        for task in tasks:
            task.future.cancel()

    def _give_back(self, characters: int) -> None:
        with self._changed:
            self.characters -= characters

    def _push(self, due: float, task: _Task) -> None:
        if self._closed:
            if not task.future.cancel():
                task.future.set_exception(UnavailableError("this server is stopping"))
            return
        heapq.heappush(self._whole if task.whole else self._short, (due, next(self._order), task))
        self._changed.notify()

    def _pop(self) -> tuple[float, _Task] | None:
        """The task that is due first, among those that a free thread may take."""
        heaps = [self._short] if self._wholes >= self._wholes_most else [self._short, self._whole]
        heap = min((heap for heap in heaps if heap), key=lambda tasks: tasks[0][:2], default=None)
        if heap is None:
            return None
        due, _, task = heapq.heappop(heap)
        return due, task

    def _work(self) -> None:
        while True:
            with self._changed:
                while (popped := self._pop()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                due, task = popped
                self._wholes += task.whole
            start = time.monotonic()
            ended = self._turn(task)
            task.seconds += time.monotonic() - start
            with self._changed:
                self._wholes -= task.whole
                if not ended:
                    self._push(due, task)
                elif task.characters > TURN_CHARACTERS and not task.future.cancelled():
                    self._read = DECAY * self._read + task.characters
                    self._took = DECAY * self._took + task.seconds
                if task.whole:
                    self._changed.notify()  # another one may begin
            del task, popped  # what was read is not kept while the thread sleeps

    def _turn(self, task: _Task) -> bool:
        """Take one turn of a task; whether it has ended."""
        if task.turns is None and task.left():
            task.future.cancel()
        if task.turns is None and not task.future.set_running_or_notify_cancel():
            return True
        try:
            if time.monotonic() >= task.deadline or (task.turns is not None and task.left()):
                raise DeadlineExceededError("the deadline passed before the request was read")
            if task.turns is None:
                result = task.function()
                if not isinstance(result, Generator):
                    task.future.set_result(result)
                    return True
                task.turns = result
            next(task.turns)
            return False
        except StopIteration as stop:
            task.future.set_result(stop.value)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                task.future.set_exception(public_error(error))
        return True
