"""Queue: the requests of many clients become batches for one engine thread, by deadline and size, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from heedful.errors import InputError
from heedful.infer.bundle_engine import Chunk, EncodedInput
from heedful.infer.cascade import StagedAnswers
from heedful.infer.scheduling.batch_run import BatchRun, PendingRequest, QueuedChunk, ScoreBatch, deliver
from heedful.infer.scheduling.errors import (
    DeadlineExceededError,
    QueueFullError,
    TooLongError,
    UnavailableError,
    public_error,
)
from heedful.infer.scheduling.limits import QueueCounters, QueueLimits, ScheduledEngine, token_cost
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS, TokenizerPool
from heedful.model.decode import Decoding
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig

PACE = 0.001  # seconds after its arrival at which a request's token is due: what is short goes before what is long
AGED = 0.5  # the share of its time after which a request is due whatever its length: so long ones are not starved
LOOK = 64  # waiting pieces that are passed over to fill a batch
SHARE = 0.5  # of the time that the most urgent request of a batch has left, for the batch
SURE = 0.5  # of a request's time, in which it has to be expected to be answered, or it is refused
FULL = 0.25  # the share of the budget from which a first batch tells the engine's speed; a small one is slow to begin
KEPT = 0.9  # of tokens and seconds, in the engine's speed, after each batch
SLICE_SECONDS = (
    0.05  # seconds after which a decoding lets other models, and what is more urgent, have the engine thread
)
MAX_DECODINGS = 2  # of a model that are held at once, each with its cache; past it what is new waits
AROUND = 2  # tokens that are put around a text, in estimates
DENSITY_KEPT = 0.99  # of characters and tokens, in estimates, after each request


T = TypeVar("T")
# of a request: size, piece, key, run, and whether it is a decoding
_Part = tuple[int, object, object, ScoreBatch, bool]
_Encoded = list[EncodedInput] | Generator[None, None, list[EncodedInput]]  # at once, or in turns
EngineType = TypeVar("EngineType", bound=ScheduledEngine, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The arguments of `ModelQueue.ask`, and the jobs that were begun for it."""

    jobs: list[PendingRequest]
    deadline: float
    left: Callable[[], bool]
    encode: Callable[[Any, Sequence[object]], _Encoded] | None
    top_k: int
    writing: GenerationConfig | None


