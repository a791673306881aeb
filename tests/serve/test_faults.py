"""Faults and load: deadlines, disconnecting clients, inputs that fail, panics, reloads, concurrent requests."""

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
from tests.support.model_folders import make_model_dir

WORDS = ["ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first"]


class FaultyEngine(Engine):
    """An engine whose batches wait for `may_run` and take `seconds`; batches with "who" fail, and "love" scores NaN."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        super().__init__(folder)
        self.seconds, self.may_run, self.batches = seconds, threading.Event(), []
        self.may_run.set()

    def tokenize(self, inputs: Sequence[Any]) -> Any:
        if any("panic" in str(item) for item in inputs):
            raise BaseException("the tokenizer panicked")
        return super().tokenize(inputs)

    def score(self, chunks: Any, writing: Any = None, **options: Any) -> Any:
        self.batches.append(len(chunks))
        assert self.may_run.wait(120)
        time.sleep(self.seconds)
        scores = super().score(chunks, writing, **options)
        nan_id, failing_id = self.tokenizer.id("love"), self.tokenizer.id("who")
        if any(failing_id in chunk.encoded.ids for chunk in chunks):
            raise RuntimeError("poisoned")
        return [
            score * float("nan") if nan_id in chunk.encoded.ids else score
            for chunk, score in zip(chunks, scores, strict=True)
        ]


@pytest.fixture
def start_server(folders: dict[str, str]) -> Any:
    """Return a function that starts a server with a FaultyEngine, and returns both."""
    contexts: list[Any] = []

    def start(limits: Limits | None = None, timeouts: Timeouts | None = None, seconds: float = 0.0) -> Any:
        server_settings = ServeSettings(limits=limits or Limits(), timeouts=timeouts or Timeouts())
        context = background(
            {"tag": folders["tag"]}, server_settings, loader=lambda folder: FaultyEngine(folder, seconds)
        )
        running = context.__enter__()
        contexts.append(context)
        return running, running.service.model_queues["tag"].engine

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until the condition is true, for a limited time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


def tag(port: int, text: str, **headers: str) -> Reply:
    return ask(port, "/token-classification", {"inputs": text}, **headers)


# -- load and deadlines ---------------------------------------------------------------------------------------------


def test_limits_are_never_exceeded_under_load(start_server: Any) -> None:
    running, _ = start_server(
        Limits(max_concurrent_requests=6, max_queued_tokens=60, max_request_tokens=20), seconds=0.01
    )
    observed_requests, observed_tokens = [], []
    stop_watching = threading.Event()

    def watch() -> None:
        while not stop_watching.is_set():
            observed_requests.append(running.service.scheduler.active_requests)
            observed_tokens.append(running.service.scheduler.waiting_tokens)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    replies: list[Reply] = []

    def send_requests(worker: int) -> None:
        """Send requests until 20 were answered and 20 refused, for a limited time."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            statuses = Counter(reply.status for reply in replies)
            if min(statuses[200], statuses[429]) >= 20:
                return
            replies.append(tag(running.port, "ada in paris and the cat"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send_requests, range(16)))
    stop_watching.set()
    watcher.join()
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) == {200, 429} and min(statuses.values()) >= 20, statuses
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status == 429)
    assert max(observed_requests) <= 6 and max(observed_tokens) <= 60
    assert tag(running.port, "ada").status == 200


def test_requests_time_out_at_their_deadlines(start_server: Any) -> None:
    running, engine = start_server(timeouts=Timeouts(request_seconds=1.0, max_request_seconds=5.0))
    engine.may_run.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(tag, running.port, "ada", x_request_timeout_ms="4000")
        until(lambda: engine.batches == [1])
        start = time.monotonic()
        late = tag(running.port, "in paris", x_request_timeout_ms="100")
        assert late.status == 504 and late.json["error_type"] == "timeout"
        assert 0.1 <= time.monotonic() - start < 0.9
        assert tag(running.port, "in paris").status == 504
        assert time.monotonic() - start >= 1.0
        engine.may_run.set()
        assert first.result().status == 200
    assert tag(running.port, "after").status == 200
    assert engine.batches == [1, 1]  # expired requests were never started
    assert running.service.scheduler.counts.expired == 2


