"""Limits and access of the server: bodies, headers, origins, keys, logs and errors."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.infer.scheduling.errors import QueueFullError, TooLongError
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS
from heedful.runs.overrides import override
from heedful.serve.connections import Connections
from heedful.serve.middleware import read_api_keys, to_http_error
from heedful.serve.run import RunningServer, background
from heedful.serve.settings import Limits, ServeSettings, Timeouts
from heedful.serve.token_estimate import check_token_estimate, count_characters, group_in_turns
from tests.support.http_client import ask, open_socket, reply_status, seconds_until_closed, send_raw

JSON = "content-type: application/json\r\n"
KEY = b"a-key-of-more-than-16-characters"
OK = b'{"inputs": "the cat"}'


def post(path: str, body: bytes, more: str = "", length: bool = True) -> bytes:
    """The bytes of a request."""
    size = f"content-length: {len(body)}\r\n" if length else ""
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}{size}{more}\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    """Encode a body in chunks."""
    parts = (body[start : start + size] for start in range(0, len(body), size))
    data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return post("/token-classification", b"", "transfer-encoding: chunked\r\n", length=False) + data


def teaches(answer: bytes) -> dict[str, Any]:
    """The error, if it is short and keeps to itself what is inside."""
    body = answer.partition(b"\r\n\r\n")[2]
    assert len(body) < 2_000, len(body)
    parsed: dict[str, Any] = json.JSONDecoder().raw_decode(body.decode())[0]
    text = json.dumps(parsed)
    assert not any(word in text for word in ("Traceback", ".py", "site-packages", "/tmp", "Error(")), text
    return parsed


# -- bodies ---------------------------------------------------------------------------------------------------------

LONG = b"x" * 30_000
BODIES: dict[str, tuple[bytes, set[int]]] = {
    "announced 300 MB": (post("/token-classification", b"", "content-length: 300000000\r\n", length=False), {413}),
    "300 kB over": (post("/token-classification", b'{"inputs": "' + b"x" * 2_300_000 + b'"}'), {413}),
    "chunked without a length": (chunked(b'{"inputs": "' + b"x" * 2_300_000 + b'"}', 65_536), {413}),
    "chunks of one byte": (chunked(b'{"inputs": "' + b"x" * 100_000 + b'"}', 1), {413}),
    "gzip bomb": (post("/token-classification", gzip.compress(b" " * 10_000_000), "content-encoding: gzip\r\n"), {415}),
    "200k keys": (post("/token-classification", json.dumps({str(key): 0 for key in range(150_000)}).encode()), {413}),
    "40k keys": (post("/token-classification", json.dumps({str(key): 0 for key in range(40_000)}).encode()), {422}),
    "240k pairs": (post("/predict", b'{"inputs": [' + b'["",""],' * 220_000 + b'["a"]]}'), {413}),
    "600k texts": (post("/embed", b'{"inputs": [' + b'"",' * 600_000 + b'""]}'), {413}),
    "900k numbers": (post("/attention", b'{"inputs": "a", "heads": [' + b"0," * 900_000 + b"0]}"), {413}),
    "depth 100k": (post("/token-classification", b'{"inputs": ' + b"[" * 100_000), {422}),
    "closed depth": (post("/token-classification", b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), {422}),
    "depth elsewhere": (post("/token-classification", b'{"x": ' + b'{"a":' * 90_000), {422}),
    "5,000 digits": (post("/fill-mask", b'{"inputs": "a", "top_k": ' + b"9" * 5_000 + b"}"), {422}),
    "large exponent": (post("/fill-mask", b'{"inputs": "a", "top_k": 1e99999}'), {422}),
    "NaN": (post("/fill-mask", b'{"inputs": "a", "top_k": NaN}'), {422}),
    "a key twice": (post("/token-classification", b'{"inputs": "a", "inputs": "b"}'), {422}),
    "an inner key twice": (
        post("/question-answering", b'{"inputs": {"question": "", "question": "", "context": ""}}'),
        {422},
    ),
    "BOM": (post("/token-classification", b"\xef\xbb\xbf" + OK), {422}),
    "UTF-16": (post("/token-classification", '{"inputs": "a"}'.encode("utf-16")), {422}),
    "lone surrogate": (post("/token-classification", b'{"inputs": "\\ud800"}'), {422}),
    "raw NUL": (post("/token-classification", b'{"inputs": "\0"}'), {422}),
    "invalid UTF-8": (post("/token-classification", b'{"inputs": "\xff"}'), {422}),
    "empty": (post("/token-classification", b""), {422}),
    "two values": (post("/token-classification", OK + OK), {422}),
    "a long unknown key": (post("/token-classification", b'{"' + LONG + b'": 1}'), {422}),
    "a list": (post("/token-classification", b"[" + OK + b"]"), {422}),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_refused(served: RunningServer, name: str) -> None:
    data, statuses = BODIES[name]
    start = time.monotonic()
    answer = send_raw(served.port, data, pause=0.3, answers=1)
    took = time.monotonic() - start
    assert reply_status(answer) in statuses, answer[:500]
    message = teaches(answer)
    assert "x" * 200 not in json.dumps(message)
    assert took < 5  # on a quiet machine 100 ms, and the pause


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
def test_only_json_is_read(served: RunningServer, kind: str) -> None:
    assert ask(served.port, "/token-classification", OK, content_type=kind).status == 415
    assert ask(served.port, "/token-classification", OK, content_type="Application/JSON; charset=UTF-8").status == 200


# -- heads ----------------------------------------------------------------------------------------------------------

HEADS: dict[str, tuple[bytes, set[int]]] = {
    "length and encoding": (
        post("/token-classification", b"0\r\n\r\n", "transfer-encoding: chunked\r\n"),
        {400},
    ),
    "two lengths": (post("/token-classification", OK, "content-length: 5\r\n"), {400}),
    "no length is a number": (post("/token-classification", b"", "content-length: x\r\n", length=False), {400}),
    "no host": (b"GET /live HTTP/1.1\r\n\r\n", {400}),
    "no host in 1.0": (b"GET /live HTTP/1.0\r\n\r\n", {400}),
    "two hosts": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", {400}),
    "1 MB header": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 1_000_000 + b"\r\n\r\n", {400, 431}),
    "50k headers": (b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 50_000 + b"\r\n", {400, 431}),
    "20 kB of headers": (b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 3_400 + b"\r\n", {400, 431}),
    "NUL in the path": (b"GET /live%00 HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "raw NUL in the path": (b"GET /live\0 HTTP/1.1\r\nhost: localhost\r\n\r\n", {400}),
    "dots": (b"GET /web/../live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "encoded dots": (b"GET /web/%2e%2e/live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "absolute": (b"GET http://localhost/live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "a strange method": (b"BREW /live HTTP/1.1\r\nhost: localhost\r\n\r\n", {405}),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", {400, 404, 405}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", {400}),
    "a later HTTP": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "websocket": (
        b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n\r\n",
        {403},
    ),
    "a foreign host": (b"GET /live HTTP/1.1\r\nhost: attacker.example\r\n\r\n", {403}),
    "a host that begins like ours": (b"GET /live HTTP/1.1\r\nhost: localhost.attacker.example\r\n\r\n", {403}),
    "a strange deadline": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-request-timeout-ms: -1\r\n\r\n", {400}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_refused(served: RunningServer, name: str) -> None:
    data, statuses = HEADS[name]
    answer = send_raw(served.port, data, pause=0.3, answers=1)
    assert reply_status(answer) in statuses | {0}, answer[:300]
    if answer:
        teaches(answer)


def test_a_thousand_requests_in_one_line_are_answered_in_order(served: RunningServer) -> None:
    request = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = send_raw(served.port, request * 299 + request.replace(b"/live", b"/nope"), pause=3.0, answers=300)
    assert answer.count(b"HTTP/1.1 200 OK") == 299 and answer.count(b"HTTP/1.1 404") == 1
    assert answer.rindex(b"200 OK") < answer.index(b"404 Not")


def test_hosts_and_origins(served: RunningServer) -> None:
    port = served.port
    for host in ("localhost", "LOCALHOST:80", f"127.0.0.1:{port}", "[::1]:9"):
        assert ask(port, "/token-classification", OK, host=host).status == 200
    for origin in ("null", "https://example.org", "http://localhost:1", "file://"):
        assert ask(port, "/token-classification", OK, origin=origin, host=f"localhost:{port}").status == 403, origin
    assert (
        ask(port, "/token-classification", OK, origin=f"http://localhost:{port}", host=f"localhost:{port}").status
        == 200
    )
    assert ask(port, "/info", sec_fetch_site="cross-site").status == 403
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(port, "/", **link).status == 200 and ask(port, "/info", **link).status == 403
    assert ask(port, "/", sec_fetch_site="same-site", sec_fetch_mode="no-cors").status == 403
    reply = ask(port, "/token-classification", OK)
    assert "access-control-allow-origin" not in reply.headers and "server" not in reply.headers
    assert ask(port, "/token-classification", method="OPTIONS", origin=f"http://127.0.0.1:{port}").status == 405


def test_pages_of_listed_origins_may_ask(folders: dict[str, str]) -> None:
    """A browser asks first what such a page may send, and has no key for that."""
    page = "https://app.example.org"
    ahead = {"method": "OPTIONS", "access_control_request_method": "POST"}
    with background({"tag": folders["tag"]}, ServeSettings(cors_allow_origins=(page,)), keys=(KEY,)) as running:
        allowed = ask(running.port, "/token-classification", origin=page, **ahead)
        assert allowed.status == 204 and not allowed.body
        assert allowed.headers["access-control-allow-origin"] == page and allowed.headers["vary"] == "origin"
        assert "authorization, content-type" in allowed.headers["access-control-allow-headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert ask(running.port, "/token-classification", OK, origin=page).status == 401
        reply = ask(running.port, "/token-classification", OK, origin=page, authorization=f"Bearer {KEY.decode()}")
        assert reply.status == 200 and reply.headers["access-control-expose-headers"] == "retry-after"
        assert ask(running.port, "/token-classification", origin="https://example.org", **ahead).status == 403
        assert ask(running.port, "/token-classification", origin=page, method="OPTIONS").status == 401


def test_an_offer_to_upgrade_need_not_be_taken(served: RunningServer) -> None:
    offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    assert reply_status(send_raw(served.port, post("/token-classification", OK, offer), pause=1.0, answers=1)) == 200


def test_a_request_may_come_in_two_parts_behind_another(served: RunningServer) -> None:
    with open_socket(served.port) as connection:
        connection.sendall(post("/token-classification", OK) + post("/token-classification", OK)[:-5])
        answer = connection.recv(1 << 16)
        connection.sendall(OK[-5:])
        while answer.count(b"HTTP/1.1 200 OK") < 2 and (part := connection.recv(1 << 16)):
            answer += part
        assert answer.count(b"HTTP/1.1 200 OK") == 2


# -- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a " * 500_000, "\u0301" * 500_000, "\u4e2d" * 400_000])
def test_texts_are_cut_or_refused_before_they_are_tokenised(served: RunningServer, text: str) -> None:
    refused = ask(served.port, "/token-classification", json.dumps({"inputs": text}, ensure_ascii=False).encode())
    assert refused.status == 413 and refused.json["error_type"] == "too_large"
    cut = ask(served.port, "/embed", json.dumps({"inputs": text}, ensure_ascii=False).encode())
    assert cut.status == 200 and len(cut.json) == 1
    whole = json.dumps({"inputs": text, "truncate": False}, ensure_ascii=False).encode()
    assert ask(served.port, "/embed", whole).status == 413
    assert ask(served.port, "/tokenize", json.dumps({"inputs": text}, ensure_ascii=False).encode()).status == 413


def test_white_space_costs_no_text(served: RunningServer, engines: dict[str, Engine]) -> None:
    """Where 16 characters for each token that is read do not fill the model, more are taken."""
    port = served.port
    for text in (" " * 20_000 + "the cat", "x" * 3_000 + " the cat"):
        (alone,) = engines["embed"]([text])
        for truncate in (True, False):
            asked = {"inputs": text, "normalize": False, "truncate": truncate}
            assert ask(port, "/embed", asked).json[0] == pytest.approx(alone["vector"], abs=1e-5)
        result = ask(port, "/v1/embeddings", {"input": [text, "the cat"]}).json
        assert alone["truncated_tokens"] == 0 and result["usage"]["total_tokens"] == alone["tokens"] + 4
    many = [" " * 1_000 + "the cat", *["a dog"] * 400]
    result = ask(port, "/embed", {"inputs": many, "normalize": False}).json
    for number in (0, 1, 400):
        (alone,) = engines["embed"]([many[number]])
        assert result[number] == pytest.approx(alone["vector"], abs=1e-5)
    refused = ask(port, "/embed", {"inputs": [" " * 200_000] * 2})
    assert refused.status == 413 and "2 texts have few tokens" in refused.json["error"]
    assert ask(port, "/embed", {"inputs": " " * 20_000 + "the cat " * 30, "truncate": False}).status == 413
    for model in ("tag", "embed"):
        shown = ask(port, "/attention", {"inputs": " " * 5_000 + "the cat", "model": model})
        assert shown.status == 200 and len(shown.json["tokens"]) == 4
        assert ask(port, "/attention", {"inputs": "cat " * 5_000, "model": model}).status == 413


def test_a_text_that_is_read_twice_is_in_the_queue_once(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with background({"embed": folders["embed"]}) as running:
        engine: Any = running.service.model_queues["embed"].engine
        queue, encode = running.service.scheduler, engine.tokenize
        monkeypatch.setattr(engine, "tokenize", lambda inputs: (queue.drain(), encode(inputs))[1])
        assert ask(running.port, "/embed", {"inputs": " " * 20_000 + "the cat"}).status == 200


def test_far_too_many_tokens_are_refused_part_by_part(served: RunningServer, engines: dict[str, Engine]) -> None:
    """No more is tokenised than tells that they are too many; what is cut anyway counts as far as it is read."""
    held: list[int] = []

    class Watched:
        kind, limit = "tokens", engines["tag"].limit
        tokenizer = SimpleNamespace(encode_batch=lambda parts: held.append(sum(map(len, parts))) or encode(parts))

    encode = engines["tag"].tokenizer.encode_batch
    for texts in (["a " * 100_000], ["a " * 200] * 500):
        held.clear()
        with pytest.raises(TooLongError, match="may have 9000"):
            list(check_token_estimate(Watched(), texts, 9_000))
        assert max(held) <= TURN_CHARACTERS and 36_000 <= sum(held) <= 36_000 + 2 * TURN_CHARACTERS
    list(check_token_estimate(Watched(), ["a " * 8_900], 9_000))
    Watched.kind = "embedding"
    list(check_token_estimate(Watched(), ["a " * 100_000], 9_000))
    assert ask(served.port, "/token-classification", {"inputs": "\u4e2d" * 200_000, "model": "tag"}).status == 413


@given(sizes=st.lists(st.integers(0, 40_000), max_size=12))
def test_inputs_are_read_in_turns_of_few_characters(sizes: list[int]) -> None:
    """Each once and in order; one that is longer than a turn has one for itself."""
    inputs: list[Any] = ["x" * size for size in sizes]
    groups = list(group_in_turns(inputs))
    assert [item for _, group in groups for item in group] == inputs
    assert [first for first, _ in groups] == [sum(len(group) for _, group in groups[:n]) for n in range(len(groups))]
    assert all(len(group) == 1 or sum(map(len, group)) <= TURN_CHARACTERS for _, group in groups)
    assert count_characters({"prompt": "ab", "choices": ["c", "def"]}) == 3 + 5
    assert count_characters({"question": "ab", "context": "c"}) == 3 and count_characters(("ab", "c")) == 5


def test_answers_are_the_same_however_many_turns_reading_took(
    served: RunningServer, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["ada lives in paris", "the cat", "a" * 30, "on a mat and who wrote it", ""] * 4
    monkeypatch.setattr("heedful.serve.token_estimate.TURN_CHARACTERS", 20)
    replies = ask(served.port, "/token-classification", {"inputs": texts}).json
    for text, (alone,) in zip(texts, map(engines["tag"], ([text] for text in texts)), strict=True):
        here = replies.pop(0)
        assert [word["label"] for word in here["words"]] == [word["label"] for word in alone["words"]], text
    vectors = ask(served.port, "/embed", {"inputs": texts, "normalize": False}).json
    for text, vector in zip(texts, vectors, strict=True):
        assert vector == pytest.approx(engines["embed"]([text])[0]["vector"], abs=1e-5)
    read = ask(served.port, "/tokenize", {"inputs": texts, "model": "tag"}).json
    for text, tokens in zip(texts, read, strict=True):
        assert [token["id"] for token in tokens] == list(engines["tag"].tokenizer.encode(text).ids)
    wrong = ask(served.port, "/generate", {"inputs": ["a b"] * 30 + ["a " * 60], "max_new_tokens": 2})
    assert wrong.status == 422 and "input 30" in wrong.json["error"]


def test_what_is_here_when_it_stops_is_answered_however_long(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with background({"tag": folders["tag"]}) as running:
        queue = running.service.scheduler
        monkeypatch.setattr(
            "heedful.serve.context.check_token_estimate",
            lambda engine, texts, max_tokens, counts_truncated: iter([queue.drain()]),
        )
        assert ask(running.port, "/token-classification", {"inputs": "ada " * 5_000}).status == 200
        assert ask(running.port, "/token-classification", {"inputs": "ada"}).status == 503
        ready = ask(running.port, "/v2/models/tag/ready")
        assert ready.status == 503 and ready.json == {"ready": False}


def test_more_than_a_request_may_have(folders: dict[str, str]) -> None:
    limits = Limits(
        max_client_batch_size=3,
        max_request_tokens=50,
        max_request_characters=400,
        max_attention_weights=100,
        max_body_bytes=5_000,
        max_fill_mask_candidates=10,
        max_new_tokens=6,
    )
    names = ("tag", "masked", "write")
    with background({name: folders[name] for name in names}, ServeSettings(limits=limits)) as running:
        port = running.port
        assert ask(port, "/token-classification", {"inputs": ["a"] * 3}).status == 200
        assert ask(port, "/token-classification", {"inputs": ["a"] * 4}).status == 413
        assert ask(port, "/token-classification", {"inputs": "a " * 60}).status == 413
        assert ask(port, "/token-classification", {"inputs": "a" * 401}).status == 413
        assert ask(port, "/tokenize", {"inputs": "a " * 60}).status == 413
        assert ask(port, "/attention", {"inputs": "a b c d", "layers": [0]}).status == 413
        assert ask(port, "/attention", {"inputs": "a b", "layers": [0], "heads": [1]}).status == 200
        masks = {"inputs": ["[MASK] cat", "the [MASK]"], "top_k": 5}
        assert ask(port, "/fill-mask", masks).status == 200
        refused = ask(port, "/fill-mask", masks | {"top_k": 6})
        assert refused.status == 413 and "ask for 12 tokens" in refused.json["error"]
        assert ask(port, "/generate", {"inputs": "a b"}).status == 200  # what it writes by itself is no more
        assert ask(port, "/generate", {"inputs": "a b", "max_new_tokens": 7}).status == 413


# -- keys, logs, errors ---------------------------------------------------------------------------------------------


def test_keys(folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_bytes(KEY + b"\nanother-key-for-a-change\n\n")
    caplog.set_level(logging.INFO, "heedful.serve")
    with background({"tag": folders["tag"]}, keys=read_api_keys(file)) as running:
        port = running.port
        for key in (KEY, b"another-key-for-a-change"):
            assert ask(port, "/token-classification", OK, authorization=f"Bearer {key.decode()}").status == 200
        for credentials in ("", "Bearer ", f"Bearer {KEY.decode()}x", KEY.decode(), "Basic x", "Bearer \u00e9"):
            refused = ask(port, "/token-classification", OK, authorization=credentials)
            assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
        for path, status in (("/health", 200), ("/ready", 200), ("/", 200), ("/metrics", 401), ("/openapi.json", 401)):
            assert ask(port, path).status == status
        reply = ask(port, "/v1/embeddings", OK, authorization=f"Bearer {KEY.decode()}")
        assert reply.status == 422 and reply.json["error"]["type"] == "validation"
    assert caplog.records and KEY.decode() not in caplog.text
    for wrong in (b"", b"short", b"with a space in between\n"):
        file.write_bytes(wrong)
        with pytest.raises(HeedfulError, match="holds no key: write one on a line, 16 or more"):
            read_api_keys(file)
    with pytest.raises(HeedfulError, match="cannot be read"):
        read_api_keys(tmp_path / "nothing")


@pytest.mark.parametrize("shown", [False, True])
def test_the_log_has_one_line_for_each_request(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture, shown: bool
) -> None:
    caplog.set_level(logging.INFO, "heedful.serve")
    with background({"tag": folders["tag"]}, ServeSettings(log_text=shown)) as running:
        ask(running.port, "/token-classification", {"inputs": "paris\r\nFORGED secret words"})
        ask(running.port, "/nope%0d%0aFORGED%e2%80%a8")
    lines = [record.getMessage() for record in caplog.records if record.name == "heedful.serve"]
    assert len(lines) == 2 and all(line.isascii() and line.isprintable() for line in lines)
    first, second = map(json.loads, lines)
    assert (
        first["path"] == "/token-classification"
        and first["status"] == 200
        and first["tokens"] > 3
        and first["duration_ms"] > 0
    )
    assert ("secret" in lines[0]) is shown
    assert second["status"] == 404


def test_retries_are_whole_seconds_and_not_all_the_same() -> None:
    seconds = {dict(to_http_error(QueueFullError("no", 7.3)).headers)["retry-after"] for _ in range(60)}
    assert seconds == {"7", "8", "9"}


# -- connections ------------------------------------------------------------------------------------------------------


def test_those_who_dribble_are_closed_and_the_others_answered(folders: dict[str, str]) -> None:
    timeouts = Timeouts(headers_seconds=1.0, body_seconds=1.0, keep_alive_seconds=1.0, write_seconds=1.0)
    with background({"tag": folders["tag"]}, ServeSettings(timeouts=timeouts)) as running:
        port = running.port
        start = time.monotonic()
        silent = [open_socket(port) for _ in range(10)]
        heads = [open_socket(port) for _ in range(30)]
        bodies = [open_socket(port) for _ in range(30)]
        for connection in heads:
            connection.sendall(b"POST /token-classification HTTP/1.1\r\nhost: loc")
        for connection in bodies:
            connection.sendall(post("/token-classification", b"", "content-length: 1000\r\n", length=False) + b'{"inp')
        for step in range(4):
            for connection in (*heads, *bodies):
                connection.sendall(b"a" if step else b" ")
            asked = time.monotonic()
            assert ask(port, "/token-classification", OK).status == 200
            assert time.monotonic() - asked < 2
            time.sleep(0.1)
        for connection in (*silent, *heads, *bodies):
            with connection:
                assert 0.9 < seconds_until_closed(connection, start) < 8  # a second, one to say so, and a busy machine
        assert ask(port, "/token-classification", OK).status == 200


def test_those_who_do_not_read_are_closed(folders: dict[str, str]) -> None:
    with background({"tag": folders["tag"]}, ServeSettings(timeouts=Timeouts(write_seconds=0.5))) as running:
        connections = [open_socket(running.port) for _ in range(3)]
        for connection in connections:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300)
        while not running.server.server_state.connections:
            time.sleep(0.01)
        deadline = time.monotonic() + 30
        while running.server.server_state.connections and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connections[0].recv(1_000)  # next to nothing
            time.sleep(0.05)
        assert not running.server.server_state.connections
        for connection in connections:
            connection.close()


def test_all_that_is_not_read_is_bounded(folders: dict[str, str]) -> None:
    """Past it the client is let go that has not read for the longest time."""
    with background({"tag": folders["tag"]}, ServeSettings(limits=Limits(max_send_buffer_bytes=100))) as running:
        answer, open_ = len(ask(running.port, "/openapi.json").body), running.server.server_state.connections
        while open_:
            time.sleep(0.01)
        connections = [open_socket(running.port)]
        while not open_:
            time.sleep(0.01)
        (oldest,) = open_
        connections += [open_socket(running.port) for _ in range(12)]
        for connection in connections:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300)
        deadline = time.monotonic() + 20
        while oldest in open_ and time.monotonic() < deadline:
            held = sum(
                connection.transport.get_write_buffer_size() for connection in list(open_)
            )  # with one that is looked at now
            assert held <= 100 + 2 * answer
            time.sleep(0.01)
        assert oldest not in open_ and ask(running.port, "/openapi.json").status == 200
        for connection in connections:
            connection.close()


def test_all_bodies_that_come_are_bounded(folders: dict[str, str]) -> None:
    """Past it a body has its share; what is refused, or goes, is given back."""
    limits = Limits(max_receive_buffer_bytes=100_000, max_connections=10)
    with background({"tag": folders["tag"]}, ServeSettings(limits=limits)) as running:
        bodies = running.service.bodies
        large = post("/token-classification", b"", "content-length: 90000\r\n", length=False) + b"x" * 60_000
        with open_socket(running.port) as first, open_socket(running.port) as second:
            first.sendall(large)
            while bodies.held_bytes < 60_000:
                time.sleep(0.01)
            second.sendall(large)
            refused = second.recv(1 << 16)
            assert reply_status(refused) == 503 and b"retry-after: " in refused
            assert bodies.held_bytes == 60_000
            assert ask(running.port, "/token-classification", OK).status == 200
        while bodies.held_bytes:
            time.sleep(0.01)


def test_there_are_only_so_many_connections(folders: dict[str, str]) -> None:
    with background({"tag": folders["tag"]}, ServeSettings(limits=Limits(max_connections=5))) as running:
        held = [open_socket(running.port) for _ in range(5)]
        while len(running.server.server_state.connections) < 5:
            time.sleep(0.01)
        refused = send_raw(running.port, b"", answers=1)
        assert reply_status(refused) == 503 and b"retry-after: " in refused
        for connection in held:
            connection.close()
        while running.server.server_state.connections:
            time.sleep(0.01)
        assert ask(running.port, "/live").status == 200


def connected(port: int, address: str) -> socket.socket:
    """A connection that comes from another address of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(address, 0))