class ModelQueue(Generic[EngineType]):
    """One model's place in the queue. `engine` may be exchanged at any time: each request ends with what it began."""

    def __init__(self, queue: Scheduler, engine: EngineType | None) -> None:
        self.queue = queue
        self.engine = engine
        self.heap: list[QueuedChunk] = []
        self.used = 0.0  # seconds of the engine thread, by which models take turns
        self.waiting = 0  # tokens, those of requests that are being tokenised as estimated
        self.paused: list[BatchRun] = []  # decodings between two slices
        self.running: BatchRun | None = None
        self.lately = 0.0  # tokens, and the seconds for them, the latest counting most
        self.took = 0.0  # tokens, and the seconds for them, the latest counting most
        self._characters = 1024.0
        self._tokens = 256.0

    @property
    def rate(self) -> float:
        """Tokens a second; infinite where too little was read yet."""
        return self.lately / self.took if self.took else math.inf

    @property
    def seconds(self) -> float:
        """How long all that waits and all decodings that were begun would take, alone."""
        decodings = self.paused if self.running is None or not self.running.sliced else [*self.paused, self.running]
        return (self.waiting + math.fsum(decoding.left for decoding in decodings)) / self.rate

    @property
    def busy(self) -> bool:
        """Whether it waits for the engine thread, or has it."""
        return bool(self.heap or self.paused or self.running)

    async def ask(
        self,
        inputs: Sequence[object],
        *,
        deadline: float,
        left: Callable[[], bool] = lambda: False,
        encode: Callable[[EngineType, Sequence[object]], _Encoded] | None = None,
        top_k: int = 5,
        writing: GenerationConfig | None = None,
        sizes: Sequence[int] = (),
        in_stages: bool = True,
    ) -> tuple[list[Answer], int]:
        """The answers, as the engine alone would give them, and how many tokens were read for them.

        `left` tells, to any thread and at once, whether whoever asked has gone: then no batch takes it, and this is
        cancelled. `encode` makes windows of the inputs, and may refuse them. `sizes` are the characters of each text
        that are to be tokenised: by them a request that does not fit is refused before it is tokenised. Of a cascade,
        the stages answer in turn, or with `in_stages` false the last one alone; `sizes` are then those of each input.
        """
        async with self._entered(deadline) as (engine, jobs):
            request = _Request(jobs=jobs, deadline=deadline, left=left, encode=encode, top_k=top_k, writing=writing)
            stages = engine.stages
            if len(stages) == 1 or not in_stages:
                return await self._ask_engine(engine, request, inputs, sizes)
            staged, tokens = StagedAnswers(len(inputs)), 0
            for stage, threshold in stages:
                some = [inputs[number] for number in staged.pending]
                own_sizes = [sizes[number] for number in staged.pending] if sizes else ()
                try:
                    answers, count = await self._ask_engine(stage, request, some, own_sizes)
                except InputError as error:
                    raise staged.renumbered(error) from error.__cause__
                staged.add(answers, threshold)
                tokens += count
                if not staged.pending:
                    break
            return staged.answers, tokens

    async def _ask_engine(
        self, engine: ScheduledEngine, request: _Request, inputs: Sequence[object], sizes: Sequence[int]
    ) -> tuple[list[Answer], int]:
        """The answers of one engine, and how many tokens were read for them."""
        encode, top_k, writing = request.encode, request.top_k, request.writing

        def read() -> _Encoded:
            return engine.tokenize(inputs) if encode is None else encode(engine, inputs)

        job = self._job(engine, request.deadline, request.left)
        request.jobs.append(job)
        short = sum(sizes) <= TURN_CHARACTERS
        self.queue._reserve(job, self._estimate(sizes, writing) if short else 0)
        asked = await self._in_reader(read, request.deadline, request.left, sizes)
        pieces = [piece for encoded in asked for piece in encoded.pieces]
        if sizes and short:
            self._learn(sizes, sum(len(piece.encoded) for piece in pieces))

        def finish(scores: list[object]) -> list[Answer]:
            in_order = iter(scores)
            return [engine.answer(encoded, [next(in_order) for _ in encoded.pieces], top_k=top_k) for encoded in asked]

        if not pieces:
            answers: list[Answer] = _careful(lambda: finish([]))
            return answers, 0
        job.finish = finish

        def part(piece: Chunk) -> _Part:
            writes = piece.answerer.generate is not None
            how = (writing or engine.writing) if writes else writing
            key = id(engine), top_k, how, id(piece.answerer)

            def run(batch: list[Chunk]) -> Sequence[object] | Decoding:
                return engine.decode(batch, how) if writes else engine.score(batch, how, top_k=top_k)

            return token_cost(len(piece.encoded), how), piece, key, run, writes

        parts = [part(piece) for piece in pieces]
        more = ", with all that may be written after them" if parts[0][4] else ""
        self.queue._add(job, parts, more)
        return await job.future, sum(len(piece.encoded) for piece in pieces)

    def _estimate(self, sizes: Sequence[int], writing: GenerationConfig | None) -> int:
        """Estimate the tokens of texts from their characters, with those that may be generated."""
        tokens_per_character = self._tokens / self._characters
        return sum(token_cost(AROUND + math.ceil(tokens_per_character * size), writing) for size in sizes)

    def _learn(self, sizes: Sequence[int], tokens: int) -> None:
        """Correct what is estimated by what was found."""
        self._characters = DENSITY_KEPT * self._characters + sum(sizes)
        self._tokens = DENSITY_KEPT * self._tokens + max(0, tokens - AROUND * len(sizes))

    async def call(
        self,
        function: Callable[[EngineType], T],
        *,
        tokens: int,
        deadline: float,
        left: Callable[[], bool] = lambda: False,
    ) -> T:
        """function(engine), run by the engine thread in its turn as if it were that many tokens."""
        async with self._entered(deadline) as (engine, jobs):
            job = self._job(engine, deadline, left)
            job.finish = lambda scores: scores[0]
            jobs.append(job)
            self.queue._add(job, [(tokens, engine, object(), lambda batch: [function(batch[0])], False)])
            result: T = await job.future
            return result

    async def read(
        self,
        function: Callable[[EngineType], T | Generator[None, None, T]],
        *,
        deadline: float,
        left: Callable[[], bool] = lambda: False,
        sizes: Sequence[int] = (),
    ) -> T:
        """function(engine), run by a thread of those that tokenise; `sizes` are characters of texts, as in `ask`."""
        async with self._entered(deadline) as (engine, _):
            return await self._in_reader(lambda: function(engine), deadline, left, sizes)

    @contextlib.asynccontextmanager
    async def _entered(self, deadline: float) -> AsyncIterator[tuple[EngineType, list[PendingRequest]]]:
        """Count a request in and out, and end it at its deadline, whatever it waits for."""
        engine = self.queue._enter(self, deadline)
        jobs: list[PendingRequest] = []
        try:
            async with asyncio.timeout_at(deadline):
                yield engine, jobs
        except TimeoutError:
            self.queue.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the answer was there") from None
        except asyncio.CancelledError:
            self.queue.counts.cancelled += 1
            raise
        finally:
            self.queue._leave(jobs)

    async def _in_reader(
        self,
        function: Callable[[], T | Generator[None, None, T]],
        deadline: float,
        left: Callable[[], bool],
        sizes: Sequence[int],
    ) -> T:
        now, total = time.monotonic(), sum(sizes)
        due = min(now + PACE * total / 4, now + AGED * (deadline - now))  # about four characters to a token
        try:
            future = self.queue._readers.submit(
                function,
                characters=total,
                longest=max(sizes, default=0),
                due=due,
                deadline=deadline,
                is_disconnected=left,
            )
            return await asyncio.wrap_future(future)
        except QueueFullError:
            self.queue.counts.full += 1
            raise
        except DeadlineExceededError:
            self.queue.counts.expired += 1
            raise

    def _job(self, engine: ScheduledEngine, deadline: float, left: Callable[[], bool]) -> PendingRequest:
        future = asyncio.get_running_loop().create_future()
        return PendingRequest(model_queue=self, engine=engine, deadline=deadline, future=future, gone=left)

    def _next_run(self, budget: int, now: float, counts: QueueCounters) -> BatchRun | None:
        """The run that is due first: a paused decoding, or a new batch; a model has at most MAX_DECODINGS decodings."""
        paused = min(self.paused, key=lambda run: run.due, default=None)
        begins = paused is None or (
            len(self.paused) < MAX_DECODINGS and bool(self.heap) and self.heap[0].due < paused.due
        )
        if begins and (taken := self._take(budget, now)):
            return BatchRun(taken, counts)
        if paused is not None:
            self.paused.remove(paused)
        return paused

    def _take(self, budget: int, now: float) -> list[QueuedChunk]:
        """The next batch: what is due first, and with it what fits, in order, and lets all be answered in time."""
        taken: list[QueuedChunk] = []
        aside: list[QueuedChunk] = []
        rows, most = 0, float(budget)
        while self.heap and len(aside) < LOOK and rows < most:
            item = heapq.heappop(self.heap)
            if item.job.abandoned(now):
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


