"""The queue before one engine thread: bounds, order, deadlines, cancelled clients, poisoned inputs, several models."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.infer.scheduling.scheduler as queue_module
from heedful.errors import HeedfulError
from heedful.infer.encoded_input import Chunk, EncodedInput
from heedful.infer.engine import Engine
from heedful.infer.scheduling.errors import (
    DeadlineExceededError,
    InferenceFailedError,
    QueueFullError,
    TooLongError,
    UnavailableError,
)
from heedful.infer.scheduling.limits import QueueLimits
from heedful.infer.scheduling.scheduler import Scheduler
from heedful.model.decode import BeamSearch, Decoding, GeneratedTokens, Greedy, Sampling
from heedful.tasks.embed import EMBED_HEAD
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.seq2seq import SEQ2SEQ_HEAD
from heedful.tokenizer import Encoding
from tests.support.model_folders import make, make_decoder


class Fake:
    """An engine whose tokens are letters: each input is one chunk, or as many as there are spaces between them."""

    token_budget = 4096

    def __init__(self, seconds: float = 0.0, name: str = "") -> None:
        self.seconds, self.name = seconds, name
        self.batches: list[list[str]] = []
        self.go = threading.Event()
        self.go.set()

    @property
    def stages(self) -> list[tuple[Any, float]]:
        return [(self, 0.0)]

    def tokenize(self, inputs: Sequence[Any]) -> list[EncodedInput]:
        if "panic" in inputs:
            raise BaseException("the tokenizer panicked")
        if "wrong" in inputs:
            raise HeedfulError("input 0 is wrong")
        return [
            EncodedInput(text, EMBED_HEAD, [Chunk(EMBED_HEAD, encoded(part), []) for part in text.split(" ") if part])
            for text in inputs
        ]

    def score(self, chunks: Sequence[Chunk], writing: Any = None, **more: Any) -> list[Any]:
        texts = [bytes(chunk.encoded.ids).decode() for chunk in chunks]
        self.batches.append(texts)
        assert self.go.wait(20)
        time.sleep(self.seconds)
        if any("!" in text for text in texts):
            raise RuntimeError("poisoned")
        return [torch.tensor(math.nan if "?" in text else float(len(text))) for text in texts]

    def answer(self, asked: EncodedInput, scores: Sequence[Any], *, top_k: int = 5) -> dict[str, Any]:
        return {"text": asked.engine_input, "scores": [float(score) for score in scores], "of": self.name}


class Slow(Fake):
    """One whose batches move a clock on, and say whose they are."""

    def __init__(self, clock: list[float], step: float, order: list[str], name: str = "") -> None:
        super().__init__(name=name)
        self.clock, self.step, self.order = clock, step, order

    def score(self, chunks: Sequence[Chunk], writing: Any = None, **more: Any) -> list[Any]:
        scores = super().score(chunks, writing, **more)
        self.clock[0] += self.step
        self.order.append(self.name)
        return scores


def encoded(text: str) -> Encoding:
    """One token for each letter."""
    ids = tuple(text.encode())
    return Encoding(ids=ids, types=ids, segments=(0,) * len(ids), offsets=((0, 0),) * len(ids), words=(0,) * len(ids))


@pytest.fixture
def make_scheduler() -> Iterator[Callable[..., Scheduler]]:
    """Queues that are closed afterwards."""
    queues: list[Scheduler] = []

    def make(limits: QueueLimits | None = None, **more: Any) -> Scheduler:
        queues.append(Scheduler(limits, **more))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


async def until(true: Callable[[], bool]) -> None:
    """Wait for something, not for ever."""
    for _ in range(5_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def held(model_queue: Any, engine: Fake) -> asyncio.Task[Any]:
    """The engine thread is in a batch until engine.go is set."""
    engine.go.clear()
    before = len(engine.batches)
    task = asyncio.create_task(model_queue.ask(["held"], deadline=soon()))
    await until(lambda: len(engine.batches) > before)
    return task


def test_requests_are_batched_and_answered_in_order(make_scheduler: Any) -> None:
    engine = Fake()
    queue = make_scheduler()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        first = await held(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n}", "ab cde"], deadline=soon())) for n in range(20)]
        await until(lambda: queue.active_requests == 21 and queue.waiting_tokens == 130)
        engine.go.set()
        for n, (answers, tokens) in enumerate(await asyncio.gather(*tasks)):
            assert [answer["text"] for answer in answers] == [f"{n}", "ab cde"]
            assert answers[1]["scores"] == [2.0, 3.0] and tokens == len(f"{n}") + 5
        await first
        assert (await model_queue.ask(["  "], deadline=soon()))[0] == [{"text": "  ", "scores": [], "of": ""}]

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [1, 60]
    assert (queue.active_requests, queue.waiting_tokens, model_queue.waiting_tokens, model_queue.heap) == (0, 0, 0, [])


def test_no_batch_takes_what_somebody_asked_who_left(make_scheduler: Any) -> None:
    engine = Fake()
    queue = make_scheduler()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        first = await held(model_queue, engine)
        gone = asyncio.create_task(
            model_queue.ask(["gone"], deadline=soon(), is_disconnected=lambda: queue.waiting_tokens >= 9)
        )
        stays = asyncio.create_task(model_queue.ask(["stays"], deadline=soon(), is_disconnected=lambda: False))
        await until(lambda: queue.waiting_tokens == 9)
        engine.go.set()
        assert (await stays)[0][0]["text"] == "stays"
        await asyncio.wait([first, gone], timeout=10)  # the event loop alone might not hear of it before the deadline
        assert gone.cancelled() and queue.counts.cancelled == 1

    asyncio.run(main())
    assert engine.batches == [["held"], ["stays"]]
    assert (queue.active_requests, queue.waiting_tokens, model_queue.waiting_tokens, model_queue.heap) == (0, 0, 0, [])


def test_the_caps_are_never_exceeded(make_scheduler: Any) -> None:
    engine = Fake(0.001)
    queue = make_scheduler(
        QueueLimits(max_concurrent_requests=8, max_queued_tokens=60, max_request_tokens=40, max_batch_tokens=20)
    )
    model_queue = queue.add_model(engine)
    seen = []

    async def one(n: int) -> str:
        try:
            await model_queue.ask(["abcdefghij " * (n % 4 + 1)], deadline=soon())
        except QueueFullError:
            return "full"
        finally:
            seen.append((queue.active_requests, queue.waiting_tokens))
        return "answered"

    async def main() -> list[str]:
        with pytest.raises(TooLongError, match="50 tokens in windows, and a request may have 40"):
            await model_queue.ask(["abcdefghij " * 5], deadline=soon())
        ends = []
        for _ in range(5):
            ends += await asyncio.gather(*(one(n) for n in range(30)))
        return ends

    ends = asyncio.run(main())
    assert {"full", "answered"} == set(ends)
    assert max(requests for requests, _ in seen) <= 8 and max(tokens for _, tokens in seen) <= 60
    assert max(sum(map(len, batch)) for batch in engine.batches) <= 20
    assert queue.counts.full == ends.count("full")
    assert (queue.active_requests, queue.waiting_tokens) == (0, 0)


def test_loading_and_draining_are_unavailable(make_scheduler: Any) -> None:
    queue, engine = make_scheduler(), Fake()
    model_queue = queue.add_model()

    async def main() -> None:
        with pytest.raises(UnavailableError, match="loading"):
            await model_queue.ask(["a"], deadline=soon())
        model_queue.engine = engine
        first = await held(model_queue, engine)
        second = asyncio.create_task(model_queue.ask(["b"], deadline=soon()))
        await asyncio.sleep(0.01)
        queue.drain()
        with pytest.raises(UnavailableError, match="stopping"):
            await model_queue.ask(["c"], deadline=soon())
        engine.go.set()
        assert (await first)[0][0]["text"] == "held" and (await second)[0][0]["text"] == "b"

    asyncio.run(main())
    assert queue.active_requests == 0


def test_an_expired_request_is_told_at_once_and_never_started(make_scheduler: Any) -> None:
    queue, engine = make_scheduler(), Fake()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        first = await held(model_queue, engine)
        start = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await model_queue.ask(["late"], deadline=start + 0.05)
        assert time.monotonic() - start < 10  # the batch before it takes 20 s
        assert queue.waiting_tokens == 0
        with pytest.raises(DeadlineExceededError):
            await model_queue.ask(["too late"], deadline=time.monotonic())
        engine.go.set()
        await first
        await model_queue.ask(["after"], deadline=soon())

    asyncio.run(main())
    assert engine.batches == [["held"], ["after"]]
    assert queue.counts.expired == 2


def test_batches_and_promises_fit_the_time_that_is_left(make_scheduler: Any) -> None:
    engine = Fake()
    queue = make_scheduler()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        first = await held(model_queue, engine)
        model_queue.recent_tokens, model_queue.recent_seconds = 1.0, 1.0  # a token a second
        deadline = soon(100)
        tasks = [asyncio.create_task(model_queue.ask(["x" * 10], deadline=deadline)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 16)  # 4 of them fit into half of 100 s
        refused = [task.exception() for task in tasks if task.done()]
        assert all(isinstance(error, QueueFullError) for error in refused) and queue.estimated_wait() == 40
        with pytest.raises(QueueFullError):  # before its words are looked up, or what is wrong with it
            await model_queue.ask(["wrong"], deadline=soon(60))
        with queue._changed:
            now = time.monotonic()
            late = model_queue._pop_batch(now + 75)
            assert len(late) == 1  # half of 25 s is enough for one
            batch = late + model_queue._pop_batch(now)
            assert [item.cost for item in batch] == [10] * 4
            for item in batch:
                queue_module.heapq.heappush(model_queue.heap, item)
        engine.go.set()
        await first
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(task.exception() is None for task in tasks) == 4 and queue.estimated_wait() == 0

    asyncio.run(main())


def test_cancelled_clients_never_reach_the_model(make_scheduler: Any) -> None:
    queue, engine = make_scheduler(QueueLimits(max_batch_tokens=8)), Fake()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        first = await held(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n:03}"], deadline=soon())) for n in range(200)]
        await until(lambda: queue.waiting_tokens == 600)
        for task in tasks[::2]:
            task.cancel()
        ends = asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: queue.waiting_tokens == 300)
        engine.go.set()
        assert [isinstance(end, asyncio.CancelledError) for end in await ends] == [True, False] * 100
        await first

    asyncio.run(main())
    reached = {text for batch in engine.batches[1:] for text in batch}
    assert reached == {f"{n:03}" for n in range(1, 200, 2)}
    assert queue.counts.cancelled == 100 and model_queue.heap == [] and queue.waiting_tokens == 0


@pytest.mark.parametrize("step", [0.01, 0.05])
def test_what_is_short_goes_first_but_what_is_long_is_not_starved(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """By a clock that each batch moves on, while four short requests always wait."""
    clock = [time.monotonic()]
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    queue, engine = make_scheduler(QueueLimits(max_batch_tokens=32)), Slow(clock, step, [])
    engine.seconds = 0.01  # in which those that were answered ask again
    model_queue = queue.add_model(engine)
    done = asyncio.Event()

    async def shorts() -> None:
        while not done.is_set():
            await model_queue.ask(["s" * 30], deadline=clock[0] + 20)

    async def main() -> float:
        first = await held(model_queue, engine)
        feeders = [asyncio.create_task(shorts()) for _ in range(4)]
        start = clock[0]
        long = asyncio.create_task(model_queue.ask([" ".join(["l" * 32] * 20)], deadline=start + 4))
        await until(lambda: queue.waiting_tokens == 4 * 30 + 20 * 32)
        engine.go.set()
        await long
        took = clock[0] - start
        done.set()
        await asyncio.gather(first, *feeders)
        return took

    assert asyncio.run(main()) < 4
    order = [batch[0][0] for batch in engine.batches]
    alone = order.index("l")
    assert order[1:5] == ["s"] * 4  # they arrived before it or beside it, and are due first
    if step == 0.01:
        assert order[alone : alone + 20].count("s") >= 5  # and it is no wall to those that come later


@settings(max_examples=25)
@given(
    n=st.integers(1, 70), poison=st.sets(st.integers(0, 69), max_size=3), nan=st.sets(st.integers(0, 69), max_size=2)
)
def test_a_poisoned_input_fails_alone(n: int, poison: set[int], nan: set[int]) -> None:
    queue, engine = Scheduler(QueueLimits(max_batch_tokens=10_000)), Fake()
    model_queue = queue.add_model(engine)
    poison, nan = {number for number in poison if number < n}, {number for number in nan if number < n}

    async def main() -> list[Any]:
        first = await held(model_queue, engine)
        texts = [f"{number}" + "!" * (number in poison) + "?" * (number in nan) for number in range(n)]
        late = soon(100_000)  # time enough for all of them in one batch, however slow the first one was
        tasks = [asyncio.create_task(model_queue.ask([text], deadline=late)) for text in texts]
        await until(lambda: queue.waiting_tokens == sum(map(len, texts)))
        engine.go.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        ends = asyncio.run(main())
    finally:
        queue.close()
    assert {number for number, end in enumerate(ends) if isinstance(end, InferenceFailedError)} == poison | nan
    assert all(isinstance(end, InferenceFailedError | tuple) for end in ends)
    assert len(engine.batches) - 2 == queue.counts.retries <= len(poison) * (math.ceil(math.log2(n)) + 1)


def test_a_batch_that_fails_once_is_no_ones_fault(make_scheduler: Any) -> None:
    queue, engine = make_scheduler(), Fake()
    model_queue = queue.add_model(engine)
    score, calls = engine.score, []

    def flaky(chunks: Sequence[Chunk], writing: Any = None, **more: Any) -> list[Any]:
        calls.append(len(chunks))
        if len(calls) == 2:
            raise MemoryError
        return score(chunks, writing)

    engine.score = flaky  # type: ignore[method-assign]

    async def main() -> None:
        first = await held(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n}"], deadline=soon())) for n in range(8)]
        await until(lambda: queue.waiting_tokens == 8)
        engine.go.set()
        assert [answers[0]["text"] for answers, _ in await asyncio.gather(*tasks)] == [f"{n}" for n in range(8)]
        await first

    asyncio.run(main())
    assert calls == [1, 8, 4, 2, 1, 1]


def test_errors_are_the_askers_or_ours(make_scheduler: Any) -> None:
    queue, engine = make_scheduler(), Fake()
    model_queue = queue.add_model(engine)

    async def main() -> None:
        with pytest.raises(HeedfulError, match="input 0 is wrong"):
            await model_queue.ask(["wrong"], deadline=soon())
        with pytest.raises(InferenceFailedError) as caught:
            await model_queue.ask(["panic"], deadline=soon())
        assert "panicked" not in str(caught.value) + caught.value.reason
        assert caught.value.reason.startswith("BaseException in tokenize:")
        assert (await model_queue.ask(["fine"], deadline=soon()))[1] == 4
        with pytest.raises(InferenceFailedError):
            await model_queue.call(lambda engine: 1 / 0, tokens=5, deadline=soon())
        assert await model_queue.call(lambda engine_: engine_ is engine, tokens=5, deadline=soon())
        assert await model_queue.tokenize(lambda engine_: engine_ is engine, deadline=soon())

    asyncio.run(main())
    assert queue.active_requests == queue.waiting_tokens == 0


def test_models_take_turns_by_the_time_they_use(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    queue, order = make_scheduler(QueueLimits(max_batch_tokens=4)), []
    slow, quick = Slow(clock, 0.01, order, "slow"), Slow(clock, 0.001, order, "quick")
    model_queues = [queue.add_model(slow), queue.add_model(quick)]

    async def main() -> None:
        first = await held(model_queues[0], slow)
        tasks = [
            asyncio.create_task(model_queue.ask([f"{n:04}"], deadline=clock[0] + 20))
            for n in range(40)
            for model_queue in model_queues
        ]
        await until(lambda: queue.waiting_tokens == 4 * 80)
        slow.go.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(main())
    assert order[:22].count("slow") in (2, 3)  # as much time for each: ten quick batches beside each slow one
    assert order.count("slow") == 41 and order.count("quick") == 40


def test_an_engine_is_exchanged_under_load(make_scheduler: Any) -> None:
    queue = make_scheduler(QueueLimits(max_batch_tokens=16))
    model_queue = queue.add_model(Fake(name="0"))
    answered = []

    async def one(n: int) -> None:
        answers, _ = await model_queue.ask([f"{n:03}", "x y z"], deadline=soon())
        assert {answer["of"] for answer in answers} == {answers[0]["of"]}
        answered.append(answers[0]["of"])

    async def main() -> None:
        tasks = []
        for number in range(4):
            tasks += [asyncio.create_task(one(n)) for n in range(30)]
            await until(lambda number=number: len(answered) > 30 * number)
            model_queue.engine = Fake(name=str(number + 1))
        await asyncio.gather(*tasks, one(99))

    asyncio.run(main())
    assert len(answered) == 121 and set(answered) >= {"0", "4"}


def test_answers_are_those_of_the_engine_alone(make_scheduler: Any, tmp_path: Any) -> None:
    engine = Engine(make(tmp_path, "tag"))
    queue = make_scheduler(QueueLimits(max_batch_tokens=300))
    model_queue = queue.add_model(engine)
    draw = random.Random(1)
    words = ["ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first"]
    texts = [" ".join(draw.choices(words, k=draw.choice([0, 1, 5, 30, 120]))) for _ in range(60)]
    groups = [texts[n : n + n % 4 + 1] for n in range(50)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(model_queue.ask(group, deadline=soon(6_000)) for group in groups))

    for group, (answers, _) in zip(groups, asyncio.run(main()), strict=True):
        for text, answer in zip(group, answers, strict=True):
            (alone,) = engine([text])
            assert [word["label"] for word in alone["words"]] == [word["label"] for word in answer["words"]]
            mine, expected = ([word["probability"] for word in result["words"]] for result in (answer, alone))
            assert mine == pytest.approx(expected, abs=1e-5)


# -- decodings in slices ----------------------------------------------------------------------------------------------


class Steps(Decoding):
    """A decoding of `most` steps of equal time; a text is done after as many steps as it has letters."""

    def __init__(self, texts: list[str], most: int, seconds: float, steps: list[str]) -> None:
        super().__init__(len(texts), most)
        self.texts, self.seconds, self.log = dict(enumerate(texts)), seconds, steps

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        time.sleep(self.seconds)
        self.texts = {number: text for number, text in self.texts.items() if number not in self._cancelled}
        self.log.append("+".join(self.texts.values()))
        if self.steps == 2 and any("!" in text for text in self.texts.values()):
            raise RuntimeError("poisoned")
        last = self.steps + 1 == self.max_new_tokens
        ended = {number: text for number, text in self.texts.items() if last or len(text) <= self.steps + 1}
        self.texts = {number: text for number, text in self.texts.items() if number not in ended}
        self.done = not self.texts
        score = {number: math.nan if "?" in text else -1.0 for number, text in ended.items()}
        return {
            number: [GeneratedTokens(tokens=list(text.encode()), log_probability=score[number])]
            for number, text in ended.items()
        }


class Writer(Fake):
    """A fake engine that repeats its input, a letter in each step."""

    writing = GenerationConfig(max_new_tokens=1_000)

    def __init__(self, seconds: float = 0.005) -> None:
        super().__init__(seconds)
        self.steps: list[str] = []

    def tokenize(self, inputs: Sequence[Any]) -> list[EncodedInput]:
        return [EncodedInput(text, SEQ2SEQ_HEAD, [Chunk(SEQ2SEQ_HEAD, encoded(text), [])]) for text in inputs]

    def decode(self, chunks: Sequence[Chunk], writing: Any = None) -> Decoding:
        texts = [bytes(chunk.encoded.ids).decode() for chunk in chunks]
        self.batches.append(texts)
        return Steps(texts, writing.max_new_tokens, self.seconds, self.steps)

    def answer(self, asked: EncodedInput, scores: Sequence[Any], *, top_k: int = 5) -> dict[str, Any]:
        ((written, *_),) = scores
        return {"text": bytes(written.tokens).decode()}


def test_a_long_decoding_lets_other_models_in_between(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "SLICE_SECONDS", 0.02)
    queue, writer, second = make_scheduler(), Writer(), Fake()
    writes, reads = queue.add_model(writer), queue.add_model(second)

    async def main() -> None:
        long = asyncio.create_task(
            writes.ask(["l" * 200], deadline=soon(60), writing=GenerationConfig(max_new_tokens=200))
        )
        await until(lambda: len(writer.steps) > 2)
        waits = []
        for _ in range(10):
            start, before = time.monotonic(), len(writer.steps)
            await reads.ask(["short"], deadline=soon())
            waits.append((time.monotonic() - start, len(writer.steps) - before))
            await asyncio.sleep(0.01)
        assert not long.done() and queue.decodings == 1
        assert sorted(steps for _, steps in waits)[5] <= 2 * 0.02 / 0.005 + 1
        assert (await long)[0] == [{"text": "l" * 200}]
        assert queue.decodings == 0

    asyncio.run(main())
    assert len(writer.steps) == 200 and queue.counts.retries == 0


def test_a_short_decoding_passes_a_long_one_of_its_model(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "SLICE_SECONDS", 0.01)
    queue, writer = make_scheduler(), Writer(0.002)
    model_queue, ends = queue.add_model(writer), []

    async def one(text: str, most: int) -> None:
        assert (await model_queue.ask([text], deadline=soon(60), writing=GenerationConfig(max_new_tokens=most)))[0] == [
            {"text": text}
        ]
        ends.append(text)

    async def main() -> None:
        long = asyncio.create_task(one("l" * 300, 300))
        await until(lambda: len(writer.steps) > 2)
        shorts = [asyncio.create_task(one(letter * 5, 5)) for letter in "abc"]
        await asyncio.gather(long, *shorts)

    asyncio.run(main())
    assert ends[-1] == "l" * 300 and len(ends) == 4
    assert len(writer.batches) <= 4 and (queue.waiting_tokens, queue.active_requests) == (0, 0)


def test_decodings_held_at_once_are_few(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "SLICE_SECONDS", 0.001)
    queue, writer = make_scheduler(QueueLimits(max_batch_tokens=8)), Writer(0.002)
    model_queue, held_at_once = queue.add_model(writer), []

    async def watch() -> None:
        while True:
            held_at_once.append(queue.decodings)
            await asyncio.sleep(0.0005)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        tasks = []
        for n in range(150, 50, -20):  # each is due before those that were begun
            before = len(writer.steps)
            tasks.append(
                asyncio.create_task(
                    model_queue.ask(["x" * n], deadline=soon(60), writing=GenerationConfig(max_new_tokens=n))
                )
            )
            await until(lambda before=before: len(writer.steps) > before + 2)
        await asyncio.gather(*tasks)
        watching.cancel()

    asyncio.run(main())
    assert max(held_at_once) == queue_module.MAX_DECODINGS


def test_texts_leave_a_decoding_when_nobody_waits_and_when_they_are_done(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "SLICE_SECONDS", 0.03)
    queue, writer = make_scheduler(), Writer(0.02)
    model_queue = queue.add_model(writer)
    gone = threading.Event()

    async def main() -> None:
        first = await held(model_queue, writer_gate(writer))
        how: Any = {"writing": GenerationConfig(max_new_tokens=100)}
        cancelled = asyncio.create_task(model_queue.ask(["c" * 100], deadline=soon(), **how))
        left = asyncio.create_task(model_queue.ask(["g" * 100], deadline=soon(), is_disconnected=gone.is_set, **how))
        late = asyncio.create_task(model_queue.ask(["d" * 100], deadline=soon(1.0), **how))
        stays = asyncio.create_task(model_queue.ask(["s" * 60], deadline=soon(), **how))
        brief = asyncio.create_task(model_queue.ask(["b" * 3], deadline=soon(), **how))
        await until(lambda: queue.waiting_tokens >= 860)
        writer.go.set()
        await brief
        assert not stays.done() and len(writer.steps) < 30  # as soon as it is written, whatever the others do
        cancelled.cancel()
        gone.set()
        assert (await stays)[0] == [{"text": "s" * 60}]
        with pytest.raises(DeadlineExceededError):
            await late
        await asyncio.wait([cancelled, left], timeout=10)
        assert cancelled.cancelled() and left.cancelled()
        await first
        await until(lambda: queue.decodings == 0)

    asyncio.run(main())
    rows = [set(step) - {"+"} for step in writer.steps if "held" not in step]
    assert rows[0] == set("cgdsb") and rows[40] <= set("ds") and (queue.waiting_tokens, queue.active_requests) == (0, 0)


def writer_gate(writer: Writer) -> Writer:
    """One whose next batch waits until writer.go is set."""
    decode = writer.decode

    def gated(chunks: Sequence[Chunk], writing: Any = None) -> Decoding:
        decoded = decode(chunks, writing)
        assert writer.go.wait(20)
        return decoded

    writer.decode = gated  # type: ignore[method-assign]
    return writer


@settings(max_examples=15)
@given(
    n=st.integers(1, 20), poison=st.sets(st.integers(0, 19), max_size=2), nan=st.sets(st.integers(0, 19), max_size=2)
)
def test_a_text_on_which_a_decoding_fails_fails_alone(n: int, poison: set[int], nan: set[int]) -> None:
    queue, writer = Scheduler(QueueLimits(max_batch_tokens=100_000)), Writer(0.0)
    model_queue = queue.add_model(writer)
    poison, nan = {number for number in poison if number < n}, {number for number in nan if number < n}

    async def main() -> list[Any]:
        first = await held(model_queue, writer_gate(writer))
        texts = [
            f"{number:02}" + "." * (number % 5) + "!!" * (number in poison) + "?" * (number in nan)
            for number in range(n)
        ]
        how: Any = {"deadline": soon(100_000), "writing": GenerationConfig(max_new_tokens=9)}
        tasks = [asyncio.create_task(model_queue.ask([text], **how)) for text in texts]
        await until(lambda: queue.waiting_tokens == sum(map(len, texts)) + 9 * n)
        writer.go.set()
        await first
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end[0][0]["text"] for end in ends if isinstance(end, tuple)] == [
            text for number, text in enumerate(texts) if number not in poison | nan
        ]
        return ends

    try:
        ends = asyncio.run(main())
    finally:
        queue.close()
    assert {number for number, end in enumerate(ends) if isinstance(end, InferenceFailedError)} == poison | nan
    assert queue.counts.retries <= len(poison) * (math.ceil(math.log2(n)) + 2)


@pytest.mark.parametrize("how", [Greedy(), Sampling(temperature=1.5), BeamSearch(num_beams=3, num_return_sequences=2)])
def test_texts_written_in_slices_are_those_of_the_engine_alone(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, how: Any
) -> None:
    """With a slice for each step, and another model in between."""
    monkeypatch.setattr(queue_module, "SLICE_SECONDS", 0.0)
    engine, queue = Engine(make_decoder(tmp_path)), make_scheduler()
    writes, reads = queue.add_model(engine), queue.add_model(Fake())
    texts = ["a b c", "d", "h g f e d c", "b b"]
    writing = {most: GenerationConfig(how=how, max_new_tokens=most, seed=most) for most in (1, 7, 30)}

    async def main() -> dict[int, Any]:
        tasks = {
            most: asyncio.create_task(writes.ask(texts, deadline=soon(60), writing=job))
            for most, job in writing.items()
        }
        while not all(task.done() for task in tasks.values()):
            await reads.ask(["x"], deadline=soon())
        return {most: (await task)[0] for most, task in tasks.items()}

    for most, answers in asyncio.run(main()).items():
        alone = Engine(engine.loaded, writing=writing[most])(texts)
        assert answers == alone


# -- admission --------------------------------------------------------------------------------------------------------


def test_what_other_models_have_to_do_counts_as_far_as_their_turns(make_scheduler: Any) -> None:
    queue = make_scheduler()
    busy, calm = queue.add_model(Fake()), queue.add_model(Fake())
    for model_queue, waiting in ((busy, 1_000), (calm, 20)):
        model_queue.recent_tokens, model_queue.recent_seconds, model_queue.waiting_tokens = (
            10.0,
            1.0,
            waiting,
        )  # ten tokens a second
    assert queue.estimated_wait() == pytest.approx(102)
    assert queue.estimated_wait(calm) == pytest.approx(2 + 2) and queue.estimated_wait(calm, 10) == pytest.approx(3 + 3)
    assert queue.estimated_wait(busy) == pytest.approx(100 + 2)
    for model_queue in (busy, calm):
        model_queue.waiting_tokens = 0


def test_what_does_not_fit_is_refused_before_it_is_tokenised(make_scheduler: Any) -> None:
    """By the characters of its texts, as tokens of earlier requests had them; those being tokenised count."""
    engine, read = Fake(), []
    queue = make_scheduler(QueueLimits(max_queued_tokens=100, max_request_tokens=60))
    model_queue = queue.add_model(engine)

    def encode(engine: Any, inputs: Sequence[Any]) -> list[EncodedInput]:
        read.append(inputs)
        return engine.tokenize(inputs)

    async def main() -> None:
        for _ in range(60):  # a token for each letter, and two around a text
            await model_queue.ask(["x" * 40], deadline=soon(), sizes=[40])
        first = await held(model_queue, engine)
        fits = [
            asyncio.create_task(model_queue.ask(["x" * 38], deadline=soon(), sizes=[38], encode=encode))
            for _ in range(2)
        ]
        await until(lambda: len(read) == 2 and queue.waiting_tokens >= 76)
        read.clear()
        with pytest.raises(QueueFullError):
            await model_queue.ask(["x" * 38], deadline=soon(), sizes=[38], encode=encode)
        assert not read
        engine.go.set()
        await asyncio.gather(first, *fits)

    asyncio.run(main())
    assert queue.counts.full == 1 and queue.waiting_tokens == model_queue.waiting_tokens == 0
