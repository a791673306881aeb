"""Load, deadlines, clients that leave, poison, panics, exchanged models, and answers under concurrency."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.infer.engine import Engine
from heedful.serve.routes import ENDPOINTS
from heedful.serve.run import RunningServer, background
from heedful.serve.settings import Limits, ServeSettings, Timeouts
from tests.support.http_client import Reply, ServerProcess, ask, ask_on, open_socket, record
from tests.support.model_folders import make

WORDS = ["ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first"]


class Held(Engine):
    """An engine whose batches wait until they may go, or take their time, or fail on some words."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        super().__init__(folder)
        self.seconds, self.go, self.batches = seconds, threading.Event(), []
        self.go.set()

    def tokenize(self, inputs: Sequence[Any]) -> Any:
        if any("panic" in str(item) for item in inputs):
            raise BaseException("the tokenizer panicked")
        return super().tokenize(inputs)

    def score(self, chunks: Any, writing: Any = None, **more: Any) -> Any:
        self.batches.append(len(chunks))
        assert self.go.wait(30)
        time.sleep(self.seconds)
        scores = super().score(chunks, writing, **more)
        bad, worse = self.tokenizer.id("love"), self.tokenizer.id("who")
        if any(worse in chunk.encoded.ids for chunk in chunks):
            raise RuntimeError("poisoned")
        return [
            score * float("nan") if bad in chunk.encoded.ids else score
            for chunk, score in zip(chunks, scores, strict=True)
        ]


@pytest.fixture
def held(folders: dict[str, str]) -> Any:
    """A server with such an engine."""
    calls: list[Any] = []

    def start(limits: Limits | None = None, timeouts: Timeouts | None = None, seconds: float = 0.0) -> Any:
        chosen = ServeSettings(limits=limits or Limits(), timeouts=timeouts or Timeouts())
        context = background({"tag": folders["tag"]}, chosen, loader=lambda folder: Held(folder, seconds))
        running = context.__enter__()
        calls.append(context)
        return running, running.service.model_queues["tag"].engine

    yield start
    for context in calls:
        context.__exit__(None, None, None)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def tag(port: int, text: str, **headers: str) -> Reply:
    return ask(port, "/token-classification", {"inputs": text}, **headers)