def test_clients_that_leave_never_reach_the_model(start_server: Any) -> None:
    running, engine = start_server()
    engine.may_run.clear()
    scheduler = running.service.scheduler
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
        until(lambda: scheduler.active_requests == 41 and scheduler.waiting_tokens == 40 * 5)
        _in_loop(running, lambda: time.sleep(0.5))  # the batch starts before the event loop sees the disconnections
        for connection in leaving[::2]:
            connection.close()
        engine.may_run.set()
        assert first.result().status == 200
        for connection in leaving[1::2]:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.close()
    until(lambda: scheduler.counts.cancelled == 20 and scheduler.active_requests == scheduler.waiting_tokens == 0)
    assert sum(engine.batches) == 21


def test_an_unnoticed_disconnection_frees_the_request(start_server: Any) -> None:
    """After a byte of another request, the event loop does not read on, and cannot see that the client disconnected."""
    running, engine = start_server()
    engine.may_run.clear()
    scheduler, body = running.service.scheduler, json.dumps({"inputs": "ada in paris"}).encode()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tag, running.port, "first")
        until(lambda: engine.batches == [1])
        connection = open_socket(running.port)
        head = b"POST /token-classification HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"x-request-timeout-ms: 300000\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until(lambda: scheduler.active_requests == 2 and scheduler.waiting_tokens == 5)
        connection.sendall(b"G")
        time.sleep(0.1)
        connection.close()
        engine.may_run.set()
        assert first.result().status == 200
    until(lambda: scheduler.active_requests == scheduler.waiting_tokens == 0 and scheduler.counts.cancelled == 1)
    until(lambda: not running.server.server_state.connections)
    assert engine.batches == [1]


def test_a_loading_model_is_reported(folders: dict[str, str]) -> None:
    with background({"tag": folders["tag"]}) as running:
        running.service.model_queues["tag"].engine = None  # as before the model is loaded
        reply = tag(running.port, "ada")
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert ask(running.port, "/ready").json == {"ready": False} and ask(running.port, "/health").status == 503
        assert ask(running.port, "/live").status == 200
        ready = ask(running.port, "/v2/models/tag/ready")
        assert ready.status == 503 and ready.json == {"ready": False}
        assert ask(running.port, "/v2/models/nothing/ready").status == 404


def test_a_reload_interrupts_no_request(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path, "tag")
    with background({"tag": str(model)}) as running:
        model_queue = running.service.model_queues["tag"]
        stop = threading.Event()
        statuses: Counter[int] = Counter()

        def send_requests() -> None:
            while not stop.is_set():
                statuses[tag(running.port, "ada lives in paris").status] += 1

        threads = [threading.Thread(target=send_requests) for _ in range(3)]
        for thread in threads:
            thread.start()
        for reloads in range(3):
            until(lambda reloads=reloads: statuses[200] > 5 * reloads)
            old_engine = model_queue.engine
            make_model_dir(model, "tag")  # replaces the files while the old engine serves requests
            _in_loop(running, running.service.reload_all)
            until(lambda old_engine=old_engine: model_queue.engine is not old_engine)
        stop.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}


def test_after_a_failed_reload_the_old_model_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model_dir(tmp_path, "tag")
    with background({"tag": str(model)}) as running:
        model_queue = running.service.model_queues["tag"]
        engine = model_queue.engine
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        assert tag(running.port, "ada").status == 200  # the weights are in memory, and not mapped from the file
        _in_loop(running, running.service.reload_all)
        until(lambda: "model_reload_failed" in caplog.text)
        assert model_queue.engine is engine and tag(running.port, "ada").status == 200
        assert '"model": "tag", "reason": "' in caplog.text and "model.safetensors" in caplog.text
        (model / "config.json").write_text("{}")
        _in_loop(running, running.service.reload_all)
        time.sleep(0.3)
        assert model_queue.engine is engine and tag(running.port, "ada").status == 200


