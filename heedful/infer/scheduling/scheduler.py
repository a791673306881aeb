"""Scheduler: it batches the requests of many clients for one engine thread, by deadline and length, within limits."""

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
from heedful.infer.cascade import StagedAnswers
from heedful.infer.encoded_input import EncodedInput
from heedful.infer.scheduling.batch_run import (
    BatchRun,
    FinishedRequest,
    NewChunk,
    PendingRequest,
    QueuedChunk,
    deliver,
    new_chunk,
)
from heedful.infer.scheduling.errors import (
    DeadlineExceededError,
    QueueFullError,
    TooLongError,
    UnavailableError,
    public_error,
    with_public_errors,
)
from heedful.infer.scheduling.limits import QueueCounters, QueueLimits, ScheduledEngine, token_cost
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS, TokenizerPool
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig

SECONDS_PER_TOKEN = 0.001  # a token is due this long after the token before it, so that short requests go first
MAX_DUE_SHARE = 0.5  # share of its time after which any request is due, so that long ones are not starved
MAX_SKIPPED = 64  # waiting chunks that are skipped to fill a batch
BATCH_TIME_SHARE = 0.5  # share of the time left to the most urgent request of a batch that the batch may take
WAIT_TIME_SHARE = 0.5  # a request is refused unless its answer is expected within this share of its time
FIRST_BATCH_SHARE = 0.25  # share of the token budget from which a first batch measures the speed; small ones are slower
SPEED_DECAY = 0.9  # weight of earlier batches in the measured speed, applied once for each new batch
SLICE_SECONDS = 0.05  # seconds after which a text generation yields the engine thread to other batches
MAX_DECODINGS = 2  # started text generations of a model, each with its KV cache; further ones wait
SPECIAL_TOKENS = 2  # tokens around a text, in estimates
DENSITY_DECAY = 0.99  # weight of earlier requests in the measured tokens per character, applied for each new request
MIN_HEAP_CLEANUP = 256  # waiting chunks from which a heap is rebuilt if most of them are of discarded requests