# -- load and deadlines ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_at_once_and_the_caps_hold(held: Any) -> None:
    running, _ = held(Limits(max_concurrent_requests=6, max_queued_tokens=60, max_request_tokens=20), seconds=0.01)
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            queue = running.service.queue
            seen.append((queue.active_requests, queue.waiting_tokens))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    replies: list[Reply] = []

    def hammer(worker: int) -> None:
        """Until enough were answered and enough refused, however fast either is."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            statuses = Counter(reply.status for reply in replies)
            if min(statuses[200], statuses[429]) >= 20:
                return
            replies.append(tag(running.port, "ada in paris and the cat"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hammer, range(16)))
    ended.set()
    watcher.join()
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) == {200, 429} and min(statuses.values()) >= 20, statuses
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status == 429)
    assert max(requests for requests, _ in seen) <= 6 and max(tokens for _, tokens in seen) <= 60
    assert tag(running.port, "ada").status == 200


def test_timeouts(held: Any) -> None:
    running, engine = held(timeouts=Timeouts(request_seconds=1.0, max_request_seconds=5.0))
    engine.go.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(tag, running.port, "ada", x_request_timeout_ms="4000")
        until(lambda: engine.batches == [1])
        start = time.monotonic()
        late = tag(running.port, "in paris", x_request_timeout_ms="100")
        assert late.status == 504 and late.json["error_type"] == "timeout"
        assert 0.1 <= time.monotonic() - start < 0.9
        assert tag(running.port, "in paris").status == 504
        assert time.monotonic() - start >= 1.0
        engine.go.set()
        assert first.result().status == 200
    assert tag(running.port, "after").status == 200
    assert engine.batches == [1, 1]  # what had expired was never started
    assert running.service.queue.counts.expired == 2


def test_clients_that_leave_never_reach_the_model(held: Any) -> None:
    running, engine = held()
    engine.go.clear()
    queue = running.service.queue
    body = json.dumps({"inputs": "ada in paris"}).encode()
    head = (
        "POST /token-classification HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}"
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tag, running.port, "first")
        until(lambda: engine.batches == [1])
        leaving = [open_socket(running.port) for _ in range(40)]
        for connection in leaving:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: queue.active_requests == 41 and queue.waiting_tokens == 40 * 5)
        _in_loop(running, lambda: time.sleep(0.5))  # the batch is made before the event loop hears of it
        for connection in leaving[::2]:
            connection.close()
        engine.go.set()
        assert first.result().status == 200
        for connection in leaving[1::2]:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.close()
    until(lambda: queue.counts.cancelled == 20 and queue.active_requests == queue.waiting_tokens == 0)
    assert sum(engine.batches) == 21


def test_who_leaves_unheard_holds_no_place(held: Any) -> None:
    """A byte of a next request keeps the event loop from reading on, and so from seeing that the client closed."""
    running, engine = held()
    engine.go.clear()
    queue, body = running.service.queue, json.dumps({"inputs": "ada in paris"}).encode()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tag, running.port, "first")
        until(lambda: engine.batches == [1])
        connection = open_socket(running.port)
        head = b"POST /token-classification HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"x-request-timeout-ms: 300000\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until(lambda: queue.active_requests == 2 and queue.waiting_tokens == 5)
        connection.sendall(b"G")
        time.sleep(0.1)
        connection.close()
        engine.go.set()
        assert first.result().status == 200
    until(lambda: queue.active_requests == queue.waiting_tokens == 0 and queue.counts.cancelled == 1)
    until(lambda: not running.server.server_state.connections)
    assert engine.batches == [1]


def test_loading_is_said_and_an_engine_is_exchanged_under_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(tmp_path, "tag")
    with background({"tag": str(model)}) as running:
        model_queue = running.service.model_queues["tag"]
        first = model_queue.engine
        model_queue.engine = None
        reply = tag(running.port, "ada")
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert ask(running.port, "/ready").json == {"ready": False} and ask(running.port, "/health").status == 503
        assert ask(running.port, "/live").status == 200
        ready = ask(running.port, "/v2/models/tag/ready")
        assert ready.status == 503 and ready.json == {"ready": False}
        assert ask(running.port, "/v2/models/nothing/ready").status == 404
        model_queue.engine = first
        stop = threading.Event()
        statuses: Counter[int] = Counter()

        def load() -> None:
            while not stop.is_set():
                statuses[tag(running.port, "ada lives in paris").status] += 1

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(3):
            until(lambda number=number: statuses[200] > 5 * number)
            before = model_queue.engine
            make(model, "tag")  # the files are replaced while the model that was read from them answers
            _in_loop(running, running.service.reload_all)
            until(lambda before=before: model_queue.engine is not before)
        stop.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)  # in place, as no one should: it was copied, not mapped
        engine = model_queue.engine
        assert tag(running.port, "ada").status == 200
        caplog.clear()
        _in_loop(running, running.service.reload_all)
        until(lambda: "model_reload_failed" in caplog.text)
        assert model_queue.engine is engine and tag(running.port, "ada").status == 200
        assert '"model": "tag", "reason": "' in caplog.text and "model.safetensors" in caplog.text
        (model / "config.json").write_text("{}")
        _in_loop(running, running.service.reload_all)
        time.sleep(0.3)
        assert model_queue.engine is engine and tag(running.port, "ada").status == 200


def _in_loop(running: RunningServer, call: Callable[[], None]) -> None:
    """Call a function in the server's event loop, as SIGHUP does."""
    running.server.servers[0].get_loop().call_soon_threadsafe(call)


# -- poison ---------------------------------------------------------------------------------------------------------


def test_a_poisoned_input_fails_alone(held: Any) -> None:
    running, engine = held()
    engine.go.clear()
    texts = ["ada in paris"] * 12 + ["who wrote it"] + ["in love"] + ["the cat"] * 2
    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(tag, running.port, "first")
        until(lambda: engine.batches == [1])
        replies = [pool.submit(tag, running.port, text) for text in texts]
        until(lambda: running.service.queue.active_requests == 17 and running.service.queue.waiting_tokens >= 70)
        engine.go.set()
        assert first.result().status == 200
        statuses = [reply.result().status for reply in replies]
    assert statuses == [200] * 12 + [500, 500, 200, 200]
    assert len(engine.batches) == 2 + running.service.queue.counts.retries
    assert running.service.queue.counts.retries <= 5
    error = replies[12].result().json
    assert error == {
        "error": "the model failed on this input; other requests are not affected",
        "error_type": "backend",
    }


def test_a_panic_is_one_requests(held: Any) -> None:
    running, _ = held()
    replies = [tag(running.port, text) for text in ("ada", "a panic", "ada")]
    assert [reply.status for reply in replies] == [200, 500, 200]
    assert "panicked" not in replies[1].body.decode()
    text = ask(running.port, "/metrics").body.decode()
    assert 'heedful_requests_total{method="POST",route="/token-classification",status="500"} 1.0' in text


# -- under concurrency ----------------------------------------------------------------------------------------------


COMPANY = int(os.environ.get("HEEDFUL_COMPANY", "100000"))  # requests of the long form
CLIENTS = 24