def test_the_reason_of_a_failed_reload_is_logged(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    engines = [Engine(folders["tag"])]

    def load_once(folder: str) -> Engine:
        if not engines:
            raise OSError("the disk is gone")
        return engines.pop()

    with background({"tag": folders["tag"]}, loader=load_once) as running:
        _in_loop(running, running.service.reload_all)
        until(lambda: '"reason": "OSError: the disk is gone"' in caplog.text)
        assert tag(running.port, "ada").status == 200


def _in_loop(running: RunningServer, call: Callable[[], None]) -> None:
    """Call a function in the server's event loop, as SIGHUP does."""
    running.server.servers[0].get_loop().call_soon_threadsafe(call)


# -- failing inputs --------------------------------------------------------------------------------------------------


def test_a_poisoned_input_fails_alone(start_server: Any) -> None:
    """All texts but the first wait in the queue before the engine may go on, so that they make one batch."""
    running, engine = start_server(timeouts=Timeouts(request_seconds=120))
    scheduler, queue = running.service.scheduler, running.service.model_queues["tag"]
    engine.may_run.clear()
    # FaultyEngine fails on "who", and returns NaN scores for "love"
    texts = ["ada in paris"] * 12 + ["who wrote it", "in love", "the cat", "the cat"]
    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(tag, running.port, "first")
        until(lambda: engine.batches == [1], seconds=60)
        replies = [pool.submit(tag, running.port, text) for text in texts]
        until(lambda: len(queue.heap) == len(texts), seconds=60)
        engine.may_run.set()
        assert first.result().status == 200
        statuses = [reply.result().status for reply in replies]
    assert statuses == [200] * 12 + [500, 500, 200, 200]
    assert len(engine.batches) == 2 + scheduler.counts.retries  # 2: "first", and one batch with all texts
    assert scheduler.counts.retries <= 5
    error = replies[12].result().json
    assert error == {
        "error": "the model failed on this input; other requests are not affected",
        "error_type": "backend",
    }


def test_a_panic_fails_only_its_own_request(start_server: Any) -> None:
    running, _ = start_server()
    replies = [tag(running.port, text) for text in ("ada", "a panic", "ada")]
    assert [reply.status for reply in replies] == [200, 500, 200]
    assert "panicked" not in replies[1].body.decode()
    metrics = ask(running.port, "/metrics").body.decode()
    assert 'heedful_requests_total{method="POST",route="/token-classification",status="500"} 1.0' in metrics


def test_the_log_says_where_the_server_failed(
    start_server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log entry lacks the message of the error, which may quote a text."""
    running, _ = start_server()

    def broken(*arguments: object) -> None:
        raise KeyError("a text")

    monkeypatch.setattr("heedful.serve.app.parse_body", broken)
    monkeypatch.setattr("heedful.serve.app.info", broken)
    monkeypatch.setattr(type(running.service.metrics), "text", broken)
    replies = [tag(running.port, "ada"), ask(running.port, "/info"), ask(running.port, "/metrics")]
    assert [reply.status for reply in replies] == [500] * 3
    assert all(reply.json["error"] == "the server failed on this request; the error is in its log" for reply in replies)
    until(lambda: caplog.text.count("KeyError in broken:") == 3)
    assert "a text" not in caplog.text


# -- under concurrency ----------------------------------------------------------------------------------------------


SLOW_COUNT = int(os.environ.get("HEEDFUL_COMPANY", "100000"))  # requests of the slow variant
CLIENTS = 24


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(SLOW_COUNT, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_answers_are_the_same_in_any_company(started: ServerProcess, engines: dict[str, Engine], count: int) -> None:
    """Send texts of all lengths to four models, each text with a word that no other request has.

    The models do not know this word, so that one expected answer serves for all texts that differ only in it.
    """
    generator = random.Random(7)
    texts = [
        " ".join(generator.choices(WORDS, k=generator.choice([0, 1, 3, 10, 40, 90])))
        for _ in range(min(count // 40, 500))
    ]
    routes = {"tag": "/token-classification", "single": "/predict", "embed": "/embed", "span": "/question-answering"}
    models_and_texts = [(generator.choice(list(routes)), generator.choice(texts)) for _ in range(count)]
    expected = {
        (model, text): engines[model]([_with_own_word(model, text, 0)])[0] for model, text in set(models_and_texts)
    }

    def send_requests(numbers: range) -> float:
        """Send the requests with these numbers one after another; return the largest difference from an answer."""
        connection, largest_difference = http.client.HTTPConnection("127.0.0.1", started.port, timeout=60), 0.0
        for number in numbers:
            model, text = models_and_texts[number]
            options = {"normalize": False} if model == "embed" else {}
            body = {"inputs": _with_own_word(model, text, number), "model": model} | options
            reply = ask_on(connection, routes[model], body)
            assert reply.status == 200, reply.body
            words_of_requests = set(re.findall(r"ξ\d+ξ", reply.body.decode()))
            assert words_of_requests <= {f"ξ{number}ξ"}
            largest_difference = max(largest_difference, _difference(model, reply.json, expected[model, text]))
        connection.close()
        return largest_difference

    with ThreadPoolExecutor(CLIENTS) as pool:
        numbers = [range(first, count, CLIENTS) for first in range(CLIENTS)]
        largest_difference = max(pool.map(send_requests, numbers))
    record("determinism", requests=count, alone=len(expected), worst=largest_difference)
    assert largest_difference <= 1e-5


def _with_own_word(model: str, text: str, number: int) -> Any:
    """Return the input of a model for this text, with a word that only the request of this number has."""
    word = f"ξ{number}ξ"
    return {"question": f"who {word}", "context": f"{text} {word}"} if model == "span" else f"{text} {word}"


def _difference(model: str, actual: Any, expected: Any) -> float:
    """Return the largest difference between the scores of a response and of the engine's answer."""
    if model == "tag":
        assert len(actual["words"]) == len(expected["words"])
        actual_scores = [word["probability"] for word in actual["words"]]
        expected_scores = [word["probability"] for word in expected["words"]]
    elif model == "single":
        actual_scores = [label["score"] for label in sorted(actual, key=lambda entry: entry["label"])]
        expected_scores = [expected["probabilities"][label] for label in sorted(expected["probabilities"])]
    elif model == "embed":
        actual_scores, expected_scores = actual[0], expected["vector"]
    else:
        actual_scores, expected_scores = [actual["no_answer_score"]], [expected["no_answer_score"]]
    return float(np.abs(np.array(actual_scores, float) - np.array(expected_scores, float)).max(initial=0.0))


# -- generated requests -----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a route, and a body that is valid, almost valid, or arbitrary."""
    endpoint = draw(st.sampled_from([item for item in ENDPOINTS if item.path != "/generate"]))
    fields = {field.name: field for field in msgspec.structs.fields(endpoint.body)}
    match draw(st.integers(0, 3)):
        case 0:
            return endpoint.path, draw(st.binary(max_size=50))
        case 1:
            names = st.sampled_from(sorted(fields)) | TEXT
            return endpoint.path, json.dumps(draw(st.dictionaries(names, VALUE, max_size=4))).encode()
        case _:
            body = dict(endpoint.example)
            pair = st.lists(TEXT, min_size=1, max_size=2)
            inputs = TEXT | st.lists(TEXT, max_size=3) | st.lists(pair, max_size=3)
            if "inputs" in body and not isinstance(body["inputs"], dict):
                body["inputs"] = draw(inputs)
            if draw(st.booleans()):
                body[draw(st.sampled_from(sorted(fields)))] = draw(VALUE)
            return endpoint.path, json.dumps(body).encode()


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(request=requests(), deadline=st.none() | st.sampled_from(["1", "50", "x", "99999999999"]))
def test_generated_requests_get_documented_responses(
    started: ServerProcess, request: tuple[str, bytes], deadline: str | None
) -> None:
    """The server is another process, since type checks use random numbers, which hypothesis would record."""
    path, body = request
    headers = {} if deadline is None else {"x_request_timeout_ms": deadline}
    reply = ask(started.port, path, body, **headers)
    documented = _document(started.port)["paths"][path]["post"]["responses"]
    assert reply.status != 500 and str(reply.status) in documented, reply.body
    if reply.status == 200:
        answer_type = {endpoint.path: endpoint.answer for endpoint in ENDPOINTS}[path]
        msgspec.json.decode(reply.body, type=answer_type, strict=True)
    else:
        assert len(reply.body) < 2_000 and "error" in reply.json


@cache
def _document(port: int) -> Any:
    return ask(port, "/openapi.json").json


def test_serving_does_not_change_the_weights(served: RunningServer, engines: dict[str, Engine]) -> None:
    for name, unused_engine in engines.items():
        served_engine: Any = served.service.model_queues[name].engine
        parameters = zip(served_engine.loaded.parameters(), unused_engine.loaded.parameters(), strict=True)
        assert all(torch.equal(served_parameter, original) for served_parameter, original in parameters)