T = TypeVar("T")
Encoded = list[EncodedInput] | Generator[None, None, list[EncodedInput]]  # at once, or in several turns
EngineType = TypeVar("EngineType", bound=ScheduledEngine, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskOptions:
    """Arguments of `ModelQueue.ask`, and the pending requests that it has made so far."""

    pending: list[PendingRequest]
    deadline: float
    is_disconnected: Callable[[], bool]
    encode: Callable[[Any, Sequence[object]], Encoded] | None
    top_k: int
    writing: GenerationConfig | None


class ModelQueue(Generic[EngineType]):
    """The queue of one model. `engine` may be replaced at any time: a request keeps the engine that it started with."""

    def __init__(self, scheduler: Scheduler, engine: EngineType | None) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.heap: list[QueuedChunk] = []  # waiting chunks, the first due first
        self.used_seconds = 0.0  # time on the engine thread; the model with the least comes next
        self.waiting_tokens = 0  # of waiting requests; estimated for requests that are being tokenised
        self.paused: list[BatchRun] = []  # text generations between two slices
        self.running: BatchRun | None = None
        self.recent_tokens = 0.0  # tokens of finished batches, decayed by SPEED_DECAY
        self.recent_seconds = 0.0  # seconds of these batches, decayed in the same way
        self._measured_characters = 1024.0  # characters of tokenised requests, decayed by DENSITY_DECAY
        self._measured_tokens = 256.0  # tokens of these requests, decayed in the same way

    @property
    def tokens_per_second(self) -> float:
        """The measured speed; infinite until a batch was measured."""
        return self.recent_tokens / self.recent_seconds if self.recent_seconds else math.inf

    @property
    def estimated_seconds(self) -> float:
        """The estimated time for all waiting chunks and started text generations, without other models."""
        decodings = list(self.paused)
        if self.running is not None and self.running.is_decoding:
            decodings.append(self.running)
        tokens = self.waiting_tokens + math.fsum(decoding.remaining_cost for decoding in decodings)
        return tokens / self.tokens_per_second

    @property
    def is_busy(self) -> bool:
        """Whether the model uses the engine thread, or waits for it."""
        return bool(self.heap or self.paused or self.running)

    async def ask(
        self,
        inputs: Sequence[object],
        *,
        deadline: float,
        is_disconnected: Callable[[], bool] = lambda: False,
        encode: Callable[[EngineType, Sequence[object]], Encoded] | None = None,
        top_k: int = 5,
        writing: GenerationConfig | None = None,
        sizes: Sequence[int] = (),
        in_stages: bool = True,
    ) -> tuple[list[Answer], int]:
        """Return the answers, the same as those of a direct call of the engine, and the number of tokens read.

        Args:
            inputs: The inputs.
            deadline: time.monotonic() at which the call ends with a DeadlineExceededError.
            is_disconnected: Whether the client disconnected; any thread may call it. Then no batch takes the request,
                and this call is cancelled.
            encode: Tokenizes inputs, or refuses them; None: the engine does.
            top_k: Number of candidates that fill-mask lists.
            writing: Generation settings; None: the engine's.
            sizes: Characters of each text that is to be tokenised. A request that does not fit by them is refused
                before it is tokenised. For a cascade in stages: of each input.
            in_stages: Whether the stages of a cascade answer in turn; otherwise the last stage alone does.

        Raises:
            RequestRefusedError: If the request is too long, too late, or one too many.
            InputError: If an input is invalid.
        """
        async with self._entered(deadline) as (engine, pending):
            options = _AskOptions(
                pending=pending,
                deadline=deadline,
                is_disconnected=is_disconnected,
                encode=encode,
                top_k=top_k,
                writing=writing,
            )
            stages = engine.stages
            if len(stages) == 1 or not in_stages:
                return await self._ask_engine(engine, options, inputs, sizes)
            staged, tokens = StagedAnswers(len(inputs)), 0
            for stage, threshold in stages:
                stage_inputs = [inputs[number] for number in staged.pending]
                stage_sizes = [sizes[number] for number in staged.pending] if sizes else ()
                try:
                    answers, count = await self._ask_engine(stage, options, stage_inputs, stage_sizes)
                except InputError as error:
                    raise staged.renumbered(error) from error.__cause__
                staged.add(answers, threshold)
                tokens += count
                if not staged.pending:
                    break
            return staged.answers, tokens

    async def _ask_engine(
        self, engine: ScheduledEngine, options: _AskOptions, inputs: Sequence[object], sizes: Sequence[int]
    ) -> tuple[list[Answer], int]:
        """Return the answers of one engine, and the number of tokens read."""
        encode, top_k, writing = options.encode, options.top_k, options.writing

        def tokenize() -> Encoded:
            return engine.tokenize(inputs) if encode is None else encode(engine, inputs)

        request = self._pending_request(engine, options.deadline, options.is_disconnected)
        options.pending.append(request)
        is_short = sum(sizes) <= TURN_CHARACTERS
        self.scheduler._reserve(request, self._estimate_cost(sizes, writing) if is_short else 0)
        encoded_inputs = await self._run_in_tokenizer_pool(tokenize, options.deadline, options.is_disconnected, sizes)
        chunks = [chunk for encoded_input in encoded_inputs for chunk in encoded_input.chunks]
        tokens = sum(len(chunk.encoded) for chunk in chunks)
        if sizes and is_short:
            self._measure_density(sizes, tokens)

        def finish(scores: list[object]) -> list[Answer]:
            in_order = iter(scores)
            return [
                engine.answer(encoded_input, [next(in_order) for _ in encoded_input.chunks], top_k=top_k)
                for encoded_input in encoded_inputs
            ]

        if not chunks:
            answers: list[Answer] = with_public_errors(lambda: finish([]))
            return answers, 0
        request.finish = finish
        new_chunks = [new_chunk(engine, chunk, top_k, writing) for chunk in chunks]
        addition = ", with all that may be written after them" if new_chunks[0].is_decoding else ""
        self.scheduler._add(request, new_chunks, addition)
        return await request.future, tokens

    def _estimate_cost(self, sizes: Sequence[int], writing: GenerationConfig | None) -> int:
        """Estimate the cost of texts from their characters, see `token_cost`."""
        tokens_per_character = self._measured_tokens / self._measured_characters
        return sum(token_cost(SPECIAL_TOKENS + math.ceil(tokens_per_character * size), writing) for size in sizes)

    def _measure_density(self, sizes: Sequence[int], tokens: int) -> None:
        """Update the measured tokens per character by those of a tokenised request."""
        self._measured_characters = DENSITY_DECAY * self._measured_characters + sum(sizes)
        self._measured_tokens = DENSITY_DECAY * self._measured_tokens + max(0, tokens - SPECIAL_TOKENS * len(sizes))

    async def call(
        self,
        function: Callable[[EngineType], T],
        *,
        tokens: int,
        deadline: float,
        is_disconnected: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return function(engine), run by the engine thread; it is queued like a chunk with this number of tokens."""
        async with self._entered(deadline) as (engine, pending):
            request = self._pending_request(engine, deadline, is_disconnected)
            request.finish = lambda scores: scores[0]
            pending.append(request)

            def score_batch(engines: list[Any]) -> list[object]:
                return [function(engines[0])]

            self.scheduler._add(request, [NewChunk(tokens, engine, object(), score_batch, False)])
            result: T = await request.future
            return result

    async def tokenize(
        self,
        function: Callable[[EngineType], T | Generator[None, None, T]],
        *,
        deadline: float,
        is_disconnected: Callable[[], bool] = lambda: False,
        sizes: Sequence[int] = (),
    ) -> T:
        """Return function(engine), run by a tokenizing thread; `sizes` are the characters of texts, as in `ask`."""
        async with self._entered(deadline) as (engine, _):
            return await self._run_in_tokenizer_pool(lambda: function(engine), deadline, is_disconnected, sizes)

    @contextlib.asynccontextmanager
    async def _entered(self, deadline: float) -> AsyncIterator[tuple[EngineType, list[PendingRequest]]]:
        """Count a request while it is active, and end it at its deadline, whatever it waits for.

        Yields:
            The engine, and a list for the pending requests that are made for the request.
        """
        engine = self.scheduler._enter(self, deadline)
        pending: list[PendingRequest] = []
        try:
            async with asyncio.timeout_at(deadline):
                yield engine, pending
        except TimeoutError:
            self.scheduler.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the answer was there") from None
        except asyncio.CancelledError:
            self.scheduler.counts.cancelled += 1
            raise
        finally:
            self.scheduler._leave(pending)

    async def _run_in_tokenizer_pool(
        self,
        function: Callable[[], T | Generator[None, None, T]],
        deadline: float,
        is_disconnected: Callable[[], bool],
        sizes: Sequence[int],
    ) -> T:
        """Return the result of a function that a tokenizing thread runs; see `TokenizerPool.submit`."""
        now, characters = time.monotonic(), sum(sizes)
        estimated_tokens = characters / 4
        due = min(now + SECONDS_PER_TOKEN * estimated_tokens, now + MAX_DUE_SHARE * (deadline - now))
        try:
            future = self.scheduler._tokenizer_pool.submit(
                function,
                characters=characters,
                longest=max(sizes, default=0),
                due=due,
                deadline=deadline,
                is_disconnected=is_disconnected,
            )
            return await asyncio.wrap_future(future)
        except QueueFullError:
            self.scheduler.counts.full += 1
            raise
        except DeadlineExceededError:
            self.scheduler.counts.expired += 1
            raise

    def _pending_request(
        self, engine: ScheduledEngine, deadline: float, is_disconnected: Callable[[], bool]
    ) -> PendingRequest:
        future = asyncio.get_running_loop().create_future()
        return PendingRequest(
            model_queue=self, engine=engine, deadline=deadline, future=future, is_disconnected=is_disconnected
        )

    @property
    def token_budget(self) -> int:
        """The maximum tokens of a batch."""
        return self.scheduler.limits.max_batch_tokens or (1 if self.engine is None else self.engine.token_budget)

    def _next_run(self, now: float, counts: QueueCounters) -> BatchRun | None:
        """Return the run that is due first: a paused text generation, or a new batch.

        No new batch starts while MAX_DECODINGS text generations are paused.
        """
        paused = min(self.paused, key=lambda run: run.due, default=None)
        starts_batch = paused is None or (
            len(self.paused) < MAX_DECODINGS and bool(self.heap) and self.heap[0].due < paused.due
        )
        if starts_batch and (items := self._pop_batch(now)):
            return BatchRun(items, counts)
        if paused is not None:
            self.paused.remove(paused)
        return paused

    def _pop_batch(self, now: float) -> list[QueuedChunk]:
        """Remove and return the chunks of the next batch.

        It has the chunk that is due first and, in order, further chunks with the same key that fit into the budget and
        let every request of the batch be answered in time.
        """
        batch: list[QueuedChunk] = []
        skipped: list[QueuedChunk] = []
        cost, max_cost = 0, float(self.token_budget)
        while self.heap and len(skipped) < MAX_SKIPPED and cost < max_cost:
            item = heapq.heappop(self.heap)
            if item.request.is_abandoned(now):
                continue
            time_left = item.request.deadline - now
            max_cost_with_item = min(max_cost, BATCH_TIME_SHARE * self.tokens_per_second * time_left)
            if batch and (item.key != batch[0].key or cost + item.cost > max_cost_with_item):
                skipped.append(item)
                continue
            batch.append(item)
            cost, max_cost = cost + item.cost, max_cost_with_item
        for item in skipped:
            heapq.heappush(self.heap, item)
        return batch


class Scheduler:
    """One engine thread that several models share, and a pool of tokenizing threads."""

    def __init__(
        self,
        limits: QueueLimits | None = None,
        *,
        tokenizer_threads: int = 2,
        on_batch: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            limits: Limits of the queue.
            tokenizer_threads: Number of threads that tokenise.
            on_batch: Called by the engine thread after each batch with its sequences, tokens and seconds.
        """
        self.limits = limits or QueueLimits()
        self.counts = QueueCounters()
        self.model_queues: list[ModelQueue[ScheduledEngine]] = []
        self.active_requests = 0  # requests that wait or run now
        self.waiting_tokens = 0  # of waiting requests, over all models
        self.draining = False
        self._run_end = 0.0  # time.monotonic() at which the current slice or batch is expected to end; 0: none runs
        self._closed = False
        self._on_batch = on_batch
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._tokenizer_pool = TokenizerPool(tokenizer_threads, self.limits.max_queued_characters)
        self._thread = threading.Thread(target=self._work, name="heedful-engine", daemon=True)
        self._thread.start()

    def add_model(self, engine: EngineType | None = None) -> ModelQueue[EngineType]:
        """Add the queue of a model and return it; without an engine the model counts as loading."""
        model_queue = ModelQueue(self, engine)
        with self._changed:
            self.model_queues.append(model_queue)
        return model_queue

    def estimated_wait(self, model_queue: ModelQueue[ScheduledEngine] | None = None, new_tokens: int = 0) -> float:
        """Estimate the seconds until the requests that run and wait now are answered.

        Args:
            model_queue: Only the requests of this model; None: of all. Models take turns, so each of the others takes
                at most as much time as this one, however much waits in it.
            new_tokens: Tokens that are added to this model's queue.
        """
        run_seconds = max(0.0, self._run_end - time.monotonic())
        if model_queue is None:
            return run_seconds + math.fsum(model_queue.estimated_seconds for model_queue in self.model_queues)
        own = model_queue.estimated_seconds + new_tokens / model_queue.tokens_per_second
        others = [model for model in self.model_queues if model is not model_queue]
        return run_seconds + own + math.fsum(min(own, model.estimated_seconds) for model in others)

    @property
    def queued_characters(self) -> int:
        """The characters of long requests that wait to be tokenised or are being tokenised."""
        return self._tokenizer_pool.queued_characters

    @property
    def decodings(self) -> int:
        """The number of batches of text generation that have started, including those between two slices."""
        paused = sum(len(model_queue.paused) for model_queue in self.model_queues)
        running = [model_queue.running for model_queue in self.model_queues]
        return paused + sum(run is not None and run.is_decoding for run in running)

    def is_idle(self) -> bool:
        """Return whether no request waits or runs."""
        return self.active_requests == 0

    def drain(self) -> None:
        """Refuse new requests; accepted ones are still answered."""
        self.draining = True

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads after the current batch; wait at most this many seconds for it."""
        self.draining = True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tokenizer_pool.close()
        self._thread.join(seconds)

    # -- called by the event loop

    def _enter(self, model_queue: ModelQueue[EngineType], deadline: float) -> EngineType:
        """Count a new request and return the engine for it, or raise a RequestRefusedError."""
        if self.draining or model_queue.engine is None:
            raise UnavailableError("this server is stopping" if self.draining else "the model is loading")
        if time.monotonic() >= deadline:
            self.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the request was read")
        limits = self.limits
        with self._changed:
            if (
                self.active_requests >= limits.max_concurrent_requests
                or self.waiting_tokens >= limits.max_queued_tokens
            ):
                raise self._queue_full(model_queue)
            self.active_requests += 1
        return model_queue.engine

    def _queue_full(self, model_queue: ModelQueue[ScheduledEngine]) -> QueueFullError:
        """Count a request that is refused, and return the error."""
        self.counts.full += 1
        return QueueFullError("too many requests wait already; try again later", self.estimated_wait(model_queue))

    def _refuse_late(self, model_queue: ModelQueue[ScheduledEngine], tokens: int, deadline: float) -> None:
        """Raise a QueueFullError if an answer is not expected within WAIT_TIME_SHARE of the time that is left."""
        max_wait = WAIT_TIME_SHARE * (deadline - time.monotonic())
        if self.estimated_wait(model_queue) and self.estimated_wait(model_queue, tokens) > max_wait:
            raise self._queue_full(model_queue)

    def _reserve(self, request: PendingRequest, tokens: int) -> None:
        """Count the estimated tokens of a request that is to be tokenised as waiting, or refuse it."""
        # a request above the limits is refused for that later, with its exact number
        tokens = min(tokens, self.limits.max_request_tokens, self.limits.max_queued_tokens)
        with self._changed:
            self._refuse_late(request.model_queue, tokens, request.deadline)
            if self.waiting_tokens + tokens > self.limits.max_queued_tokens:
                raise self._queue_full(request.model_queue)
            self._change_waiting(request, tokens)

    def _add(self, request: PendingRequest, chunks: Sequence[NewChunk], addition: str = "") -> None:
        """Queue the chunks of a request in place of its reserved tokens, or refuse it.

        Args:
            request: The request.
            chunks: Its chunks.
            addition: Says in an error message what the number of tokens includes.
        """
        total, model_queue, now = sum(chunk.cost for chunk in chunks), request.model_queue, time.monotonic()
        if total > (max_tokens := min(self.limits.max_request_tokens, self.limits.max_queued_tokens)):
            raise TooLongError(
                f"the inputs have {total} tokens in windows{addition}, and a request may have {max_tokens}"
            )
        if now >= request.deadline:
            self.counts.expired += 1
            raise DeadlineExceededError("the deadline passed before the request was read")
        latest_due = now + MAX_DUE_SHARE * (request.deadline - now)
        with self._changed:
            reserved = request.waiting_tokens
            self._change_waiting(request, -reserved)
            if total > reserved:  # otherwise its time was checked when the tokens were reserved
                self._refuse_late(model_queue, total, request.deadline)
            if self.waiting_tokens + total > self.limits.max_queued_tokens:
                raise self._queue_full(model_queue)
            if not model_queue.is_busy:  # an idle model does not save up its turns
                used = [busy.used_seconds for busy in self.model_queues if busy.is_busy]
                model_queue.used_seconds = max(model_queue.used_seconds, min(used, default=model_queue.used_seconds))
            self._change_waiting(request, total)
            request.scores, request.unscored = [None] * len(chunks), len(chunks)
            tokens_so_far = 0
            for position, chunk in enumerate(chunks):
                tokens_so_far += chunk.cost
                due = min(now + SECONDS_PER_TOKEN * tokens_so_far, latest_due)
                item = QueuedChunk(
                    due=due,
                    order=next(self._order),
                    cost=chunk.cost,
                    request=request,
                    position=position,
                    chunk=chunk.chunk,
                    key=chunk.key,
                    score_batch=chunk.score_batch,
                    is_decoding=chunk.is_decoding,
                )
                heapq.heappush(model_queue.heap, item)
            self._changed.notify()

    def _leave(self, pending: Sequence[PendingRequest]) -> None:
        """Stop counting a request; the chunks of its pending requests that still wait are discarded."""
        with self._changed:
            self.active_requests -= 1
            for request in pending:
                request.discarded = True
                self._change_waiting(request, -request.waiting_tokens)
                model_queue = request.model_queue
                discarded = 0
                if len(model_queue.heap) > MIN_HEAP_CLEANUP:
                    discarded = sum(item.request.discarded for item in model_queue.heap)
                if 2 * discarded > len(model_queue.heap):
                    model_queue.heap = [item for item in model_queue.heap if not item.request.discarded]
                    heapq.heapify(model_queue.heap)

    def _change_waiting(self, request: PendingRequest, tokens: int) -> None:
        """Add tokens, perhaps a negative number, to the waiting tokens of a request. The caller holds the lock."""
        request.waiting_tokens += tokens
        request.model_queue.waiting_tokens += tokens
        self.waiting_tokens += tokens

    # -- the engine thread

    def _work(self) -> None:
        """Run slices and batches until the scheduler is closed; the body of the engine thread."""
        while True:
            with self._changed:
                while (chosen := self._next_run()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            model_queue, run = chosen
            start = time.monotonic()
            finished: list[FinishedRequest]
            try:
                finished, done = run.advance(start + SLICE_SECONDS)
            except BaseException as error:  # a fault of ours; still, no request may wait for ever
                finished, done = [(item.request, None, public_error(error)) for item in run.items], True
            seconds = time.monotonic() - start
            run.seconds += seconds
            with self._changed:
                model_queue.running, self._run_end = None, 0.0
                model_queue.used_seconds += max(seconds, 1e-6)
                if not done:
                    model_queue.paused.append(run)
            if done:
                self._count_batch(model_queue, run)
            deliver(finished)
            del chosen, run, finished  # frees the answers while the thread waits

    def _count_batch(self, model_queue: ModelQueue[ScheduledEngine], run: BatchRun) -> None:
        """Count a finished batch, and update the measured speed of its model."""
        seconds = max(run.seconds, 1e-6)
        if model_queue.recent_seconds or run.cost >= FIRST_BATCH_SHARE * model_queue.token_budget:
            model_queue.recent_tokens = SPEED_DECAY * model_queue.recent_tokens + run.cost
            model_queue.recent_seconds = SPEED_DECAY * model_queue.recent_seconds + seconds
        self.counts.batches += 1
        self.counts.sequences += len(run.items)
        self.counts.tokens += run.cost
        if self._on_batch is not None:
            self._on_batch(len(run.items), run.cost, seconds)

    def _next_run(self) -> tuple[ModelQueue[ScheduledEngine], BatchRun] | None:
        """Return the next run and its model, of the model that used the least time; None if nothing waits."""
        if self._closed:
            return None
        for model_queue in sorted(self.model_queues, key=lambda model_queue: model_queue.used_seconds):
            now = time.monotonic()
            run = model_queue._next_run(now, self.counts)
            if run is None:
                continue
            if not run.started:
                for item in run.items:
                    self._change_waiting(item.request, -item.cost)
            model_queue.running = run
            if run.is_decoding:
                seconds = min(SLICE_SECONDS, run.remaining_cost / model_queue.tokens_per_second)
            else:
                seconds = run.cost / model_queue.tokens_per_second
            self._run_end = now + seconds
            return model_queue, run
        return None
