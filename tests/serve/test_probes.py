"""Malformed HTTP and JSON beyond the cases of test_middleware.py, and memory over many thousand requests."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from test_middleware import JSON, OK, parse_error, post

from tests.support.http_client import ServerProcess, ask_on, record, reply_status, send_raw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOST = b"host: localhost\r\n"
HIDDEN_REQUEST = b"GET /info HTTP/1.1\r\nhost: localhost\r\n\r\n"
# reply_status() gives 0 for a connection that was closed without a response
REFUSAL_STATUSES = {0, 400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 431, 501, 505}


def framed(*lines: str, body: bytes = b"0\r\n\r\n") -> bytes:
    """Return a POST whose header lines say where its body ends, followed by a second request."""
    return (
        f"POST /token-classification HTTP/1.1\r\nhost: localhost\r\n{JSON}".encode()
        + "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        + b"\r\n"
        + body
        + HIDDEN_REQUEST
    )


def get(path: bytes = b"/live", version: bytes = b"1.1", more: bytes = b"") -> bytes:
    """Return a GET request; `more` are further header lines."""
    return b"GET " + path + b" HTTP/" + version + b"\r\n" + HOST + more + b"\r\n"


FRAMINGS = {  # a lenient parser reads two requests where a strict one reads one
    "encoding before length": framed("transfer-encoding: chunked", "content-length: 5"),
    "length before encoding": framed("content-length: 5", "transfer-encoding: chunked"),
    "two lengths": framed("content-length: 5", "content-length: 48"),
    "a list of lengths": framed("content-length: 5, 48"),
    "length +5": framed("content-length: +5"),
    "length -5": framed("content-length: -5"),
    "length 0x5": framed("content-length: 0x5"),
    "length 5.0": framed("content-length: 5.0"),
    "length in another script": framed("content-length: \u00b2"),
    "length of 30 digits": framed("content-length: " + "9" * 30),
    "encoding with a space": framed("transfer-encoding : chunked"),
    "encoding with a tab": framed("transfer-encoding:\tchunked\x0b"),
    "encoding xchunked": framed("transfer-encoding: xchunked"),
    "encoding gzip": framed("transfer-encoding: gzip, chunked"),
    "encoding identity": framed("transfer-encoding: identity"),
    "two encodings": framed("transfer-encoding: chunked", "transfer-encoding: identity"),
    "a huge chunk": framed("transfer-encoding: chunked", body=b"ffffffffffffffffff\r\nx"),
    "a chunk -1": framed("transfer-encoding: chunked", body=b"-1\r\nx\r\n0\r\n\r\n"),
    "a chunk 0x5": framed("transfer-encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk without an end": framed("transfer-encoding: chunked", body=b"2\r\nhello\r\n0\r\n\r\n"),
    "a folded length": framed("content-length:", " 5", "content-length: 48"),
    "a header without a colon": framed("strange", "content-length: 5"),
    "a header without a name": framed(": a", "content-length: 5"),
    "a space in a name": framed("x y: a", "content-length: 5"),
    "NUL in a value": framed("x: a\0b", "content-length: 5"),
    "a bare CR in a value": framed("x: a\rb", "content-length: 5"),
}
REQUEST_HEADS = {
    "HTTP/0.9": b"GET /live\r\n",
    "HTTP/1.2": get(version=b"1.2"),
    "HTTP/2.0": get(version=b"2.0"),
    "HTTP/1.1x": get(version=b"1.1x"),
    "no version": b"GET /live HTTP\r\n" + HOST + b"\r\n",
    "no path": b"GET  HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /live  HTTP/1.1\r\n" + HOST + b"\r\n",
    "a leading space": b" " + get(),
    "bare line feeds": get().replace(b"\r\n", b"\n"),
    "bare carriage returns": get().replace(b"\r\n", b"\r"),
    "an asterisk as the path": get(b"*"),
    "absolute, foreign": get(b"http://attacker.example/info"),
    "NUL in the path": get(b"/li\0ve"),
    "encoded NUL": get(b"/web/%00"),
    "dots": get(b"/web/../info"),
    "encoded dots": get(b"/web/%2e%2e/%2e%2e/etc/passwd"),
    "backslashes": get(b"/web/%5c..%5cinfo"),
    "doubly encoded": get(b"/web/%252e%252e/info"),
    "a path of 4 kB": get(b"/" + b"a" * 4_000),
    "a path that is no UTF-8": get(b"/%ff%fe"),
    "raw bytes in the path": get(b"/\xff\xfe"),
    "a method of 4 kB": b"A" * 4_000 + get()[3:],
    "a lower-case method": get().lower(),
    "TRACE": get().replace(b"GET", b"TRACE"),
    "DELETE": get().replace(b"GET", b"DELETE"),
    "a folded header": get(more=b"x: a\r\n b\r\n"),
    "a key with a line end": get(more=b"authorization: Bearer a\r\n b\r\n"),
    "an unknown expectation": get(more=b"expect: 200-maybe\r\n"),
    "many small headers": get(more=b"x: a\r\n" * 5_000),
    "a TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(40) + b"\r\n\r\n",
    "zeros": bytes(1_000) + b"\r\n\r\n",
    "an HTTP answer": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
}
MALFORMED_BODIES = {
    "Infinity": b'{"inputs": "a", "top_k": Infinity}',
    "-Infinity": b'{"inputs": "a", "top_k": -Infinity}',
    "1e400": b'{"inputs": "a", "top_k": 1e400}',
    "a million digits": b'{"inputs": "a", "top_k": ' + b"1" * 1_000_000 + b"}",
    "2^63": b'{"inputs": "a", "top_k": 9223372036854775808}',
    "2^64": b'{"inputs": "a", "top_k": 18446744073709551616}',
    "01": b'{"inputs": "a", "top_k": 01}',
    "+1": b'{"inputs": "a", "top_k": +1}',
    "1.": b'{"inputs": "a", "top_k": 1.}',
    "1.5": b'{"inputs": "a", "top_k": 1.5}',
    "0x1": b'{"inputs": "a", "top_k": 0x1}',
    "true": b'{"inputs": "a", "top_k": true}',
    "a number in quotes": b'{"inputs": "a", "top_k": "1"}',
    "a key twice, escaped": b'{"inputs": "a", "\\u0069nputs": "b"}',
    "overlong UTF-8": b'{"inputs": "\xc0\xaf"}',
    "a raw surrogate": b'{"inputs": "\xed\xa0\x80"}',
    "beyond Unicode": b'{"inputs": "\xf4\x90\x80\x80"}',
    "a lone low surrogate": b'{"inputs": "\\udc00"}',
    "surrogates the wrong way": b'{"inputs": "\\udc00\\ud800"}',
    "UTF-32": '{"inputs": "a"}'.encode("utf-32"),
    "UTF-16 without a mark": '{"inputs": "a"}'.encode("utf-16-le"),
    "latin-1": b'{"inputs": "\xe9"}',
    "a raw line end": b'{"inputs": "a\nb"}',
    "an unknown escape": b'{"inputs": "\\x41"}',
    "a short escape": b'{"inputs": "\\u00"}',
    "single quotes": b"{'inputs': 'a'}",
    "no quotes": b'{inputs: "a"}',
    "a comment": b'{"inputs": "a" /* b */}',
    "a comma at the end": b'{"inputs": "a",}',
    "two commas": b'{"inputs": ["a",,"b"]}',
    "cut off": b'{"inputs": "a"',
    "a NUL behind it": OK + b"\0",
    "text behind it": OK + b" x",
    "null": b"null",
    "only a number": b"1",
    "only a text": b'"inputs"',
    "inputs null": b'{"inputs": null}',
    "inputs a number": b'{"inputs": 1}',
    "inputs an object": b'{"inputs": {"__proto__": "a"}}',
    "no inputs": b"{}",
    "white space": b" \t\r\n",
}


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[ServerProcess]:
    """A server in a process of its own."""
    server = ServerProcess(f"tag={folders['tag']}", f"masked={folders['masked']}")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("name", FRAMINGS)
def test_a_request_hidden_behind_another_is_not_answered(server: ServerProcess, name: str) -> None:
    response = send_raw(server.port, FRAMINGS[name], pause=0.5)
    assert reply_status(response) in REFUSAL_STATUSES, response[:300]
    assert len(re.findall(rb"HTTP/1\.1 [0-9]{3} ", response)) <= 1 and b"model_id" not in response


@pytest.mark.parametrize("name", REQUEST_HEADS)
def test_an_unusual_request_head_is_refused_or_answered_once(server: ServerProcess, name: str) -> None:
    response = send_raw(server.port, REQUEST_HEADS[name], pause=0.5)
    assert reply_status(response) in REFUSAL_STATUSES | {200}, response[:300]
    assert len(re.findall(rb"HTTP/1\.1 [0-9]{3} ", response)) <= 1
    assert reply_status(response) != 200 or b'{"live":true}' in response
    assert b"root:" not in response


@pytest.mark.parametrize("name", MALFORMED_BODIES)
def test_a_malformed_body_is_refused_with_a_short_message(server: ServerProcess, name: str) -> None:
    response = send_raw(server.port, post("/fill-mask", MALFORMED_BODIES[name]), answers=1)
    assert reply_status(response) in {413, 422}, response[:300]
    assert len(json.dumps(parse_error(response))) < 500


def test_memory_is_flat_over_many_requests(server: ServerProcess) -> None:
    """No request of 20,000 fails, and memory and open files stop growing after the first fifth of them."""
    count = int(os.environ.get("HEEDFUL_SOAK", "20000"))
    statuses: Counter[int] = Counter()
    memory_mb, open_files = [], []
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for number in range(count):
        if number % 100 == 0:  # the client opens a new connection
            connection.close()
        path = "/token-classification" if number % 2 else "/fill-mask"
        body = {"inputs": "ada lives in paris " * (1 + number % 20) + ("" if number % 2 else "[MASK]")}
        statuses[ask_on(connection, path, body).status] += 1
        if number % (count // 10) == count // 10 - 1:
            memory_mb.append(server.memory())
            open_files.append(len(os.listdir(f"/proc/{server.server_pid}/fd")))
    connection.close()
    measurements = list(zip(memory_mb, open_files, strict=True))
    record("soak", requests=count, statuses=dict(statuses), memory_MB_and_descriptors=measurements)
    assert statuses == {200: count}
    assert memory_mb[-1] <= 1.05 * memory_mb[1]
    assert open_files[-1] <= open_files[1] + 2
