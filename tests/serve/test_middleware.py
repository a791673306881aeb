"""Limits and access checks of the server: bodies, headers, origins, texts, keys, logs, connections and settings."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
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
from heedful.serve.token_estimate import MARGIN, check_token_estimate, count_characters, group_in_turns
from tests.support.http_client import ask, open_socket, reply_status, seconds_until_closed, send_raw

JSON = "content-type: application/json\r\n"
KEY = b"a-key-of-more-than-16-characters"
OK = b'{"inputs": "the cat"}'


def post(path: str, body: bytes, headers: str = "", length: bool = True) -> bytes:
    """Return the bytes of a POST request."""
    size = f"content-length: {len(body)}\r\n" if length else ""
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}{size}{headers}\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    """Return the bytes of a request whose body is sent in chunks of this size."""
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    chunked_body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return post("/token-classification", b"", "transfer-encoding: chunked\r\n", length=False) + chunked_body


def parse_error(response: bytes) -> dict[str, Any]:
    """Return the JSON body of an error response; assert that it is short and reveals no internals of the server."""
    body = response.partition(b"\r\n\r\n")[2]
    assert len(body) < 2_000, len(body)
    parsed: dict[str, Any] = json.JSONDecoder().raw_decode(body.decode())[0]
    text = json.dumps(parsed)
    assert not any(word in text for word in ("Traceback", ".py", "site-packages", "/tmp", "Error(")), text
    return parsed


# -- bodies ---------------------------------------------------------------------------------------------------------

LONG = b"x" * 30_000
# name: the bytes of a request, and the statuses that may answer it
BODIES: dict[str, tuple[bytes, set[int]]] = {
    "announced 300 MB": (post("/token-classification", b"", "content-length: 300000000\r\n", length=False), {413}),
    "300 kB over": (post("/token-classification", b'{"inputs": "' + b"x" * 2_300_000 + b'"}'), {413}),
    "chunked without a length": (chunked(b'{"inputs": "' + b"x" * 2_300_000 + b'"}', 65_536), {413}),
    "chunks of one byte": (chunked(b'{"inputs": "' + b"x" * 100_000 + b'"}', 1), {413}),
    "gzip bomb": (post("/token-classification", gzip.compress(b" " * 10_000_000), "content-encoding: gzip\r\n"), {415}),
    "150k keys": (post("/token-classification", json.dumps({str(key): 0 for key in range(150_000)}).encode()), {413}),
    "40k keys": (post("/token-classification", json.dumps({str(key): 0 for key in range(40_000)}).encode()), {422}),
    "220k pairs": (post("/predict", b'{"inputs": [' + b'["",""],' * 220_000 + b'["a"]]}'), {413}),
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
    """The server, which runs in this process, refuses them without much work: processor time is the same under load."""
    request, statuses = BODIES[name]
    start = time.process_time()
    response = send_raw(served.port, request, seconds=60, answers=1)
    seconds = time.process_time() - start
    assert reply_status(response) in statuses, response[:500]
    assert "x" * 200 not in json.dumps(parse_error(response))  # the error does not repeat the body
    assert seconds < 5  # about 100 ms are used


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
def test_only_json_is_read(served: RunningServer, content_type: str) -> None:
    assert ask(served.port, "/token-classification", OK, content_type=content_type).status == 415
    assert ask(served.port, "/token-classification", OK, content_type="Application/JSON; charset=UTF-8").status == 200


# -- headers ----------------------------------------------------------------------------------------------------------

# the statuses that are allowed; 0: the server may close the connection while the client still sends
REQUEST_HEADS: dict[str, tuple[bytes, set[int]]] = {
    "length and encoding": (
        post("/token-classification", b"0\r\n\r\n", "transfer-encoding: chunked\r\n"),
        {400},
    ),
    "two lengths": (post("/token-classification", OK, "content-length: 5\r\n"), {400}),
    "a length that is no number": (post("/token-classification", b"", "content-length: x\r\n", length=False), {400}),
    "no host": (b"GET /live HTTP/1.1\r\n\r\n", {400}),
    "no host in 1.0": (b"GET /live HTTP/1.0\r\n\r\n", {400}),
    "two hosts": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", {400}),
    "1 MB header": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 1_000_000 + b"\r\n\r\n", {0, 400, 431}),
    "50k headers": (b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 50_000 + b"\r\n", {0, 400, 431}),
    "20 kB of headers": (b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 3_400 + b"\r\n", {400, 431}),
    "NUL in the path": (b"GET /live%00 HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "raw NUL in the path": (b"GET /live\0 HTTP/1.1\r\nhost: localhost\r\n\r\n", {400}),
    "dots": (b"GET /web/../live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "encoded dots": (b"GET /web/%2e%2e/live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "absolute": (b"GET http://localhost/live HTTP/1.1\r\nhost: localhost\r\n\r\n", {404}),
    "an unknown method": (b"BREW /live HTTP/1.1\r\nhost: localhost\r\n\r\n", {405}),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", {400, 404, 405}),
    "TLS instead of HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "websocket": (
        b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n\r\n",
        {403},
    ),
    "a foreign host": (b"GET /live HTTP/1.1\r\nhost: attacker.example\r\n\r\n", {403}),
    "a host that begins like the allowed one": (
        b"GET /live HTTP/1.1\r\nhost: localhost.attacker.example\r\n\r\n",
        {403},
    ),
    "an invalid timeout": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-request-timeout-ms: -1\r\n\r\n", {400}),
}


@pytest.mark.parametrize("name", REQUEST_HEADS)
def test_invalid_request_heads_are_rejected(served: RunningServer, name: str) -> None:
    request, statuses = REQUEST_HEADS[name]
    response = send_raw(served.port, request, answers=1)
    assert reply_status(response) in statuses, response[:300]
    if response:
        parse_error(response)


def test_pipelined_requests_are_answered_in_order(served: RunningServer) -> None:
    request = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    requests = request * 299 + request.replace(b"/live", b"/nope")
    responses = send_raw(served.port, requests, pause=3.0, answers=300)
    assert responses.count(b"HTTP/1.1 200 OK") == 299 and responses.count(b"HTTP/1.1 404") == 1
    assert responses.rindex(b"200 OK") < responses.index(b"404 Not")


def test_hosts_and_origins(served: RunningServer) -> None:
    port = served.port
    for host in ("localhost", "LOCALHOST:80", f"127.0.0.1:{port}", "[::1]:9"):
        assert ask(port, "/token-classification", OK, host=host).status == 200
    own_host = f"localhost:{port}"
    for origin in ("null", "https://example.org", "http://localhost:1", "file://"):
        assert ask(port, "/token-classification", OK, origin=origin, host=own_host).status == 403, origin
    assert ask(port, "/token-classification", OK, origin=f"http://{own_host}", host=own_host).status == 200


def test_browsers_may_follow_links_to_pages_only(served: RunningServer) -> None:
    """The Sec-Fetch headers of a browser tell the server whether another site sent the request, and why."""
    port = served.port
    assert ask(port, "/info", sec_fetch_site="cross-site").status == 403
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(port, "/", **link).status == 200
    assert ask(port, "/info", **link).status == 403
    assert ask(port, "/", sec_fetch_site="same-site", sec_fetch_mode="no-cors").status == 403


def test_other_sites_cannot_read_responses_by_default(served: RunningServer) -> None:
    port = served.port
    reply = ask(port, "/token-classification", OK)
    assert "access-control-allow-origin" not in reply.headers and "server" not in reply.headers
    assert ask(port, "/token-classification", method="OPTIONS", origin=f"http://127.0.0.1:{port}").status == 405


def test_pages_of_allowed_origins_may_send_requests(folders: dict[str, str]) -> None:
    """A browser sends a preflight request first, without a key."""
    page = "https://app.example.org"
    preflight = {"method": "OPTIONS", "access_control_request_method": "POST"}
    with background({"tag": folders["tag"]}, ServeSettings(cors_allow_origins=(page,)), keys=(KEY,)) as running:
        allowed = ask(running.port, "/token-classification", origin=page, **preflight)
        assert allowed.status == 204 and not allowed.body
        assert allowed.headers["access-control-allow-origin"] == page and allowed.headers["vary"] == "origin"
        assert "authorization, content-type" in allowed.headers["access-control-allow-headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert ask(running.port, "/token-classification", OK, origin=page).status == 401
        reply = ask(running.port, "/token-classification", OK, origin=page, authorization=f"Bearer {KEY.decode()}")
        assert reply.status == 200 and reply.headers["access-control-expose-headers"] == "retry-after"
        assert ask(running.port, "/token-classification", origin="https://example.org", **preflight).status == 403
        assert ask(running.port, "/token-classification", origin=page, method="OPTIONS").status == 401


def test_an_upgrade_to_http2_is_ignored(served: RunningServer) -> None:
    upgrade = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    response = send_raw(served.port, post("/token-classification", OK, upgrade), answers=1)
    assert reply_status(response) == 200


def test_a_pipelined_request_may_arrive_in_two_parts(served: RunningServer) -> None:
    request = post("/token-classification", OK)
    with open_socket(served.port) as connection:
        connection.sendall(request + request[:-5])
        responses = connection.recv(1 << 16)
        connection.sendall(request[-5:])
        while responses.count(b"HTTP/1.1 200 OK") < 2 and (received := connection.recv(1 << 16)):
            responses += received
        assert responses.count(b"HTTP/1.1 200 OK") == 2


# -- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a " * 500_000, "\u0301" * 500_000, "\u4e2d" * 400_000])
def test_texts_are_cut_or_refused_before_they_are_tokenised(served: RunningServer, text: str) -> None:
    body = json.dumps({"inputs": text}, ensure_ascii=False).encode()  # \u escapes would make a larger body
    refused = ask(served.port, "/token-classification", body)
    assert refused.status == 413 and refused.json["error_type"] == "too_large"
    truncated = ask(served.port, "/embed", body)
    assert truncated.status == 200 and len(truncated.json) == 1
    not_truncated = json.dumps({"inputs": text, "truncate": False}, ensure_ascii=False).encode()
    assert ask(served.port, "/embed", not_truncated).status == 413
    assert ask(served.port, "/tokenize", body).status == 413


# To embed a text, the server first tokenizes 16 characters for each token that the model can read. It tokenizes more
# of a text whose first characters have fewer tokens than the limit, such as a text that starts with white space.


@pytest.mark.parametrize("text", [" " * 20_000 + "the cat", "x" * 3_000 + " the cat"])
def test_texts_with_much_white_space_are_not_truncated_too_early(
    served: RunningServer, engines: dict[str, Engine], text: str
) -> None:
    (expected,) = engines["embed"]([text])
    assert expected["truncated_tokens"] == 0
    for truncate in (True, False):
        body = {"inputs": text, "normalize": False, "truncate": truncate}
        assert ask(served.port, "/embed", body).json[0] == pytest.approx(expected["vector"], abs=1e-5)
    result = ask(served.port, "/v1/embeddings", {"input": [text, "the cat"]}).json
    assert result["usage"]["total_tokens"] == expected["tokens"] + 4


def test_one_text_with_much_white_space_among_many(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = [" " * 1_000 + "the cat", *["a dog"] * 400]
    vectors = ask(served.port, "/embed", {"inputs": texts, "normalize": False}).json
    for index in (0, 1, 400):
        (expected,) = engines["embed"]([texts[index]])
        assert vectors[index] == pytest.approx(expected["vector"], abs=1e-5)


def test_too_much_white_space_is_refused(served: RunningServer) -> None:
    refused = ask(served.port, "/embed", {"inputs": [" " * 200_000] * 2})
    assert refused.status == 413 and "2 texts have few tokens" in refused.json["error"]
    too_many_tokens = {"inputs": " " * 20_000 + "the cat " * 30, "truncate": False}
    assert ask(served.port, "/embed", too_many_tokens).status == 413


def test_attention_of_a_text_with_much_white_space(served: RunningServer) -> None:
    port = served.port
    for model in ("tag", "embed"):
        attention = ask(port, "/attention", {"inputs": " " * 5_000 + "the cat", "model": model})
        assert attention.status == 200 and len(attention.json["tokens"]) == 4
        assert ask(port, "/attention", {"inputs": "cat " * 5_000, "model": model}).status == 413


def test_a_text_that_is_tokenized_twice_is_admitted_once(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with background({"embed": folders["embed"]}) as running:
        engine: Any = running.service.model_queues["embed"].engine
        tokenize = engine.tokenize

        def drain_and_tokenize(inputs: Any) -> Any:
            running.service.scheduler.drain()  # refuses requests that are not yet admitted
            return tokenize(inputs)

        monkeypatch.setattr(engine, "tokenize", drain_and_tokenize)
        assert ask(running.port, "/embed", {"inputs": " " * 20_000 + "the cat"}).status == 200


def test_far_too_many_tokens_are_refused_before_all_are_tokenized(
    served: RunningServer, engines: dict[str, Engine]
) -> None:
    """Tokenization stops when the tokens are too many. Tokens that an embedding model truncates do not count."""
    tokenized_characters: list[int] = []  # for each call of the tokenizer

    def encode_batch(texts: list[str]) -> Any:
        tokenized_characters.append(sum(map(len, texts)))
        return engines["tag"].tokenizer.encode_batch(texts)

    class FakeEngine:
        kind, limit = "tokens", engines["tag"].limit
        tokenizer = SimpleNamespace(encode_batch=encode_batch)

    for texts in (["a " * 100_000], ["a " * 200] * 500):
        tokenized_characters.clear()
        with pytest.raises(TooLongError, match="may have 9000"):
            list(check_token_estimate(FakeEngine(), texts, 9_000))
        assert max(tokenized_characters) <= TURN_CHARACTERS
        characters_of_limit = 2 * MARGIN * 9_000  # each token is "a" and a space
        assert characters_of_limit <= sum(tokenized_characters) <= characters_of_limit + 2 * TURN_CHARACTERS
    list(check_token_estimate(FakeEngine(), ["a " * 8_900], 9_000))
    FakeEngine.kind = "embedding"
    list(check_token_estimate(FakeEngine(), ["a " * 100_000], 9_000))
    assert ask(served.port, "/token-classification", {"inputs": "\u4e2d" * 200_000, "model": "tag"}).status == 413


@given(sizes=st.lists(st.integers(0, 40_000), max_size=12))
def test_inputs_are_grouped_into_turns_of_few_characters(sizes: list[int]) -> None:
    """Each input is in one group, in order; an input longer than a turn is a group by itself."""
    inputs: list[Any] = ["x" * size for size in sizes]
    next_index = 0
    for first_index, group in group_in_turns(inputs):
        assert first_index == next_index
        assert group == inputs[first_index : first_index + len(group)]
        assert len(group) == 1 or sum(map(len, group)) <= TURN_CHARACTERS
        next_index += len(group)
    assert next_index == len(inputs)


def test_characters_of_inputs_are_counted() -> None:
    """The characters that are tokenized count: a prompt is tokenized with each of its choices."""
    assert count_characters({"prompt": "ab", "choices": ["c", "def"]}) == 3 + 5
    assert count_characters({"question": "ab", "context": "c"}) == 3
    assert count_characters(("ab", "c")) == 5


def test_answers_do_not_depend_on_the_number_of_tokenization_turns(
    served: RunningServer, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["ada lives in paris", "the cat", "a" * 30, "on a mat and who wrote it", ""] * 4
    monkeypatch.setattr("heedful.serve.token_estimate.TURN_CHARACTERS", 20)
    replies = ask(served.port, "/token-classification", {"inputs": texts}).json
    for text, reply in zip(texts, replies, strict=True):
        (expected,) = engines["tag"]([text])
        assert [word["label"] for word in reply["words"]] == [word["label"] for word in expected["words"]], text
    vectors = ask(served.port, "/embed", {"inputs": texts, "normalize": False}).json
    for text, vector in zip(texts, vectors, strict=True):
        assert vector == pytest.approx(engines["embed"]([text])[0]["vector"], abs=1e-5)
    token_lists = ask(served.port, "/tokenize", {"inputs": texts, "model": "tag"}).json
    for text, tokens in zip(texts, token_lists, strict=True):
        assert [token["id"] for token in tokens] == list(engines["tag"].tokenizer.encode(text).ids)
    refused = ask(served.port, "/generate", {"inputs": ["a b"] * 30 + ["a " * 60], "max_new_tokens": 2})
    assert refused.status == 422 and "input 30" in refused.json["error"]


def test_requests_accepted_before_a_shutdown_are_answered(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with background({"tag": folders["tag"]}) as running:

        def start_shutdown(*unused: object, **unused_options: object) -> Iterator[None]:
            running.service.scheduler.drain()
            yield

        # the tokens are estimated after a request was accepted, and before its texts are tokenized
        monkeypatch.setattr("heedful.serve.context.check_token_estimate", start_shutdown)
        assert ask(running.port, "/token-classification", {"inputs": "ada " * 5_000}).status == 200
        assert ask(running.port, "/token-classification", {"inputs": "ada"}).status == 503
        ready = ask(running.port, "/v2/models/tag/ready")
        assert ready.status == 503 and ready.json == {"ready": False}


def test_requests_above_the_limits_are_refused(folders: dict[str, str]) -> None:
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
        assert ask(port, "/generate", {"inputs": "a b"}).status == 200  # without max_new_tokens, the limit applies
        assert ask(port, "/generate", {"inputs": "a b", "max_new_tokens": 7}).status == 413


# -- keys, logs, errors ---------------------------------------------------------------------------------------------


def test_requests_need_one_of_the_api_keys(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_bytes(KEY + b"\nanother-key-for-a-change\n\n")
    caplog.set_level(logging.INFO, "heedful.serve")
    with background({"tag": folders["tag"]}, keys=read_api_keys(key_file)) as running:
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


def test_a_file_without_api_keys_is_rejected(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    for content in (b"", b"short", b"with a space in between\n"):
        key_file.write_bytes(content)
        with pytest.raises(HeedfulError, match="holds no key: write one on a line, 16 or more"):
            read_api_keys(key_file)
    with pytest.raises(HeedfulError, match="cannot be read"):
        read_api_keys(tmp_path / "nothing")


@pytest.mark.parametrize("log_text", [False, True])
def test_the_log_has_one_line_for_each_request(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture, log_text: bool
) -> None:
    caplog.set_level(logging.INFO, "heedful.serve")
    with background({"tag": folders["tag"]}, ServeSettings(log_text=log_text)) as running:
        ask(running.port, "/token-classification", {"inputs": "paris\r\nFORGED secret words"})
        ask(running.port, "/nope%0d%0aFORGED%e2%80%a8")
    lines = [record.getMessage() for record in caplog.records if record.name == "heedful.serve"]
    assert len(lines) == 2 and all(line.isascii() and line.isprintable() for line in lines)
    answered, unknown_path = map(json.loads, lines)
    assert (answered["path"], answered["status"]) == ("/token-classification", 200)
    assert answered["tokens"] > 3 and answered["duration_ms"] > 0
    assert ("secret" in lines[0]) is log_text
    assert unknown_path["status"] == 404


def test_retry_after_is_a_random_number_of_whole_seconds() -> None:
    errors = [to_http_error(QueueFullError("no", 7.3)) for _ in range(60)]
    seconds = {dict(error.headers)["retry-after"] for error in errors}
    assert seconds == {"7", "8", "9"}


# -- connections ------------------------------------------------------------------------------------------------------


def test_slow_connections_are_closed_and_other_requests_answered(folders: dict[str, str]) -> None:
    timeouts = Timeouts(headers_seconds=1.0, body_seconds=1.0, keep_alive_seconds=1.0, write_seconds=1.0)
    with background({"tag": folders["tag"]}, ServeSettings(timeouts=timeouts)) as running:
        port = running.port
        start = time.monotonic()
        silent = [open_socket(port) for _ in range(10)]
        sending_heads = [open_socket(port) for _ in range(30)]
        sending_bodies = [open_socket(port) for _ in range(30)]
        for connection in sending_heads:
            connection.sendall(b"POST /token-classification HTTP/1.1\r\nhost: loc")
        for connection in sending_bodies:
            connection.sendall(post("/token-classification", b"", "content-length: 1000\r\n", length=False) + b'{"inp')
        for next_byte in (b" ", b"a", b"a", b"a"):
            for connection in (*sending_heads, *sending_bodies):
                connection.sendall(next_byte)
            request_start = time.monotonic()
            assert ask(port, "/token-classification", OK).status == 200
            assert time.monotonic() - request_start < 2
            time.sleep(0.1)
        for connection in (*silent, *sending_heads, *sending_bodies):
            with connection:
                # the timeout, LINGER_SECONDS, and a margin for a busy machine
                assert 0.9 < seconds_until_closed(connection, start) < 8
        assert ask(port, "/token-classification", OK).status == 200


def test_clients_that_do_not_read_are_disconnected(folders: dict[str, str]) -> None:
    with background({"tag": folders["tag"]}, ServeSettings(timeouts=Timeouts(write_seconds=0.5))) as running:
        connections = [open_socket(running.port) for _ in range(3)]
        for connection in connections:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300)
        while not running.server.server_state.connections:
            time.sleep(0.01)
        deadline = time.monotonic() + 30
        while running.server.server_state.connections and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connections[0].recv(1_000)  # far less than MIN_READ_BYTES
            time.sleep(0.05)
        assert not running.server.server_state.connections
        for connection in connections:
            connection.close()


def test_unread_output_of_all_connections_is_limited(folders: dict[str, str]) -> None:
    """Above the limit, the client that has not read for the longest time is disconnected."""
    with background({"tag": folders["tag"]}, ServeSettings(limits=Limits(max_send_buffer_bytes=100))) as running:
        response_bytes = len(ask(running.port, "/openapi.json").body)
        open_connections = running.server.server_state.connections
        while open_connections:
            time.sleep(0.01)
        connections = [open_socket(running.port)]
        while not open_connections:
            time.sleep(0.01)
        (oldest,) = open_connections
        connections += [open_socket(running.port) for _ in range(12)]
        for connection in connections:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300)
        deadline = time.monotonic() + 20
        while oldest in open_connections and time.monotonic() < deadline:
            unread_bytes = sum(connection.transport.get_write_buffer_size() for connection in list(open_connections))
            assert unread_bytes <= 100 + 2 * response_bytes  # a connection may just be writing
            time.sleep(0.01)
        assert oldest not in open_connections and ask(running.port, "/openapi.json").status == 200
        for connection in connections:
            connection.close()


def test_bodies_being_received_are_limited_over_all_connections(folders: dict[str, str]) -> None:
    """Above the limit, a body may only have its share; bytes of refused or disconnected bodies are released."""
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


def test_the_number_of_connections_is_limited(folders: dict[str, str]) -> None:
    with background({"tag": folders["tag"]}, ServeSettings(limits=Limits(max_connections=5))) as running:
        open_sockets = [open_socket(running.port) for _ in range(5)]
        while len(running.server.server_state.connections) < 5:
            time.sleep(0.01)
        refused = send_raw(running.port, b"")
        assert reply_status(refused) == 503 and b"retry-after: " in refused
        for connection in open_sockets:
            connection.close()
        while running.server.server_state.connections:
            time.sleep(0.01)
        assert ask(running.port, "/live").status == 200


def connect_from(port: int, address: str) -> socket.socket:
    """Connect to a server from this address of the loopback network."""
    return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(address, 0))


def test_the_connections_of_one_address_are_limited(folders: dict[str, str]) -> None:
    limits = Limits(max_connections=6, max_connections_per_address=2)
    with background({"tag": folders["tag"]}, ServeSettings(limits=limits)) as running:
        connections = running.server.shared.open_connections
        open_sockets = [connect_from(running.port, "127.0.0.2") for _ in range(2)]
        while connections.open < 2:
            time.sleep(0.01)
        for _ in range(100):  # refused connections are not counted
            with connect_from(running.port, "127.0.0.2") as refused:
                response = refused.recv(1 << 16)
                assert reply_status(response) == 503 and b"retry-after: " in response
                assert "limits.max_connections_per_address" in parse_error(response)["error"]
        assert ask(running.port, "/token-classification", OK).status == 200
        info = ask(running.port, "/info").json
        assert (info["max_connections"], info["max_connections_per_address"]) == (6, 2)
        for connection in open_sockets:
            connection.close()
        while connections.open:
            time.sleep(0.01)
        with connect_from(running.port, "127.0.0.2") as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert reply_status(connection.recv(1 << 16)) == 200


def count_accepted(connections: Connections, *addresses: str | None) -> int:
    """Open a connection from each address, and return how many are accepted."""
    # accept returns the reason for a refusal, and "" if it accepts the connection
    return sum(connections.accept(address) == "" for address in addresses)


def test_connections_are_counted_by_address_or_network() -> None:
    """By default, a quarter of the connections may come from one IPv4 address or one /64 network of IPv6."""
    connections = Connections(ServeSettings(limits=Limits(max_connections=8)))
    assert connections.max_per_address == 2
    assert count_accepted(connections, "10.0.0.1", "10.0.0.1", "10.0.0.1") == 2
    assert count_accepted(connections, "::ffff:10.0.0.2", "10.0.0.2", "10.0.0.2") == 2
    assert count_accepted(connections, "2001:db8::1", "2001:db8::2", "2001:db8::3") == 2
    assert count_accepted(connections, "2001:db8:0:1::3") == 1
    assert connections.open == 7


def test_connections_of_all_addresses_are_counted() -> None:
    connections = Connections(ServeSettings(limits=Limits(max_connections=8)))
    addresses = [*(f"10.0.0.{host}" for host in range(1, 6)), "2001:db8::1", "2001:db8:0:1::3", "fe80::1%eth0"]
    assert count_accepted(connections, *addresses) == 8
    assert "8 connections are open (limits.max_connections)" in connections.accept("10.0.0.9")
    connections.close("2001:db8::1")
    assert count_accepted(connections, "10.0.0.9") == 1
    for address in ("10.0.0.9", *addresses[:5], *addresses[6:]):
        connections.close(address)
    assert connections.open == 0 and not connections._open_by_key


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", None])
def test_clients_on_this_machine_may_open_all_connections(address: str | None) -> None:
    """Such a client may be a proxy, unless the limit for each address is set explicitly."""
    connections = Connections(ServeSettings(limits=Limits(max_connections=8)))
    assert count_accepted(connections, *[address] * 8) == 8


def test_trusted_proxies_may_open_all_connections() -> None:
    limits = Limits(max_connections=8, max_connections_per_address=1)
    connections = Connections(ServeSettings(limits=limits, trusted_proxies=("10.1.0.0/16",)))
    assert count_accepted(connections, "127.0.0.1", "127.0.0.1") == 1
    assert count_accepted(connections, *["10.1.2.3"] * 5) == 5


def test_behind_a_proxy_an_address_may_open_all_connections() -> None:
    connections = Connections(ServeSettings(limits=Limits(max_connections=8), behind_proxy=True))
    assert count_accepted(connections, *["10.0.0.1"] * 9) == 8


def test_a_connection_is_closed_soon_after_its_body_was_refused(served: RunningServer) -> None:
    with open_socket(served.port) as connection:
        start = time.monotonic()
        connection.sendall(post("/token-classification", b"", "content-length: 300000000\r\n", length=False))
        assert reply_status(connection.recv(1 << 16)) == 413
        assert seconds_until_closed(connection, start) < 5


@pytest.mark.parametrize("version", ["1.0", "1.1\r\nconnection: close"])
def test_a_refusal_is_received_although_the_body_was_not_read(served: RunningServer, version: str) -> None:
    """If the server closed the connection with unread input, the client would get a reset instead of the response."""
    headers = f"host: localhost\r\n{JSON}content-length: 3000000\r\n"
    head = f"POST /token-classification HTTP/{version}\r\n{headers}\r\n".encode()
    with open_socket(served.port) as connection:
        start = time.monotonic()
        connection.sendall(head)
        time.sleep(0.1)
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        assert reply_status(connection.recv(1 << 16)) == 413
        assert seconds_until_closed(connection, start) < 5


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_overridden() -> None:
    assignments = [
        "limits.max_concurrent_requests=7",
        "timeouts.request_seconds=2.5",
        'allowed_hosts=["example.org"]',
        'trusted_proxies=["::1", "10.0.0.0/8"]',
    ]
    settings = override(ServeSettings(), assignments)
    assert settings.limits.max_concurrent_requests == 7
    assert settings.timeouts.request_seconds == 2.5
    assert settings.allowed_hosts == ("example.org",)
    assert settings.trusted_proxies == ("::1", "10.0.0.0/8")


def test_behind_a_proxy_connections_of_one_address_are_unlimited() -> None:
    assert ServeSettings().connections_per_address == 256
    assert ServeSettings(limits=Limits(max_connections_per_address=7)).connections_per_address == 7
    assert ServeSettings(behind_proxy=True).connections_per_address is None


def test_wrong_settings_are_rejected() -> None:
    with pytest.raises(HeedfulError, match="max_body_bytes is 0: give a number from 1"):
        Limits(max_body_bytes=0)
    with pytest.raises(HeedfulError, match="max_connections_per_address is 0: give a number from 1"):
        Limits(max_connections_per_address=0)
    with pytest.raises(HeedfulError, match="give one of them"):
        ServeSettings(behind_proxy=True, limits=Limits(max_connections_per_address=7))
    with pytest.raises(HeedfulError, match="trusted_proxies has 'proxy'"):
        ServeSettings(trusted_proxies=("proxy",))
    with pytest.raises(HeedfulError, match="graceful_shutdown_seconds is -1"):
        Timeouts(graceful_shutdown_seconds=-1.0)
    with pytest.raises(HeedfulError, match=r'did you mean "limits\.max_new_tokens"'):
        override(ServeSettings(), ["limits.max_new_token=7"])
