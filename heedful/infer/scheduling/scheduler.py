"""The scheduler: one engine thread for the requests of many clients, batched by deadline and length, within limits."""

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
MAX_DUE_SHARE = 0.5  # share of its time limit after which any request is due, so that long ones do not starve
MAX_SKIPPED = 64  # maximum waiting chunks that may be skipped to fill a batch
BATCH_TIME_SHARE = 0.5  # maximum duration of a batch, as a share of the time left to its most urgent request
WAIT_TIME_SHARE = 0.5  # maximum expected wait for an answer, as a share of the time left; else the request is refused
FIRST_BATCH_SHARE = 0.25  # minimum share of the token budget in a batch from which the first speed is measured
SPEED_DECAY = 0.9  # weight of earlier batches in the measured speed, applied once for each new batch
SLICE_SECONDS = 0.05  # seconds after which a text generation leaves the engine thread to other batches
MAX_DECODINGS = 2  # text generations of a model that may have started, each with its KV cache; further ones wait
SPECIAL_TOKENS = 2  # special tokens around a text, for estimates
DENSITY_DECAY = 0.99  # weight of earlier requests in the tokens per character, applied once for each new request
MIN_HEAP_CLEANUP = 256  # waiting chunks above which a heap is rebuilt if most of them belong to discarded requests


