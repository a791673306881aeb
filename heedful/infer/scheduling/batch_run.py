"""One batch on the engine thread: run in slices, and again in parts where one of its inputs makes it fail."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from heedful.infer.finite import scores_are_finite
from heedful.infer.scheduling.errors import DeadlineExceededError, InferenceFailedError, public_error
from heedful.infer.scheduling.limits import QueueCounters
from heedful.model.decode import Decoding

# pieces -> their scores, or a decoding that is to be stepped
ScoreBatch = Callable[[list[Any]], Sequence[object] | Decoding]


@dataclass(kw_only=True, eq=False)
class PendingRequest:
    """A request: its pieces are in a heap, or in a batch, or have their scores."""

    model_queue: Any  # a ModelQueue, whose module imports this one
    engine: object
    deadline: float  # by the event loop's clock, which is time.monotonic
    future: asyncio.Future[Any]
    gone: Callable[[], bool]  # whether whoever asked has left, which may be so before the event loop hears of it
    finish: Callable[[list[object]], object] = lambda scores: scores  # all scores, in order -> what the future gets
    scores: list[object] = field(default_factory=list)
    left: int = 0  # pieces without scores
    waiting: int = 0  # tokens of it that wait
    dead: bool = False  # nobody waits for it, or it failed
    error: Exception | None = None

    def let_go(self) -> None:
        """Whoever asked has left, and the event loop may not hear of it by itself before the deadline."""
        self.dead = True
        with contextlib.suppress(RuntimeError):  # that loop was closed
            self.future.get_loop().call_soon_threadsafe(self.future.cancel)

    def abandoned(self, now: float) -> bool:
        """Whether nobody waits for it any more."""
        if self.dead or now >= self.deadline:
            return True
        if self.gone():
            self.let_go()
        return self.dead


class QueuedChunk(NamedTuple):
    """A piece that waits; items are in order of `due`."""

    due: float
    order: int  # no two are the same
    size: int
    job: PendingRequest
    place: int  # in the job's scores
    piece: object
    key: object  # pieces of the same key go into one batch
    run: ScoreBatch
    sliced: bool  # whether `run` makes a decoding


Ended = tuple[PendingRequest, object, Exception | None]  # with its answers, or what went wrong
Scored = tuple[QueuedChunk, object, Exception | None]


class BatchRun:
    """A batch that was taken up. A decoding is resumed where its last slice ended; anything else is one slice."""

    def __init__(self, items: list[QueuedChunk], counts: QueueCounters) -> None:
        self.items = items
        self.size = sum(item.size for item in items)
        self.due = min(item.due for item in items)
        self.sliced = items[0].sliced
        self.begun = False
        self.seconds = 0.0  # of the engine thread, so far
        self._counts = counts
        self._decoding: Decoding | None = None
        self._until = 0.0
        self._scored = self._isolated(items)

    @property
    def left(self) -> float:
        """About how many of its tokens are not written yet."""
        if self._decoding is None or not self._decoding.max_new_tokens:
            return self.size
        return self.size * (1 - self._decoding.steps / self._decoding.max_new_tokens)

    def advance(self, until: float) -> tuple[list[Ended], bool]:
        """Work until the clock says `until`; returns the requests that ended, and whether the batch has."""
        self.begun = True
        self._until = until
        ended: list[Ended] = []
        for scored in self._scored:
            if scored is None:
                return ended, False
            ended += self._settled(*scored)
        return ended, True

    def _settled(self, item: QueuedChunk, scores: object, error: Exception | None) -> list[Ended]:
        """Keep the scores of an item; its request, if it ended by it."""
        job = item.job
        if job.error is not None:
            return []
        job.scores[item.place], job.left, job.error = scores, job.left - 1, error
        if error is not None:
            self._counts.failed += isinstance(error, InferenceFailedError)  # others tell what a person can mend
            job.dead = True  # its other pieces are in vain
            return [(job, None, error)]
        if job.left or job.dead:
            return []
        try:
            return [(job, job.finish(job.scores), None)]
        except BaseException as wrong:
            error = public_error(wrong)
            self._counts.failed += isinstance(error, InferenceFailedError)
            return [(job, None, error)]

    def _isolated(self, items: list[QueuedChunk]) -> Iterator[Scored | None]:
        """Scores of each item, or why it has none; None where a slice ends.

        An item that fails costs the others at most log2(n) + 1 runs more.
        """
        groups, first = [items], True
        while groups:
            group = groups.pop()
            alone = len(group) == 1
            group, error = yield from self._tried(group, first)
            first = False
            if error is None:
                continue
            suspects, rest = group, []  # one of the suspects makes it fail
            while len(suspects) > 1:
                half, second_half = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
                failed, wrong = yield from self._tried(half, False)
                if wrong is None:
                    suspects = second_half
                else:
                    suspects, error = failed, wrong
                    rest += second_half
            if rest or alone:
                yield suspects[0], None, error
            else:
                groups.append(suspects)  # all others went well: it may do so alone
            if rest:
                groups.append(rest)

    def _tried(
        self, group: list[QueuedChunk], first: bool
    ) -> Generator[Scored | None, None, tuple[list[QueuedChunk], Exception | None]]:
        """Run a group; returns the items that failed together, and why."""
        now = time.monotonic()
        if all(item.job.abandoned(now) for item in group):  # nobody waits for what made it fail, either
            for item in group:
                yield item, None, _expired()
            return [], None
        self._counts.retries += not first
        try:
            outcome = group[0].run([item.piece for item in group])
            finished: Mapping[int, object] = {} if isinstance(outcome, Decoding) else dict(enumerate(outcome))
            assert isinstance(outcome, Decoding) or len(finished) == len(group)
        except BaseException as error:
            return group, public_error(error)
        waiting = dict(enumerate(group))
        for number, scores in finished.items():
            yield _checked(waiting.pop(number), scores)
        self._decoding = outcome if isinstance(outcome, Decoding) else None
        while self._decoding is not None and not self._decoding.done:
            try:
                finished = self._decoding.step()  # at least one in each slice
            except BaseException as error:
                return list(waiting.values()), public_error(error)
            for number, scores in finished.items():
                yield _checked(waiting.pop(number), scores)
            if self._decoding.done or time.monotonic() < self._until:
                continue
            yield None
            now = time.monotonic()
            for number in [number for number, item in waiting.items() if item.job.abandoned(now)]:
                self._decoding.cancel([number])
                yield waiting.pop(number), None, _expired()
        return [], None


def _checked(item: QueuedChunk, scores: object) -> Scored:
    return item, scores, None if scores_are_finite(scores) else InferenceFailedError("its scores are not finite")


def _expired() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before the answer was there")


def deliver(ended: list[Ended]) -> None:
    """Wake who waits, in one call for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Ended]] = {}
    for outcome in ended:
        loops.setdefault(outcome[0].future.get_loop(), []).append(outcome)
    for loop, mine in loops.items():
        with contextlib.suppress(RuntimeError):  # that loop was closed
            loop.call_soon_threadsafe(_settle, mine)


def _settle(ended: list[Ended]) -> None:
    for job, value, error in ended:
        if job.future.done():
            continue
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(value)
