"""Queue: the requests of many clients become batches for one engine thread, by deadline and size, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from heedful.infer.caps import Caps, Counts, Steps, size_of
from heedful.infer.engine import Asked, Piece
from heedful.infer.finite import finite
from heedful.infer.refused import Expired, Failed, Full, TooLong, Unavailable, told
from heedful.tasks import Answer, Writing
from heedful.tasks.base import Vain

PACE = 0.001  # seconds after its arrival at which a request's token is due: what is short goes before what is long
AGED = 0.5  # the share of its time after which a request is due whatever its length: so long ones are not starved
LOOK = 64  # waiting pieces that are passed over to fill a batch
SHARE = 0.5  # of the time that the most urgent request of a batch has left, for the batch
SURE = 0.5  # of a request's time, in which it has to be expected to be answered, or it is refused
FULL = 0.25  # the share of the budget from which a first batch tells the engine's speed; a small one is slow to begin
KEPT = 0.9  # of tokens and seconds, in the engine's speed, after each batch


@dataclass(kw_only=True, eq=False)
class _Job:
    """A request: its pieces are in a heap, or in a batch, or have their scores."""

    lane: Lane
    engine: Any
    deadline: float  # by the event loop's clock, which is time.monotonic
    future: asyncio.Future[Any]
    gone: Callable[[], bool]  # whether whoever asked has left, which may be so before the event loop hears of it
    finish: Callable[[list[Any]], Any]  # all scores, in order -> what the future gets
    scores: list[Any]
    left: int  # pieces without scores
    waiting: int = 0  # tokens of it that wait
    dead: bool = False  # nobody waits for it, or it failed
    error: Exception | None = None

    def let_go(self) -> None:
        """Whoever asked has left, and the event loop may not hear of it by itself before the deadline."""
        self.dead = True
        with contextlib.suppress(RuntimeError):  # that loop was closed
            self.future.get_loop().call_soon_threadsafe(self.future.cancel)


_Runs = Callable[[list[Any], Vain], list[Any]]


class _Item(NamedTuple):
    """A piece that waits; items are in order of `due`."""

    due: float
    order: int  # no two are the same
    size: int
    job: _Job
    place: int  # in the job's scores
    piece: Any
    key: Any  # pieces of the same key go into one batch
    run: _Runs


_Ended = tuple[_Job, Any, Exception | None]  # with its answers, or what went wrong
_Scored = tuple[_Item, Any, Exception | None]
_Part = tuple[int, Any, Any, _Runs]  # of a request: size, piece, key, run


class Lane:
    """One model's place in the queue. `engine` may be exchanged at any time: each request ends with what it began."""

    def __init__(self, queue: Queue, engine: Steps | None) -> None:
        self.queue, self.engine = queue, engine
        self.heap: list[_Item] = []
        self.used = 0.0  # seconds of the engine thread, by which lanes take turns
        self.waiting = 0  # tokens
        self.lately = self.took = 0.0  # tokens, and the seconds for them, the latest counting most

    @property
    def rate(self) -> float:
        """Tokens a second; infinite where too little was read yet."""
        return self.lately / self.took if self.took else math.inf

    async def ask(
        self,
        inputs: Sequence[Any],
        *,
        deadline: float,
        left: Callable[[], bool] = lambda: False,
        encode: Callable[[Any, Sequence[Any]], list[Asked]] = lambda engine, inputs: engine.encode(inputs),
        top_k: int = 5,
        writing: Writing | None = None,
    ) -> tuple[list[Answer], int]:
        """The answers, as the engine alone would give them, and how many tokens were read for them.

        `left` tells, to any thread and at once, whether whoever asked has gone: then no batch takes it, and this is
        cancelled. `encode` makes windows of the inputs, and may refuse them.
        """
        async with self._entered(deadline) as (engine, jobs):
            self.queue._refuse_late(self, 0, deadline)  # however short it is: no word of it needs to be looked up
            asked = await self._in_reader(lambda: encode(engine, inputs))
            pieces = [piece for each in asked for piece in each.pieces]

            def finish(scores: list[Any]) -> list[Answer]:
                made = iter(scores)
                return [engine.answer(each, [next(made) for _ in each.pieces], top_k=top_k) for each in asked]

            if not pieces:
                answers: list[Answer] = _careful(lambda: finish([]))
                return answers, 0
            job = self._job(engine, deadline, left, finish, len(pieces))
            jobs.append(job)

            def run(batch: list[Piece], vain: Vain) -> list[Any]:
                return engine.score(batch, writing, top_k=top_k, vain=vain)

            key = id(engine), top_k, writing
            parts = [(size_of(len(each.encoded), writing), each, (*key, id(each.answerer)), run) for each in pieces]
            more = "" if writing is None else ", with all that may be written after them"
            self.queue._add(job, parts, more)
            return await job.future, sum(len(each.encoded) for each in pieces)

    async def call(
        self, function: Callable[[Any], Any], *, tokens: int, deadline: float, left: Callable[[], bool] = lambda: False
    ) -> Any:
        """function(engine), run by the engine thread in its turn as if it were that many tokens."""
        async with self._entered(deadline) as (engine, jobs):
            job = self._job(engine, deadline, left, lambda scores: scores[0], 1)
            jobs.append(job)
            self.queue._add(job, [(tokens, engine, object(), lambda batch, _: [function(batch[0])])])
            return await job.future

    async def read(self, function: Callable[[Any], Any], *, deadline: float) -> Any:
        """function(engine), run by a thread of those that tokenise."""
        async with self._entered(deadline) as (engine, _):
            return await self._in_reader(lambda: function(engine))

    @contextlib.asynccontextmanager
    async def _entered(self, deadline: float) -> AsyncIterator[tuple[Steps, list[_Job]]]:
        """Count a request in and out, and end it at its deadline, whatever it waits for."""
        engine = self.queue._enter(self, deadline)
        jobs: list[_Job] = []
        try:
            async with asyncio.timeout_at(deadline):
                yield engine, jobs
        except TimeoutError:
            self.queue.counts.expired += 1
            raise Expired("the deadline passed before the answer was there") from None
        except asyncio.CancelledError:
            self.queue.counts.cancelled += 1
            raise
        finally:
            self.queue._leave(jobs)

    async def _in_reader(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.queue._readers, _careful, function)

    def _job(
        self, engine: Any, deadline: float, left: Callable[[], bool], finish: Callable[[list[Any]], Any], count: int
    ) -> _Job:
        return _Job(
            lane=self,
            engine=engine,
            deadline=deadline,
            future=asyncio.get_running_loop().create_future(),
            gone=left,
            finish=finish,
            scores=[None] * count,
            left=count,
        )

    def _take(self, budget: int, now: float) -> list[_Item]:
        """The next batch: what is due first, and with it what fits, in order, and lets all be answered in time."""
        taken: list[_Item] = []
        aside: list[_Item] = []
        rows, most = 0, float(budget)
        while self.heap and len(aside) < LOOK and rows < most:
            item = heapq.heappop(self.heap)
            if item.job.dead or now >= item.job.deadline:
                continue
            if item.job.gone():
                item.job.let_go()
                continue
            less = min(most, SHARE * self.rate * (item.job.deadline - now))
            if taken and (item.key != taken[0].key or rows + item.size > less):
                aside.append(item)
                continue
            taken.append(item)
            rows, most = rows + item.size, less
        for item in aside:
            heapq.heappush(self.heap, item)
        return taken


