"""A batch on the engine thread: it runs in time slices, and again in parts if one of its inputs makes it fail."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from heedful.infer.encoded_input import Chunk
from heedful.infer.finite import scores_are_finite
from heedful.infer.scheduling.errors import DeadlineExceededError, InferenceFailedError, public_error
from heedful.infer.scheduling.limits import QueueCounters, ScheduledEngine, token_cost
from heedful.model.decode import Decoding
from heedful.tasks.generation import GenerationConfig

# function of the chunks of a batch that returns their scores, or a text generation that the caller runs step by step
ScoreBatch = Callable[[list[Any]], Sequence[object] | Decoding]


@dataclass(kw_only=True, eq=False)
class PendingRequest:
    """A request, from its arrival in a queue until its future has the answer."""

    model_queue: Any  # its ModelQueue; Any, since that class's module imports this one
    engine: object
    deadline: float  # time.monotonic() after which nobody waits for the answer
    future: asyncio.Future[Any]
    is_disconnected: Callable[[], bool]  # whether its client disconnected, which the event loop may not know yet
    finish: Callable[[list[object]], object] = lambda scores: scores  # makes the answer from the scores of all chunks
    scores: list[object] = field(default_factory=list)  # scores of each chunk, or None before it is scored
    unscored: int = 0  # chunks without scores
    waiting_tokens: int = 0  # cost of its waiting chunks, see `token_cost`
    discarded: bool = False  # whether no further chunk runs: the client left, the request ended, or a chunk failed
    error: Exception | None = None  # error of one of its chunks

    def cancel(self) -> None:
        """Discard the request and cancel its future; may be called from any thread."""
        self.discarded = True
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.future.get_loop().call_soon_threadsafe(self.future.cancel)

    def is_abandoned(self, now: float) -> bool:
        """Return whether nobody waits for the answer any more; cancel the request if its client disconnected."""
        if self.discarded or now >= self.deadline:
            return True
        if self.is_disconnected():
            self.cancel()
        return self.discarded


class QueuedChunk(NamedTuple):
    """A waiting chunk of a request. Chunks are ordered by `due`, then by `order`."""

    due: float  # time.monotonic() by which it should run; the earliest runs first
    order: int  # unique number, so that comparisons need no further field
    cost: int  # tokens, see `token_cost`
    request: PendingRequest
    position: int  # index of the chunk in `PendingRequest.scores`
    chunk: object
    key: object  # only chunks with the same key share a batch
    score_batch: ScoreBatch
    is_decoding: bool  # whether `score_batch` returns a Decoding


class NewChunk(NamedTuple):
    """A chunk before it is queued; see `QueuedChunk` for the fields."""

    cost: int
    chunk: object
    key: object
    score_batch: ScoreBatch
    is_decoding: bool


def new_chunk(engine: ScheduledEngine, chunk: Chunk, top_k: int, writing: GenerationConfig | None) -> NewChunk:
    """Return a chunk to queue; its key lets chunks of one engine, answer head and settings share a batch."""
    generates = chunk.answer_head.generate is not None
    settings = (writing or engine.writing) if generates else writing

    def score_batch(batch: list[Chunk]) -> Sequence[object] | Decoding:
        return engine.decode(batch, settings) if generates else engine.score(batch, settings, top_k=top_k)

    key = id(engine), top_k, settings, id(chunk.answer_head)
    return NewChunk(token_cost(len(chunk.encoded), settings), chunk, key, score_batch, generates)


FinishedRequest = tuple[PendingRequest, object, Exception | None]  # (request, answer, error)
ScoredChunk = tuple[QueuedChunk, object, Exception | None]  # (chunk, scores, error)


class BatchRun:
    """A batch that has left the queue. A text generation may take several slices; any other batch takes one."""

    def __init__(self, items: list[QueuedChunk], counts: QueueCounters) -> None:
        self.items = items
        self.cost = sum(item.cost for item in items)
        self.due = min(item.due for item in items)
        self.is_decoding = items[0].is_decoding
        self.started = False
        self.seconds = 0.0  # time on the engine thread so far
        self._counts = counts
        self._decoding: Decoding | None = None  # the text generation that is running
        self._slice_end = 0.0  # time.monotonic() at which the current slice should end
        self._results = self._score_isolating_failures(items)

    @property
    def remaining_cost(self) -> float:
        """The estimated cost in tokens of the steps that have not run yet."""
        if self._decoding is None or not self._decoding.max_new_tokens:
            return self.cost
        return self.cost * (1 - self._decoding.steps / self._decoding.max_new_tokens)

    def advance(self, slice_end: float) -> tuple[list[FinishedRequest], bool]:
        """Run one slice.

        Args:
            slice_end: time.monotonic() after which a text generation takes no further step.

        Returns:
            The requests that this slice finished, and whether the batch is done.
        """
        self.started = True
        self._slice_end = slice_end
        finished: list[FinishedRequest] = []
        for result in self._results:
            if result is None:
                return finished, False
            finished += self._store_scores(*result)
        return finished, True

    def _store_scores(self, item: QueuedChunk, scores: object, error: Exception | None) -> list[FinishedRequest]:
        """Store the scores or the error of a chunk; return its request if the request is now finished."""
        request = item.request
        if request.error is not None:
            return []
        request.scores[item.position] = scores
        request.unscored -= 1
        request.error = error
        if error is not None:
            self._counts.failed += isinstance(error, InferenceFailedError)  # clients can fix other errors
            request.discarded = True  # the scores of its other chunks would not be used
            return [(request, None, error)]
        if request.unscored or request.discarded:
            return []
        try:
            return [(request, request.finish(request.scores), None)]
        except BaseException as failure:
            error = public_error(failure)
            self._counts.failed += isinstance(error, InferenceFailedError)
            return [(request, None, error)]

    def _score_isolating_failures(self, items: list[QueuedChunk]) -> Iterator[ScoredChunk | None]:
        """Yield the scores or the error of each chunk of a batch, and None at the end of each slice.

        If a group of chunks fails, a binary search finds one chunk at fault, and the other chunks run again without it.
        A chunk that fails costs at most log2(n) + 1 further runs.
        """
        groups, is_first = [items], True
        while groups:
            group = groups.pop()
            is_single = len(group) == 1
            group, error = yield from self._run_group(group, is_first)
            is_first = False
            if error is None:
                continue
            suspects, not_scored = group, []  # one of the suspects makes the group fail
            while len(suspects) > 1:
                first_half, second_half = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
                failed, half_error = yield from self._run_group(first_half, False)
                if half_error is None:
                    suspects = second_half
                else:
                    suspects, error = failed, half_error
                    not_scored += second_half
            if not_scored or is_single:
                yield suspects[0], None, error
            else:
                groups.append(suspects)  # all other chunks succeeded: the suspect may succeed by itself
            if not_scored:
                groups.append(not_scored)

    def _run_group(
        self, group: list[QueuedChunk], is_first: bool
    ) -> Generator[ScoredChunk | None, None, tuple[list[QueuedChunk], Exception | None]]:
        """Score a group of chunks and yield its results; return (chunks that failed together, error) or ([], None)."""
        now = time.monotonic()
        if all(item.request.is_abandoned(now) for item in group):
            for item in group:
                yield item, None, _deadline_error()
            return [], None
        self._counts.retries += not is_first
        try:
            outcome = group[0].score_batch([item.chunk for item in group])
            scores_by_number: Mapping[int, object] = {} if isinstance(outcome, Decoding) else dict(enumerate(outcome))
            assert isinstance(outcome, Decoding) or len(scores_by_number) == len(group)
        except BaseException as error:
            return group, public_error(error)
        unscored = dict(enumerate(group))
        for number, scores in scores_by_number.items():
            yield _check_finite(unscored.pop(number), scores)
        self._decoding = outcome if isinstance(outcome, Decoding) else None
        while self._decoding is not None and not self._decoding.done:
            try:
                scores_by_number = self._decoding.step()  # each slice has at least one step
            except BaseException as error:
                return list(unscored.values()), public_error(error)
            for number, scores in scores_by_number.items():
                yield _check_finite(unscored.pop(number), scores)
            if self._decoding.done or time.monotonic() < self._slice_end:
                continue
            yield None
            now = time.monotonic()
            for number in [number for number, item in unscored.items() if item.request.is_abandoned(now)]:
                self._decoding.cancel([number])
                yield unscored.pop(number), None, _deadline_error()
        return [], None


def _check_finite(item: QueuedChunk, scores: object) -> ScoredChunk:
    """Return a chunk with its scores, and with an error if they are not finite."""
    return item, scores, None if scores_are_finite(scores) else InferenceFailedError("its scores are not finite")


def _deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before the answer was there")


def deliver(finished: list[FinishedRequest]) -> None:
    """Complete the futures of finished requests, with one call per event loop; may be called from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[FinishedRequest]] = {}
    for result in finished:
        by_loop.setdefault(result[0].future.get_loop(), []).append(result)
    for loop, results in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_complete_futures, results)


def _complete_futures(finished: list[FinishedRequest]) -> None:
    for request, answer, error in finished:
        if request.future.done():
            continue
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(answer)
