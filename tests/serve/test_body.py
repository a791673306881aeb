"""Parsing of request bodies: once, and strictly."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson
import pytest

from heedful.serve import body as bodies
from heedful.serve.body import parse_body
from heedful.serve.middleware import HTTPError
from heedful.serve.requests import ContextQuestion, InferBody, PredictBody, QuestionAnsweringBody, TextPair
from tests.support.http_client import ask

MAX_VALUES = 1_000


class CountingDecoder(json.JSONDecoder):
    """A JSON decoder that counts its calls."""

    calls = 0

    def decode(self, s: str, *args: Any) -> Any:
        """Count the call, and decode."""
        self.calls += 1
        return super().decode(s, *args)


def test_a_body_is_decoded_once(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_parse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the body is parsed by another parser, too")

    decoder = CountingDecoder(object_pairs_hook=bodies._unique_keys)
    monkeypatch.setattr(bodies, "DECODER", decoder)
    for module in (msgspec.json, orjson):
        monkeypatch.setattr(module, "loads" if module is orjson else "decode", second_parse)
    assert ask(served.port, "/token-classification", {"inputs": "a"}).status == 200
    assert decoder.calls == 1


def test_a_body_is_converted_to_its_type() -> None:
    raw = '{"inputs": ["é", ["a", "\\ud83d\\ude00"], {"text": "b"}]}'.encode()
    assert parse_body(PredictBody, raw, MAX_VALUES) == PredictBody(inputs=["é", ["a", "😀"], TextPair("b")])
    raw = b'{"inputs": {"question": "q", "context": "c"}, "model": "m"}'
    assert parse_body(QuestionAnsweringBody, raw, MAX_VALUES) == QuestionAnsweringBody(
        inputs=ContextQuestion("q", "c"), model="m"
    )


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b'{"inputs": "a", "inputs": "b"}', 422, "a key is given twice"),
        (b'{"inputs": "a", "\\u0069nputs": "b"}', 422, "a key is given twice"),
        (b'{"inputs": 1}', 422, "got `int`"),
        (b'{"inputs": "a", "input": "b"}', 422, "unknown field `input`"),
        (b'{"inputs": NaN}', 422, "it is not JSON in UTF-8"),
        (b'{"inputs": 1e400}', 422, "the number 1e400 is out of range"),
        (b'{"inputs": ' + b"1" * 401 + b"}", 422, "the number 11111111111111111111 is out of range"),
        (b'{"inputs": "\\udc00"}', 422, "it is not JSON in UTF-8"),
        (b'{"inputs": "\xff"}', 422, "it is not JSON in UTF-8"),
        (b'{"inputs": ' + b"[" * 100_000, 422, "it is not JSON in UTF-8"),
        (b'{"inputs": ' + b"9" * 5_000 + b"}", 422, "is out of range"),
        (b'{"inputs": [' + b'"",' * 2_000 + b'""]}', 413, "more than about 1000 values"),
    ],
)
def test_an_invalid_body_is_refused_with_the_reason(raw: bytes, status: int, message: str) -> None:
    with pytest.raises(HTTPError) as raised:
        parse_body(PredictBody, raw, MAX_VALUES)
    assert raised.value.status == status and message in raised.value.message


@pytest.mark.parametrize("value", [b"1e999", b"-1e999", b"Infinity", b'{"a": 1, "a": 2}', b'"\\ud800"'])
def test_ignored_parameters_are_parsed_strictly(value: bytes) -> None:
    raw = b'{"inputs": [{"name": "text", "shape": [0], "datatype": "BYTES", "data": []}], "parameters": {"x": %s}}'
    parse_body(InferBody, raw % b"1e99", MAX_VALUES)
    with pytest.raises(HTTPError, match="the body is not understood"):
        parse_body(InferBody, raw % value, MAX_VALUES)