T = TypeVar("T")
Encoded = list[EncodedInput] | Generator[None, None, list[EncodedInput]]  # tokenized in one turn, or in several
EngineType = TypeVar("EngineType", bound=ScheduledEngine, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskOptions:
    """Arguments of `ModelQueue.ask`; `pending` collects the requests that it makes, one for each stage."""

    pending: list[PendingRequest]
    deadline: float
    is_disconnected: Callable[[], bool]
    encode: Callable[[Any, Sequence[object]], Encoded] | None
    top_k: int
    writing: GenerationConfig | None


class ModelQueue(Generic[EngineType]):
    """The queue of one model. `engine` may be replaced at any time; a request keeps the engine that it began with."""

    def __init__(self, scheduler: Scheduler, engine: EngineType | None) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.heap: list[QueuedChunk] = []  # heap of waiting chunks; the first is due first
        self.used_seconds = 0.0  # time on the engine thread; the model with the least time runs next
        self.waiting_tokens = 0  # tokens of waiting requests; estimated for requests that are being tokenized
        self.paused: list[BatchRun] = []  # text generations between two slices
        self.running: BatchRun | None = None
        self.recent_tokens = 0.0  # tokens of finished batches, decayed by SPEED_DECAY
        self.recent_seconds = 0.0  # seconds of finished batches, decayed by SPEED_DECAY
        self._measured_characters = 1024.0  # characters of tokenized requests, decayed by DENSITY_DECAY
        self._measured_tokens = 256.0  # tokens of tokenized requests, decayed by DENSITY_DECAY

    @property
    def tokens_per_second(self) -> float:
        """The measured speed; infinite before the first measurement."""
        return self.recent_tokens / self.recent_seconds if self.recent_seconds else math.inf

    @property
    def estimated_seconds(self) -> float:
        """The estimated seconds for all waiting chunks and started text generations of this model."""
        decodings = list(self.paused)
        if self.running is not None and self.running.is_decoding:
            decodings.append(self.running)
        tokens = self.waiting_tokens + math.fsum(decoding.remaining_cost for decoding in decodings)
        return tokens / self.tokens_per_second

    @property
    def is_busy(self) -> bool:
        """Whether the model uses the engine thread or waits for it."""
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
            deadline: time.monotonic() after which the call raises a DeadlineExceededError.
            is_disconnected: Returns whether the client disconnected; any thread may call it. If so, no batch takes the
                request, and this call is cancelled.
            encode: Function of engine and inputs that tokenizes or refuses the inputs. If None, the engine tokenizes.
            top_k: Number of candidates that are listed for each mask.
            writing: Generation settings. If None, the engine's.
            sizes: Characters of each text to tokenize; for a cascade in stages, of each input. A request that does not
                fit according to these numbers is refused before it is tokenized.
            in_stages: Whether all stages of a cascade answer in turn; if false, only the last stage answers.

        Raises:
            RequestRefusedError: If the request is too long, its deadline too early, or the queue full.
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
        """Return the answers of one engine to inputs, and the number of tokens read."""
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
            scores_in_order = iter(scores)
            return [
                engine.answer(encoded_input, [next(scores_in_order) for _ in encoded_input.chunks], top_k=top_k)
                for encoded_input in encoded_inputs
            ]

        if not chunks:
            answers: list[Answer] = with_public_errors(lambda: finish([]))
            return answers, 0
        request.finish = finish
        new_chunks = [new_chunk(engine, chunk, top_k, writing) for chunk in chunks]
        addition = ", with the tokens that may be generated" if new_chunks[0].is_decoding else ""
        self.scheduler._add(request, new_chunks, addition)
        return await request.future, tokens

    def _estimate_cost(self, sizes: Sequence[int], writing: GenerationConfig | None) -> int:
        """Estimate the cost of texts from their numbers of characters, see `token_cost`."""
        tokens_per_character = self._measured_tokens / self._measured_characters
        return sum(token_cost(SPECIAL_TOKENS + math.ceil(tokens_per_character * size), writing) for size in sizes)

    def _measure_density(self, sizes: Sequence[int], tokens: int) -> None:
        """Update the measured tokens per character with the numbers of a tokenized request."""
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
        """Return function(engine), which the engine thread runs; it is queued like a chunk with `tokens` tokens."""
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
        """Return function(engine), which a tokenizing thread runs; `sizes` are the characters of each text."""
        async with self._entered(deadline) as (engine, _):
            return await self._run_in_tokenizer_pool(lambda: function(engine), deadline, is_disconnected, sizes)

    @contextlib.asynccontextmanager
    async def _entered(self, deadline: float) -> AsyncIterator[tuple[EngineType, list[PendingRequest]]]:
        """Count a request as active, and end it at its deadline whatever it waits for.

        Yields:
            The engine, and a list to which the caller appends the `PendingRequest`s that it makes.
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
        """Run a function in a tokenizing thread, and return its result; see `TokenizerPool.submit`."""
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
        """Return the run that is due first: a paused text generation or a new batch; None if nothing waits.

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

        The batch has the chunk that is due first and further chunks with the same key, in order of their due times, if
        they fit into the token budget and leave enough time to every request in the batch.
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
            limits: Limits of the scheduler. If None, the defaults of `QueueLimits`.
            tokenizer_threads: Number of threads that tokenize.
            on_batch: Called by the engine thread after each batch, with the batch's sequences, tokens and seconds.
        """
        self.limits = limits or QueueLimits()
        self.counts = QueueCounters()
        self.model_queues: list[ModelQueue[ScheduledEngine]] = []
        self.active_requests = 0  # requests that are waiting or running
        self.waiting_tokens = 0  # tokens of waiting requests, over all models
        self.draining = False
        self._run_end = 0.0  # time.monotonic() when the current slice or batch should end, or 0 if none runs
        self._closed = False
        self._on_batch = on_batch
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._tokenizer_pool = TokenizerPool(tokenizer_threads, self.limits.max_queued_characters)
        self._thread = threading.Thread(target=self._work, name="heedful-engine", daemon=True)
        self._thread.start()

    def add_model(self, engine: EngineType | None = None) -> ModelQueue[EngineType]:
        """Add a queue for a model, and return it; without an engine, the model counts as loading."""
        model_queue = ModelQueue(self, engine)
        with self._changed:
            self.model_queues.append(model_queue)
        return model_queue

    def estimated_wait(self, model_queue: ModelQueue[ScheduledEngine] | None = None, new_tokens: int = 0) -> float:
        """Estimate the seconds until all requests that run or wait now are answered.

        Args:
            model_queue: Count only the requests of this model. If None, of all models. Models take turns, so each other
                model adds at most as much time as this one needs.
            new_tokens: Tokens to be added to this model's queue.
        """
        run_seconds = max(0.0, self._run_end - time.monotonic())
        if model_queue is None:
            return run_seconds + math.fsum(model_queue.estimated_seconds for model_queue in self.model_queues)
        own_seconds = model_queue.estimated_seconds + new_tokens / model_queue.tokens_per_second
        other_queues = [queue for queue in self.model_queues if queue is not model_queue]
        other_seconds = math.fsum(min(own_seconds, queue.estimated_seconds) for queue in other_queues)
        return run_seconds + own_seconds + other_seconds

    @property
    def queued_characters(self) -> int:
        """The characters of long requests that wait to be tokenized or are being tokenized."""
        return self._tokenizer_pool.queued_characters

    @property
    def decodings(self) -> int:
        """The number of text generations that have started, including those that are paused between slices."""
        paused = sum(len(model_queue.paused) for model_queue in self.model_queues)
        running = [model_queue.running for model_queue in self.model_queues]
        return paused + sum(run is not None and run.is_decoding for run in running)

    def is_idle(self) -> bool:
        """Return whether no request waits or runs."""
        return self.active_requests == 0

    def drain(self) -> None:
        """Refuse new requests from now on; requests that were accepted are still answered."""
        self.draining = True

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads after the current batch; wait at most `seconds` for its end."""
        self.draining = True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tokenizer_pool.close()
        self._thread.join(seconds)

    # -- called by the event loop

    def _enter(self, model_queue: ModelQueue[EngineType], deadline: float) -> EngineType:
        """Count a new request, and return the engine for it; raises a RequestRefusedError if it is refused."""
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
        """Count a refused request, and return the error for it."""
        self.counts.full += 1
        return QueueFullError("too many requests wait already; try again later", self.estimated_wait(model_queue))

    def _refuse_late(self, model_queue: ModelQueue[ScheduledEngine], tokens: int, deadline: float) -> None:
        """Raise a QueueFullError if the expected wait exceeds WAIT_TIME_SHARE of the time until the deadline."""
        max_wait = WAIT_TIME_SHARE * (deadline - time.monotonic())
        if self.estimated_wait(model_queue) and self.estimated_wait(model_queue, tokens) > max_wait:
            raise self._queue_full(model_queue)

    def _reserve(self, request: PendingRequest, tokens: int) -> None:
        """Count the estimated tokens of a request as waiting before it is tokenized, or refuse the request."""
        # a request with more tokens than the limits is refused later, with the exact number in the message
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
            chunks: The request's chunks.
            addition: Text for the error message about what the number of tokens includes.
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
            if total > reserved:  # otherwise the wait was checked when the tokens were reserved
                self._refuse_late(model_queue, total, request.deadline)
            if self.waiting_tokens + total > self.limits.max_queued_tokens:
                raise self._queue_full(model_queue)
            if not model_queue.is_busy:  # a model that was idle gets no credit for it
                busy_seconds = [queue.used_seconds for queue in self.model_queues if queue.is_busy]
                used_seconds = model_queue.used_seconds
                model_queue.used_seconds = max(used_seconds, min(busy_seconds, default=used_seconds))
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
        """Stop counting a request as active, and discard those of its chunks that still wait."""
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
        """Add a number, which may be negative, to the waiting tokens of a request. The caller holds the lock."""
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
            except BaseException as error:  # a bug in the scheduler; still, no request may wait for ever
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
        """Return the next run with its queue, from the model that used the least time; None if nothing waits."""
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
