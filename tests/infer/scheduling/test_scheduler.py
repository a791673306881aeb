"""The scheduler: limits, order, deadlines, cancelled clients, inputs that make the model fail, several models."""

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

import heedful.infer.scheduling.scheduler as scheduler_module
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
from tests.support.model_folders import make_decoder, make_model_dir


class FakeEngine:
    """An engine with one token per character and one chunk per word. A word with "!" makes a batch fail, "?" is NaN."""

    token_budget = 4096

    def __init__(self, seconds: float = 0.0, name: str = "") -> None:
        self.seconds, self.name = seconds, name
        self.batches: list[list[str]] = []
        self.may_run = threading.Event()  # batches wait until it is set
        self.may_run.set()

    @property
    def stages(self) -> list[tuple[Any, float]]:
        return [(self, 0.0)]

    def tokenize(self, inputs: Sequence[Any]) -> list[EncodedInput]:
        if "panic" in inputs:
            raise BaseException("the tokenizer panicked")
        if "wrong" in inputs:
            raise HeedfulError("input 0 is wrong")
        return [
            EncodedInput(text, EMBED_HEAD, [Chunk(EMBED_HEAD, encode(word), []) for word in text.split(" ") if word])
            for text in inputs
        ]

    def score(self, chunks: Sequence[Chunk], writing: Any = None, **options: Any) -> list[Any]:
        texts = [bytes(chunk.encoded.ids).decode() for chunk in chunks]
        self.batches.append(texts)
        assert self.may_run.wait(20)
        time.sleep(self.seconds)
        if any("!" in text for text in texts):
            raise RuntimeError("poisoned")
        return [torch.tensor(math.nan if "?" in text else float(len(text))) for text in texts]

    def answer(self, encoded_input: EncodedInput, scores: Sequence[Any], *, top_k: int = 5) -> dict[str, Any]:
        return {"text": encoded_input.engine_input, "scores": [float(score) for score in scores], "engine": self.name}


class TimedEngine(FakeEngine):
    """An engine whose batches advance a clock by `step` seconds and append the engine's name to `order`."""

    def __init__(self, clock: list[float], step: float, order: list[str], name: str = "") -> None:
        super().__init__(name=name)
        self.clock, self.step, self.order = clock, step, order

    def score(self, chunks: Sequence[Chunk], writing: Any = None, **options: Any) -> list[Any]:
        scores = super().score(chunks, writing, **options)
        self.clock[0] += self.step
        self.order.append(self.name)
        return scores


def encode(text: str) -> Encoding:
    """Return an encoding with one token for each byte."""
    ids = tuple(text.encode())
    return Encoding(ids=ids, types=ids, segments=(0,) * len(ids), offsets=((0, 0),) * len(ids), words=(0,) * len(ids))


@pytest.fixture
def make_scheduler() -> Iterator[Callable[..., Scheduler]]:
    """Make schedulers, which are closed after the test."""
    schedulers: list[Scheduler] = []

    def make(limits: QueueLimits | None = None, **options: Any) -> Scheduler:
        schedulers.append(Scheduler(limits, **options))
        return schedulers[-1]

    yield make
    for scheduler in schedulers:
        scheduler.close()