@pytest.mark.parametrize("count", [1_000, pytest.param(COMPANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_answers_are_the_same_in_any_company(started: ServerProcess, engines: dict[str, Engine], count: int) -> None:
    """Texts of all lengths, each with a word that no other request has, to four models at once.

    To the models that word is an unknown one, so that the engine alone is asked once for all that differ in it.
    """
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([0, 1, 3, 10, 40, 90]))) for _ in range(min(count // 40, 500))]
    routes = {"tag": "/token-classification", "single": "/predict", "embed": "/embed", "span": "/question-answering"}
    asked = [(draw.choice(list(routes)), draw.randrange(len(texts))) for _ in range(count)]
    alone = {(name, place): engines[name]([_named(name, texts[place], 0)])[0] for name, place in set(asked)}

    def run(numbers: range) -> list[float]:
        connection, replies = http.client.HTTPConnection("127.0.0.1", started.port, timeout=60), []
        for number in numbers:
            name, place = asked[number]
            extra = {"normalize": False} if name == "embed" else {}
            body = {"inputs": _named(name, texts[place], number), "model": name} | extra
            reply = ask_on(connection, routes[name], body)
            assert reply.status == 200, reply.body
            assert set(re.findall(r"ξ\d+ξ", reply.body.decode())) <= {f"ξ{number}ξ"}
            replies.append(_difference(name, reply.json, alone[asked[number]]))
        connection.close()
        return replies

    with ThreadPoolExecutor(CLIENTS) as pool:
        numbers = [range(first, count, CLIENTS) for first in range(CLIENTS)]
        differences = [differences_ for difference in pool.map(run, numbers) for differences_ in difference]
    record("determinism", requests=len(differences), alone=len(alone), worst=max(differences))
    assert len(differences) == count and max(differences) <= 1e-5


def _named(name: str, text: str, number: int) -> Any:
    """The input with the request's own word."""
    word = f"ξ{number}ξ"
    return {"question": f"who {word}", "context": f"{text} {word}"} if name == "span" else f"{text} {word}"


def _difference(name: str, actual: Any, alone: Any) -> float:
    if name == "tag":
        assert len(actual["words"]) == len(alone["words"])
        mine, expected = ([word["probability"] for word in answer["words"]] for answer in (actual, alone))
    elif name == "single":
        mine = [label["score"] for label in sorted(actual, key=lambda entry: entry["label"])]
        expected = [alone["probabilities"][label] for label in sorted(alone["probabilities"])]
    elif name == "embed":
        mine, expected = actual[0], alone["vector"]
    else:
        mine, expected = [actual["no_answer_score"]], [alone["no_answer_score"]]
    return float(np.abs(np.array(mine, float) - np.array(expected, float)).max(initial=0.0))


# -- generated requests -----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a body that is right, nearly right, or anything."""
    question = draw(st.sampled_from([endpoint for endpoint in ENDPOINTS if endpoint.path != "/generate"]))
    fields = {field.name: field for field in msgspec.structs.fields(question.body)}
    match draw(st.integers(0, 3)):
        case 0:
            return question.path, draw(st.binary(max_size=50))
        case 1:
            names = st.sampled_from(sorted(fields)) | TEXT
            return question.path, json.dumps(draw(st.dictionaries(names, VALUE, max_size=4))).encode()
        case _:
            body = dict(question.example)
            pair = st.lists(TEXT, min_size=1, max_size=2)
            inputs = TEXT | st.lists(TEXT, max_size=3) | st.lists(pair, max_size=3)
            if "inputs" in body and not isinstance(body["inputs"], dict):
                body["inputs"] = draw(inputs)
            if draw(st.booleans()):
                body[draw(st.sampled_from(sorted(fields)))] = draw(VALUE)
            return question.path, json.dumps(body).encode()


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(request=requests(), deadline=st.none() | st.sampled_from(["1", "50", "x", "99999999999"]))
def test_generated_requests_never_break_it(
    started: ServerProcess, request: tuple[str, bytes], deadline: str | None
) -> None:
    """The server is another process, since type checks draw numbers that hypothesis would see."""
    path, body = request
    headers = {} if deadline is None else {"x_request_timeout_ms": deadline}
    reply = ask(started.port, path, body, **headers)
    documented = _document(started.port)["paths"][path]["post"]["responses"]
    assert reply.status != 500 and str(reply.status) in documented, reply.body
    if reply.status == 200:
        promised = {endpoint.path: endpoint.answer for endpoint in ENDPOINTS}[path]
        msgspec.json.decode(reply.body, type=promised, strict=True)
    else:
        assert len(reply.body) < 2_000 and "error" in reply.json


@cache
def _document(port: int) -> Any:
    return ask(port, "/openapi.json").json


def test_weights_are_not_changed_by_serving(served: RunningServer, engines: dict[str, Engine]) -> None:
    for name, alone in engines.items():
        mine: Any = served.service.model_queues[name].engine
        for a, b in zip(mine.loaded.parameters(), alone.loaded.parameters(), strict=True):
            assert torch.equal(a, b)