def test_one_address_has_its_share_of_the_connections(folders: dict[str, str]) -> None:
    limits = Limits(max_connections=6, max_connections_per_address=2)
    with background({"tag": folders["tag"]}, ServeSettings(limits=limits)) as running:
        connections = running.server.shared.open_connections
        held = [connected(running.port, "127.0.0.2") for _ in range(2)]
        while connections.open < 2:
            time.sleep(0.01)
        for _ in range(100):  # those that are refused count nowhere
            with connected(running.port, "127.0.0.2") as refused:
                answer = refused.recv(1 << 16)
                assert reply_status(answer) == 503 and b"retry-after: " in answer
                assert "limits.max_connections_per_address" in teaches(answer)["error"]
        assert ask(running.port, "/token-classification", OK).status == 200
        shown = ask(running.port, "/info").json
        assert (shown["max_connections"], shown["max_connections_per_address"]) == (6, 2)
        for connection in held:
            connection.close()
        while connections.open:
            time.sleep(0.01)
        with connected(running.port, "127.0.0.2") as again:
            again.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert reply_status(again.recv(1 << 16)) == 200


def test_which_addresses_are_limited() -> None:
    counted = Connections(ServeSettings(limits=Limits(max_connections=8)))
    assert counted.max_per_address == 2
    accepted = [not counted.accept("10.0.0.1") for _ in range(3)]
    assert accepted == [True, True, False]
    assert not counted.accept("::ffff:10.0.0.2") and not counted.accept("10.0.0.2") and counted.accept("10.0.0.2")
    assert not counted.accept("2001:db8::1") and not counted.accept("2001:db8::2") and counted.accept("2001:db8::3")
    assert not counted.accept("2001:db8:0:1::3")
    counted.close("2001:db8::1")
    assert not counted.accept("fe80::1%eth0")
    assert not counted.accept("10.0.0.8")
    assert "8 connections are open (limits.max_connections)" in counted.accept("10.0.0.9")
    for address in (
        "10.0.0.1",
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.2",
        "2001:db8::2",
        "2001:db8:0:1::3",
        "fe80::1%eth0",
        "10.0.0.8",
    ):
        counted.close(address)
    assert counted.open == 0 and not counted._open_by_key
    for free in ("127.0.0.1", "127.8.0.1", "::1", None):  # a proxy or a load test of this machine
        assert not any(counted.accept(free) for _ in range(8))
        for _ in range(8):
            counted.close(free)
    chosen = ServeSettings(
        limits=Limits(max_connections=8, max_connections_per_address=1), trusted_proxies=("10.1.0.0/16",)
    )
    counted = Connections(chosen)
    assert not counted.accept("127.0.0.1") and counted.accept("127.0.0.1")  # it was asked for
    assert not any(counted.accept("10.1.2.3") for _ in range(5))
    counted = Connections(ServeSettings(limits=Limits(max_connections=8), behind_proxy=True))
    assert not any(counted.accept("10.0.0.1") for _ in range(8)) and counted.accept("10.0.0.1")