class Queue:
    """One engine thread and the lanes that share it; tokenising has threads of its own."""

    def __init__(
        self, caps: Caps | None = None, *, readers: int = 2, seen: Callable[[int, int, float], None] | None = None
    ) -> None:
        """`seen` is told of each batch: sequences, tokens, seconds; it is called by the engine thread."""
        self.caps, self.counts = caps or Caps(), Counts()
        self.lanes: list[Lane] = []
        self.requests = self.tokens = 0  # that wait now; requests also while they run
        self.draining = False
        self._until = 0.0  # when the batch that runs is expected to end
        self._closed = False
        self._seen = seen
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="heedful-tokens")
        self._thread = threading.Thread(target=self._work, name="heedful-engine", daemon=True)
        self._thread.start()

    def lane(self, engine: Steps | None = None) -> Lane:
        """A place for a model; without an engine it is loading."""
        lane = Lane(self, engine)
        with self._changed:
            self.lanes.append(lane)
        return lane

    def wait(self) -> float:
        """In about how many seconds all that runs and waits now will have been answered."""
        return max(0.0, self._until - time.monotonic()) + math.fsum(lane.waiting / lane.rate for lane in self.lanes)

    def drain(self) -> None:
        """Take no more requests; those that are here are answered."""
        self.draining = True

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads after the batch that runs."""
        self.draining = True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.join(seconds)

    # -- called by the event loop

    def _enter(self, lane: Lane, deadline: float) -> Steps:
        if self.draining or lane.engine is None:
            raise Unavailable("this server is stopping" if self.draining else "the model is loading")
        if time.monotonic() >= deadline:
            self.counts.expired += 1
            raise Expired("the deadline passed before the request was read")
        with self._changed:
            if self.requests >= self.caps.requests or self.tokens >= self.caps.tokens:
                raise self._full()
            self.requests += 1
        return lane.engine

    def _full(self) -> Full:
        self.counts.full += 1
        return Full("too many requests wait already; try again later", self.wait())

    def _refuse_late(self, lane: Lane, tokens: int, deadline: float) -> None:
        """Where it is not expected to be answered in a part of its time: behind what runs and waits."""
        before = self.wait()
        if before and before + tokens / lane.rate > SURE * (deadline - time.monotonic()):
            raise self._full()

    def _add(self, job: _Job, parts: Sequence[_Part], more: str = "") -> None:
        total, lane, now = sum(size for size, *_ in parts), job.lane, time.monotonic()
        if total > (most := min(self.caps.request_tokens, self.caps.tokens)):
            raise TooLong(f"the inputs have {total} tokens in windows{more}, and a request may have {most}")
        if now >= job.deadline:
            self.counts.expired += 1
            raise Expired("the deadline passed before the request was read")
        latest = now + AGED * (job.deadline - now)
        with self._changed:
            self._refuse_late(lane, total, job.deadline)
            if self.tokens + total > self.caps.tokens:
                raise self._full()
            if not lane.heap:  # what it did not use while it had nothing to do is not saved up
                lane.used = max(lane.used, min((each.used for each in self.lanes if each.heap), default=lane.used))
            self.tokens += total
            lane.waiting += total
            job.waiting = total
            seen = 0
            for place, (size, piece, key, run) in enumerate(parts):
                seen += size
                due = min(now + PACE * seen, latest)
                heapq.heappush(lane.heap, _Item(due, next(self._order), size, job, place, piece, key, run))
            self._changed.notify()

    def _leave(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            self.requests -= 1
            for job in jobs:
                job.dead = True
                self._give_back(job, job.waiting)
                lane = job.lane
                if len(lane.heap) > 256 and 2 * sum(item.job.dead for item in lane.heap) > len(lane.heap):
                    lane.heap = [item for item in lane.heap if not item.job.dead]
                    heapq.heapify(lane.heap)

    def _give_back(self, job: _Job, tokens: int) -> None:
        job.waiting -= tokens
        job.lane.waiting -= tokens
        self.tokens -= tokens

    # -- the engine thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while (batch := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            lane, items = batch
            start = time.monotonic()
            try:
                ended = self._run(items)
            except BaseException as error:  # ours: no request may wait for ever
                ended = [(item.job, None, told(error)) for item in items]
            seconds, tokens = max(time.monotonic() - start, 1e-6), sum(item.size for item in items)
            lane.used += seconds
            self._until = 0.0
            if lane.took or tokens >= FULL * self.caps.batch_tokens:
                lane.lately, lane.took = KEPT * lane.lately + tokens, KEPT * lane.took + seconds
            self.counts.batches += 1
            self.counts.sequences += len(items)
            self.counts.tokens += tokens
            if self._seen is not None:
                self._seen(len(items), tokens, seconds)
            _tell(ended)
            del batch, items, ended  # what was answered is not kept while the thread sleeps

    def _next(self) -> tuple[Lane, list[_Item]] | None:
        if self._closed:
            return None
        for lane in sorted(self.lanes, key=lambda lane: lane.used):
            if taken := lane._take(self.caps.batch_tokens, time.monotonic()):
                for item in taken:
                    self._give_back(item.job, item.size)
                self._until = time.monotonic() + sum(item.size for item in taken) / lane.rate
                return lane, taken
        return None

    def _run(self, items: list[_Item]) -> list[_Ended]:
        """Score a batch; the jobs that have ended by it."""
        ended: list[_Ended] = []
        for item, scores, error in self._isolated(items):
            job = item.job
            if job.error is not None:
                continue
            job.scores[item.place], job.left, job.error = scores, job.left - 1, error
            if error is not None:
                self.counts.failed += isinstance(error, Failed)  # others tell what a person can mend
                job.dead = True  # its other pieces are in vain
                ended.append((job, None, error))
            elif job.left == 0 and not job.dead:
                try:
                    ended.append((job, job.finish(job.scores), None))
                except BaseException as wrong:
                    error = told(wrong)
                    self.counts.failed += isinstance(error, Failed)
                    ended.append((job, None, error))
        return ended

    def _isolated(self, items: list[_Item]) -> Iterator[_Scored]:
        """Scores of each item, or why it has none: one that fails costs the others at most log2(n) + 1 runs more."""
        groups, first = [items], True
        while groups:
            group = groups.pop()
            done, error = self._tried(group, first)
            first = False
            yield from done
            if error is None:
                continue
            suspects, rest = group, []  # one of the suspects makes it fail
            while len(suspects) > 1:
                half, other = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
                done, wrong = self._tried(half, False)
                yield from done
                if wrong is None:
                    suspects = other
                else:
                    suspects, error = half, wrong
                    rest += other
            if rest or len(group) == 1:
                yield suspects[0], None, error
            else:
                groups.append(suspects)  # all others went well: it may do so alone
            if rest:
                groups.append(rest)

    def _tried(self, group: list[_Item], first: bool) -> tuple[list[_Scored], Exception | None]:
        def vain() -> bool:
            now = time.monotonic()
            return all(item.job.dead or now >= item.job.deadline or item.job.gone() for item in group)

        if vain():  # nobody waits for what made it fail, either
            return [(item, None, Expired("the deadline passed before the answer was there")) for item in group], None
        self.counts.retries += not first
        try:
            made = group[0].run([item.piece for item in group], vain)
            return [
                (item, scores, None if finite(scores) else Failed("its scores are not finite"))
                for item, scores in zip(group, made, strict=True)
            ], None
        except BaseException as error:
            return [], told(error)


def _careful(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except BaseException as error:
        raise told(error) from None


def _tell(ended: list[_Ended]) -> None:
    """Wake who waits, in one call for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[_Ended]] = {}
    for each in ended:
        loops.setdefault(each[0].future.get_loop(), []).append(each)
    for loop, mine in loops.items():
        with contextlib.suppress(RuntimeError):  # that loop was closed
            loop.call_soon_threadsafe(_settle, mine)


def _settle(ended: list[_Ended]) -> None:
    for job, value, error in ended:
        if job.future.done():
            continue
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(value)