def deadline_in(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, for a limited time."""
    for _ in range(5_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not become true")


async def occupy_engine(model_queue: Any, engine: FakeEngine) -> asyncio.Task[Any]:
    """Occupy the engine thread with a batch until engine.may_run is set."""
    engine.may_run.clear()
    batches_before = len(engine.batches)
    task = asyncio.create_task(model_queue.ask(["held"], deadline=deadline_in()))
    await until(lambda: len(engine.batches) > batches_before)
    return task


def test_requests_are_batched_and_answered_in_order(make_scheduler: Any) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n}", "ab cde"], deadline=deadline_in())) for n in range(20)]
        await until(lambda: scheduler.active_requests == 21 and scheduler.waiting_tokens == 130)
        engine.may_run.set()
        for n, (answers, tokens) in enumerate(await asyncio.gather(*tasks)):
            assert [answer["text"] for answer in answers] == [f"{n}", "ab cde"]
            assert answers[1]["scores"] == [2.0, 3.0] and tokens == len(f"{n}") + 5
        await first
        assert (await model_queue.ask(["  "], deadline=deadline_in()))[0] == [
            {"text": "  ", "scores": [], "engine": ""}
        ]

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [1, 60]
    assert scheduler.active_requests == scheduler.waiting_tokens == model_queue.waiting_tokens == 0
    assert model_queue.heap == []


def test_requests_of_disconnected_clients_are_not_run(make_scheduler: Any) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        disconnected = asyncio.create_task(
            model_queue.ask(["gone"], deadline=deadline_in(), is_disconnected=lambda: scheduler.waiting_tokens >= 9)
        )
        stays = asyncio.create_task(model_queue.ask(["stays"], deadline=deadline_in(), is_disconnected=lambda: False))
        await until(lambda: scheduler.waiting_tokens == 9)
        engine.may_run.set()
        assert (await stays)[0][0]["text"] == "stays"
        await asyncio.wait([first, disconnected], timeout=10)  # without the check, it would wait for its deadline
        assert disconnected.cancelled() and scheduler.counts.cancelled == 1

    asyncio.run(main())
    assert engine.batches == [["held"], ["stays"]]
    assert scheduler.active_requests == scheduler.waiting_tokens == model_queue.waiting_tokens == 0
    assert model_queue.heap == []


def test_the_caps_are_never_exceeded(make_scheduler: Any) -> None:
    engine = FakeEngine(0.001)
    scheduler = make_scheduler(
        QueueLimits(max_concurrent_requests=8, max_queued_tokens=60, max_request_tokens=40, max_batch_tokens=20)
    )
    model_queue = scheduler.add_model(engine)
    observed_requests, observed_tokens = [], []

    async def ask(n: int) -> str:
        try:
            await model_queue.ask(["abcdefghij " * (n % 4 + 1)], deadline=deadline_in())
        except QueueFullError:
            return "full"
        finally:
            observed_requests.append(scheduler.active_requests)
            observed_tokens.append(scheduler.waiting_tokens)
        return "answered"

    async def main() -> list[str]:
        with pytest.raises(TooLongError, match="50 tokens in windows, and a request may have 40"):
            await model_queue.ask(["abcdefghij " * 5], deadline=deadline_in())
        outcomes = []
        for _ in range(5):
            outcomes += await asyncio.gather(*(ask(n) for n in range(30)))
        return outcomes

    outcomes = asyncio.run(main())
    assert {"full", "answered"} == set(outcomes)
    assert max(observed_requests) <= 8 and max(observed_tokens) <= 60
    assert max(sum(map(len, batch)) for batch in engine.batches) <= 20
    assert scheduler.counts.full == outcomes.count("full")
    assert (scheduler.active_requests, scheduler.waiting_tokens) == (0, 0)


def test_requests_are_refused_while_loading_and_draining(make_scheduler: Any) -> None:
    scheduler, engine = make_scheduler(), FakeEngine()
    model_queue = scheduler.add_model()

    async def main() -> None:
        with pytest.raises(UnavailableError, match="loading"):
            await model_queue.ask(["a"], deadline=deadline_in())
        model_queue.engine = engine
        first = await occupy_engine(model_queue, engine)
        second = asyncio.create_task(model_queue.ask(["b"], deadline=deadline_in()))
        await asyncio.sleep(0.01)
        scheduler.drain()
        with pytest.raises(UnavailableError, match="stopping"):
            await model_queue.ask(["c"], deadline=deadline_in())
        engine.may_run.set()
        assert (await first)[0][0]["text"] == "held" and (await second)[0][0]["text"] == "b"

    asyncio.run(main())
    assert scheduler.active_requests == 0


def test_an_expired_request_is_told_at_once_and_never_started(make_scheduler: Any) -> None:
    scheduler, engine = make_scheduler(), FakeEngine()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        start = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await model_queue.ask(["late"], deadline=start + 0.05)
        assert time.monotonic() - start < 10  # the batch before would take 20 s
        assert scheduler.waiting_tokens == 0
        with pytest.raises(DeadlineExceededError):
            await model_queue.ask(["too late"], deadline=time.monotonic())
        engine.may_run.set()
        await first
        await model_queue.ask(["after"], deadline=deadline_in())

    asyncio.run(main())
    assert engine.batches == [["held"], ["after"]]
    assert scheduler.counts.expired == 2


def test_batches_and_accepted_requests_fit_into_the_remaining_time(make_scheduler: Any) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        model_queue.recent_tokens, model_queue.recent_seconds = 1.0, 1.0  # one token per second
        deadline = deadline_in(100)
        tasks = [asyncio.create_task(model_queue.ask(["x" * 10], deadline=deadline)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 16)  # 4 requests fit into half of 100 s
        refused = [task.exception() for task in tasks if task.done()]
        assert all(isinstance(error, QueueFullError) for error in refused) and scheduler.estimated_wait() == 40
        with pytest.raises(QueueFullError):  # before the input is checked
            await model_queue.ask(["wrong"], deadline=deadline_in(60))
        with scheduler._changed:
            now = time.monotonic()
            late = model_queue._pop_batch(now + 75)
            assert len(late) == 1  # half of 25 s is enough for one request
            batch = late + model_queue._pop_batch(now)
            assert [item.cost for item in batch] == [10] * 4
            for item in batch:
                scheduler_module.heapq.heappush(model_queue.heap, item)
        engine.may_run.set()
        await first
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(task.exception() is None for task in tasks) == 4 and scheduler.estimated_wait() == 0

    asyncio.run(main())


def test_cancelled_clients_never_reach_the_model(make_scheduler: Any) -> None:
    scheduler, engine = make_scheduler(QueueLimits(max_batch_tokens=8)), FakeEngine()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n:03}"], deadline=deadline_in())) for n in range(200)]
        await until(lambda: scheduler.waiting_tokens == 600)
        for task in tasks[::2]:
            task.cancel()
        outcomes = asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: scheduler.waiting_tokens == 300)
        engine.may_run.set()
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in await outcomes] == [True, False] * 100
        await first

    asyncio.run(main())
    scored_texts = {text for batch in engine.batches[1:] for text in batch}
    assert scored_texts == {f"{n:03}" for n in range(1, 200, 2)}
    assert scheduler.counts.cancelled == 100 and model_queue.heap == [] and scheduler.waiting_tokens == 0


@pytest.mark.parametrize("step", [0.01, 0.05])
def test_short_requests_run_first_without_starving_long_ones(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Four short requests always wait; the clock advances with each batch."""
    clock = [time.monotonic()]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler, engine = make_scheduler(QueueLimits(max_batch_tokens=32)), TimedEngine(clock, step, [])
    engine.seconds = 0.01  # time in which answered clients ask again
    model_queue = scheduler.add_model(engine)
    done = asyncio.Event()

    async def ask_short_requests() -> None:
        while not done.is_set():
            await model_queue.ask(["s" * 30], deadline=clock[0] + 20)

    async def main() -> float:
        first = await occupy_engine(model_queue, engine)
        feeders = [asyncio.create_task(ask_short_requests()) for _ in range(4)]
        start = clock[0]
        long = asyncio.create_task(model_queue.ask([" ".join(["l" * 32] * 20)], deadline=start + 4))
        await until(lambda: scheduler.waiting_tokens == 4 * 30 + 20 * 32)
        engine.may_run.set()
        await long
        seconds = clock[0] - start
        done.set()
        await asyncio.gather(first, *feeders)
        return seconds

    assert asyncio.run(main()) < 4
    order = [batch[0][0] for batch in engine.batches]
    first_long = order.index("l")
    assert order[1:5] == ["s"] * 4  # they arrived before the long request or with it, and are due first
    if step == 0.01:
        assert order[first_long : first_long + 20].count("s") >= 5  # later short requests overtake its chunks


@settings(max_examples=25)
@given(
    n=st.integers(1, 70), failing=st.sets(st.integers(0, 69), max_size=3), nan=st.sets(st.integers(0, 69), max_size=2)
)
def test_an_input_that_makes_its_batch_fail_fails_by_itself(n: int, failing: set[int], nan: set[int]) -> None:
    scheduler, engine = Scheduler(QueueLimits(max_batch_tokens=10_000)), FakeEngine()
    model_queue = scheduler.add_model(engine)
    failing, nan = {number for number in failing if number < n}, {number for number in nan if number < n}

    async def main() -> list[Any]:
        first = await occupy_engine(model_queue, engine)
        texts = [f"{number}" + "!" * (number in failing) + "?" * (number in nan) for number in range(n)]
        deadline = deadline_in(100_000)  # enough time for one batch of all, even if the first batch was slow
        tasks = [asyncio.create_task(model_queue.ask([text], deadline=deadline)) for text in texts]
        await until(lambda: scheduler.waiting_tokens == sum(map(len, texts)))
        engine.may_run.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        outcomes = asyncio.run(main())
    finally:
        scheduler.close()
    failed = {number for number, outcome in enumerate(outcomes) if isinstance(outcome, InferenceFailedError)}
    assert failed == failing | nan
    assert all(isinstance(outcome, InferenceFailedError | tuple) for outcome in outcomes)
    assert len(engine.batches) - 2 == scheduler.counts.retries <= len(failing) * (math.ceil(math.log2(n)) + 1)


def test_all_requests_are_answered_if_a_batch_fails_once(make_scheduler: Any) -> None:
    scheduler, engine = make_scheduler(), FakeEngine()
    model_queue = scheduler.add_model(engine)
    score, calls = engine.score, []

    def flaky(chunks: Sequence[Chunk], writing: Any = None, **options: Any) -> list[Any]:
        calls.append(len(chunks))
        if len(calls) == 2:
            raise MemoryError
        return score(chunks, writing)

    engine.score = flaky  # type: ignore[method-assign]

    async def main() -> None:
        first = await occupy_engine(model_queue, engine)
        tasks = [asyncio.create_task(model_queue.ask([f"{n}"], deadline=deadline_in())) for n in range(8)]
        await until(lambda: scheduler.waiting_tokens == 8)
        engine.may_run.set()
        results = await asyncio.gather(*tasks)
        assert [answers[0]["text"] for answers, _ in results] == [f"{n}" for n in range(8)]
        await first

    asyncio.run(main())
    assert calls == [1, 8, 4, 2, 1, 1]


def test_errors_of_the_client_are_raised_and_others_hidden(make_scheduler: Any) -> None:
    scheduler, engine = make_scheduler(), FakeEngine()
    model_queue = scheduler.add_model(engine)

    async def main() -> None:
        with pytest.raises(HeedfulError, match="input 0 is wrong"):
            await model_queue.ask(["wrong"], deadline=deadline_in())
        with pytest.raises(InferenceFailedError) as raised:
            await model_queue.ask(["panic"], deadline=deadline_in())
        assert "panicked" not in str(raised.value) + raised.value.reason
        assert raised.value.reason.startswith("BaseException in tokenize:")
        assert (await model_queue.ask(["fine"], deadline=deadline_in()))[1] == 4
        with pytest.raises(InferenceFailedError):
            await model_queue.call(lambda engine: 1 / 0, tokens=5, deadline=deadline_in())
        assert await model_queue.call(lambda engine_: engine_ is engine, tokens=5, deadline=deadline_in())
        assert await model_queue.tokenize(lambda engine_: engine_ is engine, deadline=deadline_in())

    asyncio.run(main())
    assert scheduler.active_requests == scheduler.waiting_tokens == 0


def test_models_share_the_engine_thread_by_time(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler, order = make_scheduler(QueueLimits(max_batch_tokens=4)), []
    slow, quick = TimedEngine(clock, 0.01, order, "slow"), TimedEngine(clock, 0.001, order, "quick")
    model_queues = [scheduler.add_model(slow), scheduler.add_model(quick)]

    async def main() -> None:
        first = await occupy_engine(model_queues[0], slow)
        tasks = [
            asyncio.create_task(model_queue.ask([f"{n:04}"], deadline=clock[0] + 20))
            for n in range(40)
            for model_queue in model_queues
        ]
        await until(lambda: scheduler.waiting_tokens == 4 * 80)
        slow.may_run.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(main())
    assert order[:22].count("slow") in (2, 3)  # equal times: ten quick batches for each slow one
    assert order.count("slow") == 41 and order.count("quick") == 40


def test_an_engine_is_exchanged_under_load(make_scheduler: Any) -> None:
    scheduler = make_scheduler(QueueLimits(max_batch_tokens=16))
    model_queue = scheduler.add_model(FakeEngine(name="0"))
    engine_names = []

    async def ask(n: int) -> None:
        answers, _ = await model_queue.ask([f"{n:03}", "x y z"], deadline=deadline_in())
        assert {answer["engine"] for answer in answers} == {answers[0]["engine"]}
        engine_names.append(answers[0]["engine"])

    async def main() -> None:
        tasks = []
        for number in range(4):
            tasks += [asyncio.create_task(ask(n)) for n in range(30)]
            await until(lambda number=number: len(engine_names) > 30 * number)
            model_queue.engine = FakeEngine(name=str(number + 1))
        await asyncio.gather(*tasks, ask(99))

    asyncio.run(main())
    assert len(engine_names) == 121 and set(engine_names) >= {"0", "4"}


def test_answers_equal_those_of_the_engine(make_scheduler: Any, tmp_path: Any) -> None:
    engine = Engine(make_model_dir(tmp_path, "tag"))
    scheduler = make_scheduler(QueueLimits(max_batch_tokens=300))
    model_queue = scheduler.add_model(engine)
    generator = random.Random(1)
    words = ["ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first"]
    texts = [" ".join(generator.choices(words, k=generator.choice([0, 1, 5, 30, 120]))) for _ in range(60)]
    groups = [texts[n : n + n % 4 + 1] for n in range(50)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(model_queue.ask(group, deadline=deadline_in(6_000)) for group in groups))

    for group, (answers, _) in zip(groups, asyncio.run(main()), strict=True):
        for text, answer in zip(group, answers, strict=True):
            (expected,) = engine([text])
            assert [word["label"] for word in expected["words"]] == [word["label"] for word in answer["words"]]
            probabilities, expected_probabilities = (
                [word["probability"] for word in result["words"]] for result in (answer, expected)
            )
            assert probabilities == pytest.approx(expected_probabilities, abs=1e-5)


# -- text generation in slices ----------------------------------------------------------------------------------------


class FakeDecoding(Decoding):
    """A decoding with steps of equal time; a text is finished after as many steps as it has characters."""

    def __init__(self, texts: list[str], max_new_tokens: int, seconds: float, log: list[str]) -> None:
        super().__init__(len(texts), max_new_tokens)
        self.texts, self.seconds, self.log = dict(enumerate(texts)), seconds, log

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        time.sleep(self.seconds)
        self.texts = {number: text for number, text in self.texts.items() if number not in self._cancelled}
        self.log.append("+".join(self.texts.values()))
        if self.steps == 2 and any("!" in text for text in self.texts.values()):
            raise RuntimeError("poisoned")
        is_last_step = self.steps + 1 == self.max_new_tokens
        finished = {number: text for number, text in self.texts.items() if is_last_step or len(text) <= self.steps + 1}
        self.texts = {number: text for number, text in self.texts.items() if number not in finished}
        self.done = not self.texts
        score = {number: math.nan if "?" in text else -1.0 for number, text in finished.items()}
        return {
            number: [GeneratedTokens(tokens=list(text.encode()), log_probability=score[number])]
            for number, text in finished.items()
        }


class FakeGenerator(FakeEngine):
    """An engine that generates a copy of its input, one character in each step."""

    writing = GenerationConfig(max_new_tokens=1_000)

    def __init__(self, seconds: float = 0.005) -> None:
        super().__init__(seconds)
        self.steps: list[str] = []

    def tokenize(self, inputs: Sequence[Any]) -> list[EncodedInput]:
        return [EncodedInput(text, SEQ2SEQ_HEAD, [Chunk(SEQ2SEQ_HEAD, encode(text), [])]) for text in inputs]

    def decode(self, chunks: Sequence[Chunk], writing: Any = None) -> Decoding:
        texts = [bytes(chunk.encoded.ids).decode() for chunk in chunks]
        self.batches.append(texts)
        return FakeDecoding(texts, writing.max_new_tokens, self.seconds, self.steps)

    def answer(self, encoded_input: EncodedInput, scores: Sequence[Any], *, top_k: int = 5) -> dict[str, Any]:
        ((generated, *_),) = scores
        return {"text": bytes(generated.tokens).decode()}


def test_other_models_run_between_the_slices_of_a_long_decoding(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SLICE_SECONDS", 0.02)
    scheduler, writer, other = make_scheduler(), FakeGenerator(), FakeEngine()
    writer_queue, other_queue = scheduler.add_model(writer), scheduler.add_model(other)

    async def main() -> None:
        long = asyncio.create_task(
            writer_queue.ask(["l" * 200], deadline=deadline_in(60), writing=GenerationConfig(max_new_tokens=200))
        )
        await until(lambda: len(writer.steps) > 2)
        waits = []
        for _ in range(10):
            start, steps_before = time.monotonic(), len(writer.steps)
            await other_queue.ask(["short"], deadline=deadline_in())
            waits.append((time.monotonic() - start, len(writer.steps) - steps_before))
            await asyncio.sleep(0.01)
        assert not long.done() and scheduler.decodings == 1
        assert sorted(steps for _, steps in waits)[5] <= 2 * 0.02 / 0.005 + 1
        assert (await long)[0] == [{"text": "l" * 200}]
        assert scheduler.decodings == 0

    asyncio.run(main())
    assert len(writer.steps) == 200 and scheduler.counts.retries == 0


def test_a_short_decoding_overtakes_a_long_one_of_the_same_model(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SLICE_SECONDS", 0.01)
    scheduler, writer = make_scheduler(), FakeGenerator(0.002)
    model_queue, finished_texts = scheduler.add_model(writer), []

    async def ask(text: str, max_new_tokens: int) -> None:
        writing = GenerationConfig(max_new_tokens=max_new_tokens)
        assert (await model_queue.ask([text], deadline=deadline_in(60), writing=writing))[0] == [{"text": text}]
        finished_texts.append(text)

    async def main() -> None:
        long = asyncio.create_task(ask("l" * 300, 300))
        await until(lambda: len(writer.steps) > 2)
        shorts = [asyncio.create_task(ask(letter * 5, 5)) for letter in "abc"]
        await asyncio.gather(long, *shorts)

    asyncio.run(main())
    assert finished_texts[-1] == "l" * 300 and len(finished_texts) == 4
    assert len(writer.batches) <= 4 and (scheduler.waiting_tokens, scheduler.active_requests) == (0, 0)


def test_the_number_of_started_decodings_is_limited(make_scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SLICE_SECONDS", 0.001)
    scheduler, writer = make_scheduler(QueueLimits(max_batch_tokens=8)), FakeGenerator(0.002)
    model_queue, decoding_counts = scheduler.add_model(writer), []

    async def watch() -> None:
        while True:
            decoding_counts.append(scheduler.decodings)
            await asyncio.sleep(0.0005)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        tasks = []
        for n in range(150, 50, -20):  # each request is due before those that have started
            steps_before = len(writer.steps)
            tasks.append(
                asyncio.create_task(
                    model_queue.ask(["x" * n], deadline=deadline_in(60), writing=GenerationConfig(max_new_tokens=n))
                )
            )
            await until(lambda steps_before=steps_before: len(writer.steps) > steps_before + 2)
        await asyncio.gather(*tasks)
        watching.cancel()

    asyncio.run(main())
    assert max(decoding_counts) == scheduler_module.MAX_DECODINGS


def test_texts_leave_a_decoding_when_they_are_finished_or_abandoned(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SLICE_SECONDS", 0.03)
    scheduler, writer = make_scheduler(), FakeGenerator(0.02)
    model_queue = scheduler.add_model(writer)
    disconnect = threading.Event()

    async def main() -> None:
        first = await occupy_engine(model_queue, gate_decodings(writer))
        options: Any = {"writing": GenerationConfig(max_new_tokens=100)}
        cancelled = asyncio.create_task(model_queue.ask(["c" * 100], deadline=deadline_in(), **options))
        left = asyncio.create_task(
            model_queue.ask(["g" * 100], deadline=deadline_in(), is_disconnected=disconnect.is_set, **options)
        )
        late = asyncio.create_task(model_queue.ask(["d" * 100], deadline=deadline_in(1.0), **options))
        stays = asyncio.create_task(model_queue.ask(["s" * 60], deadline=deadline_in(), **options))
        brief = asyncio.create_task(model_queue.ask(["b" * 3], deadline=deadline_in(), **options))
        await until(lambda: scheduler.waiting_tokens >= 860)
        writer.may_run.set()
        await brief
        assert not stays.done() and len(writer.steps) < 30  # it is answered as soon as it is finished
        cancelled.cancel()
        disconnect.set()
        assert (await stays)[0] == [{"text": "s" * 60}]
        with pytest.raises(DeadlineExceededError):
            await late
        await asyncio.wait([cancelled, left], timeout=10)
        assert cancelled.cancelled() and left.cancelled()
        await first
        await until(lambda: scheduler.decodings == 0)

    asyncio.run(main())
    rows = [set(step) - {"+"} for step in writer.steps if "held" not in step]
    assert rows[0] == set("cgdsb") and rows[40] <= set("ds")
    assert scheduler.waiting_tokens == scheduler.active_requests == 0


def gate_decodings(writer: FakeGenerator) -> FakeGenerator:
    """Make batches of a generator wait until writer.may_run is set."""
    decode = writer.decode

    def gated(chunks: Sequence[Chunk], writing: Any = None) -> Decoding:
        decoding = decode(chunks, writing)
        assert writer.may_run.wait(20)
        return decoding

    writer.decode = gated  # type: ignore[method-assign]
    return writer


@settings(max_examples=15)
@given(
    n=st.integers(1, 20), failing=st.sets(st.integers(0, 19), max_size=2), nan=st.sets(st.integers(0, 19), max_size=2)
)
def test_a_text_that_makes_its_decoding_fail_fails_by_itself(n: int, failing: set[int], nan: set[int]) -> None:
    scheduler, writer = Scheduler(QueueLimits(max_batch_tokens=100_000)), FakeGenerator(0.0)
    model_queue = scheduler.add_model(writer)
    failing, nan = {number for number in failing if number < n}, {number for number in nan if number < n}

    async def main() -> list[Any]:
        first = await occupy_engine(model_queue, gate_decodings(writer))
        texts = [
            f"{number:02}" + "." * (number % 5) + "!!" * (number in failing) + "?" * (number in nan)
            for number in range(n)
        ]
        options: Any = {"deadline": deadline_in(100_000), "writing": GenerationConfig(max_new_tokens=9)}
        tasks = [asyncio.create_task(model_queue.ask([text], **options)) for text in texts]
        await until(lambda: scheduler.waiting_tokens == sum(map(len, texts)) + 9 * n)
        writer.may_run.set()
        await first
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        answered_texts = [outcome[0][0]["text"] for outcome in outcomes if isinstance(outcome, tuple)]
        assert answered_texts == [text for number, text in enumerate(texts) if number not in failing | nan]
        return outcomes

    try:
        outcomes = asyncio.run(main())
    finally:
        scheduler.close()
    failed = {number for number, outcome in enumerate(outcomes) if isinstance(outcome, InferenceFailedError)}
    assert failed == failing | nan
    assert scheduler.counts.retries <= len(failing) * (math.ceil(math.log2(n)) + 2)


@pytest.mark.parametrize("how", [Greedy(), Sampling(temperature=1.5), BeamSearch(num_beams=3, num_return_sequences=2)])
def test_texts_generated_in_slices_equal_those_of_the_engine(
    make_scheduler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, how: Any
) -> None:
    """Each step is a slice, and another model runs between slices."""
    monkeypatch.setattr(scheduler_module, "SLICE_SECONDS", 0.0)
    engine, scheduler = Engine(make_decoder(tmp_path)), make_scheduler()
    writer_queue, other_queue = scheduler.add_model(engine), scheduler.add_model(FakeEngine())
    texts = ["a b c", "d", "h g f e d c", "b b"]
    configs = {
        max_new_tokens: GenerationConfig(how=how, max_new_tokens=max_new_tokens, seed=max_new_tokens)
        for max_new_tokens in (1, 7, 30)
    }

    async def main() -> dict[int, Any]:
        tasks = {
            max_new_tokens: asyncio.create_task(writer_queue.ask(texts, deadline=deadline_in(60), writing=config))
            for max_new_tokens, config in configs.items()
        }
        while not all(task.done() for task in tasks.values()):
            await other_queue.ask(["x"], deadline=deadline_in())
        return {max_new_tokens: (await task)[0] for max_new_tokens, task in tasks.items()}

    for max_new_tokens, answers in asyncio.run(main()).items():
        expected = Engine(engine.loaded, writing=configs[max_new_tokens])(texts)
        assert answers == expected


# -- admission --------------------------------------------------------------------------------------------------------


def test_the_estimated_wait_counts_other_models_only_for_their_turns(make_scheduler: Any) -> None:
    scheduler = make_scheduler()
    busy, quiet = scheduler.add_model(FakeEngine()), scheduler.add_model(FakeEngine())
    for model_queue, waiting in ((busy, 1_000), (quiet, 20)):
        model_queue.recent_tokens, model_queue.recent_seconds, model_queue.waiting_tokens = (
            10.0,
            1.0,
            waiting,
        )  # ten tokens a second
    assert scheduler.estimated_wait() == pytest.approx(102)
    assert scheduler.estimated_wait(quiet) == pytest.approx(2 + 2)
    assert scheduler.estimated_wait(quiet, 10) == pytest.approx(3 + 3)
    assert scheduler.estimated_wait(busy) == pytest.approx(100 + 2)
    for model_queue in (busy, quiet):
        model_queue.waiting_tokens = 0


def test_a_request_that_does_not_fit_is_refused_before_it_is_tokenized(make_scheduler: Any) -> None:
    """Its tokens are estimated from its characters; requests that are being tokenized count as waiting."""
    engine, encoded = FakeEngine(), []
    scheduler = make_scheduler(QueueLimits(max_queued_tokens=100, max_request_tokens=60))
    model_queue = scheduler.add_model(engine)

    def log_and_tokenize(engine: Any, inputs: Sequence[Any]) -> list[EncodedInput]:
        encoded.append(inputs)
        return engine.tokenize(inputs)

    async def main() -> None:
        for _ in range(60):  # measures one token per character, besides two special tokens
            await model_queue.ask(["x" * 40], deadline=deadline_in(), sizes=[40])
        first = await occupy_engine(model_queue, engine)
        accepted = [
            asyncio.create_task(
                model_queue.ask(["x" * 38], deadline=deadline_in(), sizes=[38], encode=log_and_tokenize)
            )
            for _ in range(2)
        ]
        await until(lambda: len(encoded) == 2 and scheduler.waiting_tokens >= 76)
        encoded.clear()
        with pytest.raises(QueueFullError):
            await model_queue.ask(["x" * 38], deadline=deadline_in(), sizes=[38], encode=log_and_tokenize)
        assert not encoded
        engine.may_run.set()
        await asyncio.gather(first, *accepted)

    asyncio.run(main())
    assert scheduler.counts.full == 1 and scheduler.waiting_tokens == model_queue.waiting_tokens == 0