def test_a_body_that_is_refused_does_not_hold_its_connection(served: RunningServer) -> None:
    with open_socket(served.port) as connection:
        start = time.monotonic()
        connection.sendall(post("/token-classification", b"", "content-length: 300000000\r\n", length=False))
        assert reply_status(connection.recv(1 << 16)) == 413
        assert seconds_until_closed(connection, start) < 5


@pytest.mark.parametrize("kind", ["1.0", "1.1\r\nconnection: close"])
def test_a_refusal_is_heard_where_the_connection_is_closed_after_it(served: RunningServer, kind: str) -> None:
    """Closed with something unread, the client would be reset in the middle of its body."""
    head = (
        f"POST /token-classification HTTP/{kind}\r\nhost: localhost\r\n{JSON}content-length: 3000000\r\n\r\n".encode()
    )
    with open_socket(served.port) as connection:
        start = time.monotonic()
        connection.sendall(head)
        time.sleep(0.1)
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        assert reply_status(connection.recv(1 << 16)) == 413
        assert seconds_until_closed(connection, start) < 5


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings() -> None:
    chosen = override(
        ServeSettings(),
        ["limits.max_concurrent_requests=7", "timeouts.request_seconds=2.5", 'allowed_hosts=["example.org"]'],
    )
    assert (chosen.limits.max_concurrent_requests, chosen.timeouts.request_seconds, chosen.allowed_hosts) == (
        7,
        2.5,
        ("example.org",),
    )
    with pytest.raises(HeedfulError, match="max_body_bytes is 0: give a number from 1"):
        Limits(max_body_bytes=0)
    with pytest.raises(HeedfulError, match="max_connections_per_address is 0: give a number from 1"):
        Limits(max_connections_per_address=0)
    chosen = override(
        ServeSettings(), ["limits.max_connections_per_address=7", 'trusted_proxies=["::1", "10.0.0.0/8"]']
    )
    assert chosen.connections_per_address == 7 and ServeSettings().connections_per_address == 256
    assert ServeSettings(behind_proxy=True).connections_per_address is None
    with pytest.raises(HeedfulError, match="give one of them"):
        ServeSettings(behind_proxy=True, limits=Limits(max_connections_per_address=7))
    with pytest.raises(HeedfulError, match="trusted_proxies has 'proxy'"):
        ServeSettings(trusted_proxies=("proxy",))
    with pytest.raises(HeedfulError, match="graceful_shutdown_seconds is -1"):
        Timeouts(graceful_shutdown_seconds=-1.0)
    with pytest.raises(HeedfulError, match=r'did you mean "limits\.max_new_tokens"'):
        override(ServeSettings(), ["limits.max_new_token=7"])