class Scheduler:
    """One engine thread and the models that share it; tokenising has threads of its own."""

    def __init__(
        self,
        limits: QueueLimits | None = None,
        *,
        readers: int = 2,
        seen: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """`seen` is called by the engine thread with the sequences, tokens and seconds of each batch."""
        self.limits = limits or QueueLimits()
        self.counts = QueueCounters()
        self.model_queues: list[ModelQueue[ScheduledEngine]] = []
        self.requests = 0  # that wait now; requests also while they run
        self.tokens = 0  # that wait now; requests also while they run
        self.draining = False
        self._until = 0.0  # when the batch that runs is expected to end
        self._closed = False
        self._seen = seen
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._readers = TokenizerPool(readers, self.limits.max_queued_characters)
        self._thread = threading.Thread(target=self._work, name="heedful-engine", daemon=True)
        self._thread.start()

    def add_model(self, engine: EngineType | None = None) -> ModelQueue[EngineType]:
        """A place for a model; without an engine it is loading."""
        model_queue = ModelQueue(self, engine)
        with self._changed:
            self.model_queues.append(model_queue)
        return model_queue

    def wait(self, model_queue: ModelQueue[ScheduledEngine] | None = None, more: int = 0) -> float:
        """Estimate the seconds until all requests that run and wait now are answered.

        For one model, with a number of tokens added: models take turns, so each of the others takes at most as much
        time as this one does, whatever waits in it.
        """
        runs = max(0.0, self._until - time.monotonic())
        if model_queue is None:
            return runs + math.fsum(model_queue.seconds for model_queue in self.model_queues)
        own = model_queue.seconds + more / model_queue.rate
        return (
            runs + own + math.fsum(min(own, model.seconds) for model in self.model_queues if model is not model_queue)
        )

    @property
    def characters(self) -> int:
        """Characters of long requests that wait to be tokenised or are being tokenised."""
        return self._readers.queued_characters

    @property
    def decodings(self) -> int:
        """Batches for which texts are being written, those between two slices included."""
        running = [model_queue.running for model_queue in self.model_queues]
        return sum(len(model_queue.paused) for model_queue in self.model_queues) + sum(
            run is not None and run.sliced for run in running
        )

    def drain(self) -> None:
        """Take no more requests; those that are here are answered."""
        self.draining = True

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads after the batch that runs."""
        self.draining = True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._readers.close()
        self._thread.join(seconds)

    # -- called by the event loop

    def _enter(self, model_queue: ModelQueue[EngineType], deadline: float) -> EngineType:
        if self.draining or model_queue.engine is None:
            raise UnavailableError("this server is stopping" if self.draining else "the model is loading")
        if time.monotonic() >= deadline:
            self.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the request was read")
        with self._changed:
            if self.requests >= self.limits.max_concurrent_requests or self.tokens >= self.limits.max_queued_tokens:
                raise self._full(model_queue)
            self.requests += 1
        return model_queue.engine

    def _full(self, model_queue: ModelQueue[ScheduledEngine]) -> QueueFullError:
        self.counts.full += 1
        return QueueFullError("too many requests wait already; try again later", self.wait(model_queue))

    def _refuse_late(self, model_queue: ModelQueue[ScheduledEngine], tokens: int, deadline: float) -> None:
        """Refuse it if it is not expected in a part of its time: behind what runs, and its own model's turns."""
        if self.wait(model_queue) and self.wait(model_queue, tokens) > SURE * (deadline - time.monotonic()):
            raise self._full(model_queue)

    def _reserve(self, job: PendingRequest, tokens: int) -> None:
        """Hold room for a request that is to be tokenised, by an estimate, or refuse it now."""
        tokens = min(
            tokens, self.limits.max_request_tokens, self.limits.max_queued_tokens
        )  # if it has more it will be refused for that
        with self._changed:
            self._refuse_late(job.model_queue, tokens, job.deadline)
            if self.tokens + tokens > self.limits.max_queued_tokens:
                raise self._full(job.model_queue)
            self._give_back(job, -tokens)

    def _add(self, job: PendingRequest, parts: Sequence[_Part], more: str = "") -> None:
        total, model_queue, now = sum(size for size, *_ in parts), job.model_queue, time.monotonic()
        if total > (most := min(self.limits.max_request_tokens, self.limits.max_queued_tokens)):
            raise TooLongError(f"the inputs have {total} tokens in windows{more}, and a request may have {most}")
        if now >= job.deadline:
            self.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the request was read")
        latest = now + AGED * (job.deadline - now)
        with self._changed:
            reserved = job.waiting
            self._give_back(job, reserved)
            if total > reserved:  # else it was promised
                self._refuse_late(model_queue, total, job.deadline)
            if self.tokens + total > self.limits.max_queued_tokens:
                raise self._full(model_queue)
            if not model_queue.busy:  # what it did not use while it had nothing to do is not saved up
                model_queue.used = max(
                    model_queue.used,
                    min((busy.used for busy in self.model_queues if busy.busy), default=model_queue.used),
                )
            self._give_back(job, -total)
            job.scores, job.left = [None] * len(parts), len(parts)
            seen = 0
            for place, (size, piece, key, run, sliced) in enumerate(parts):
                seen += size
                due = min(now + PACE * seen, latest)
                heapq.heappush(
                    model_queue.heap, QueuedChunk(due, next(self._order), size, job, place, piece, key, run, sliced)
                )
            self._changed.notify()

    def _leave(self, jobs: Sequence[PendingRequest]) -> None:
        with self._changed:
            self.requests -= 1
            for job in jobs:
                job.dead = True
                self._give_back(job, job.waiting)
                model_queue = job.model_queue
                if len(model_queue.heap) > 256 and 2 * sum(item.job.dead for item in model_queue.heap) > len(
                    model_queue.heap
                ):
                    model_queue.heap = [item for item in model_queue.heap if not item.job.dead]
                    heapq.heapify(model_queue.heap)

    def _give_back(self, job: PendingRequest, tokens: int) -> None:
        job.waiting -= tokens
        job.model_queue.waiting -= tokens
        self.tokens -= tokens

    # -- the engine thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while (chosen := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            model_queue, run = chosen
            start = time.monotonic()
            try:
                ended, done = run.advance(start + SLICE_SECONDS)
            except BaseException as error:  # ours: no request may wait for ever
                ended, done = [(item.job, None, public_error(error)) for item in run.items], True
            seconds = time.monotonic() - start
            run.seconds += seconds
            with self._changed:
                model_queue.running, self._until = None, 0.0
                model_queue.used += max(seconds, 1e-6)
                if not done:
                    model_queue.paused.append(run)
            if done:
                self._count(model_queue, run)
            deliver(ended)
            del chosen, run, ended  # what was answered is not kept while the thread sleeps

    def _count(self, model_queue: ModelQueue[ScheduledEngine], run: BatchRun) -> None:
        """Keep in mind how long a batch took."""
        seconds = max(run.seconds, 1e-6)
        if model_queue.took or run.size >= FULL * self.limits.max_batch_tokens:
            model_queue.lately, model_queue.took = (
                KEPT * model_queue.lately + run.size,
                KEPT * model_queue.took + seconds,
            )
        self.counts.batches += 1
        self.counts.sequences += len(run.items)
        self.counts.tokens += run.size
        if self._seen is not None:
            self._seen(len(run.items), run.size, seconds)

    def _next(self) -> tuple[ModelQueue[ScheduledEngine], BatchRun] | None:
        if self._closed:
            return None
        for model_queue in sorted(self.model_queues, key=lambda model_queue: model_queue.used):
            now = time.monotonic()
            if run := model_queue._next_run(self.limits.max_batch_tokens, now, self.counts):
                if not run.begun:
                    for item in run.items:
                        self._give_back(item.job, item.size)
                model_queue.running = run
                self._until = now + (
                    min(SLICE_SECONDS, run.left / model_queue.rate) if run.sliced else run.size / model_queue.rate
                )
                return model_queue, run
        return None


def _careful(function: Callable[[], T]) -> T:
    try:
        return function()
    except BaseException as error:
        raise public_error(error) from None
