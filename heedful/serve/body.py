"""Reading of request bodies: checks of the headers, limits of size and time, and a strict parser of typed JSON."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.types import Receive

from heedful.infer.scheduling.errors import UnavailableError
from heedful.serve.middleware import ClientDisconnectedError, HTTPError, RequestLog

BodyType = TypeVar("BodyType")
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _InvalidJSONError(ValueError):
    """JSON that Python's parser accepts, but this server refuses. The client gets the message."""


def body_size_error(max_bytes: int) -> HTTPError:
    """Return the response to a body over the limit."""
    return HTTPError(413, "too_large", f"the body is larger than {max_bytes} bytes")


def check_body_headers(record: RequestLog, max_bytes: int) -> None:
    """Raise an HTTPError if the headers announce a body that is not JSON in UTF-8, is compressed, or is too long."""
    media_type, _, parameters = record.header(b"content-type").lower().partition(";")
    charset = re.search(r"charset=\"?([^\s;\"]+)", parameters)
    if media_type.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8")):
        raise HTTPError(415, "media_type", "send application/json, in UTF-8")
    if record.header(b"content-encoding").lower() not in ("", "identity"):
        raise HTTPError(415, "media_type", "compressed bodies are not read")
    length = record.header(b"content-length")
    if length and (not re.fullmatch(r"[0-9]{1,18}", length) or int(length) > max_bytes):
        raise body_size_error(max_bytes)


@dataclass(kw_only=True, slots=True)
class BodyBudget:
    """The memory budget of the request bodies that are being received, over all connections."""

    max_bytes: int  # bytes of all bodies above which a single body may have at most `share` bytes
    share: int  # bytes that any body may always have
    held_bytes: int = 0  # bytes of all bodies that are being received


async def read_body(receive: Receive, max_bytes: int, seconds: float, budget: BodyBudget) -> bytes:
    """Receive a request body, and return it.

    Args:
        receive: The ASGI callable of the request.
        max_bytes: Maximum bytes of the body.
        seconds: Maximum seconds until the whole body is received.
        budget: Memory budget over all connections.

    Raises:
        HTTPError: If the body is too large or too slow.
        UnavailableError: If the budget is used up.
        ClientDisconnectedError: If the client closes the connection.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                budget.held_bytes += len(chunks[-1])
                if size > max_bytes:
                    raise body_size_error(max_bytes)
                if budget.held_bytes > budget.max_bytes and size > budget.share:
                    raise UnavailableError("too many large bodies are being received")
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise HTTPError(408, "timeout", "the body was not received in time") from None
    finally:
        budget.held_bytes -= size


def parse_body(body_type: type[BodyType], raw: bytes, max_values: int) -> BodyType:
    """Parse JSON once and convert it to `body_type`.

    A body is refused if it is not UTF-8, is invalid JSON, is nested too deeply, or contains duplicate keys, NaN,
    infinities, numbers beyond float64, unpaired surrogates, or fields or values that `body_type` does not have.
    Python's json parser is used since msgspec's parser ignores duplicate keys. With `msgspec.convert`, it takes
    three quarters of the time of msgspec's parser and a second parse for the keys (benchmarks/request_body.py).

    Args:
        body_type: A msgspec Struct.
        raw: Bytes of the body.
        max_values: Approximate maximum number of JSON values, which take far more memory than their text.

    Raises:
        HTTPError: If the body is refused.
    """
    if raw.count(b",") + (raw.count(b'"') - raw.count(b'\\"')) // 2 > max_values:
        raise HTTPError(413, "too_large", f"the body has more than about {max_values} values")
    try:
        text = raw.decode()
        values = DECODER.decode(text)
        if "\\" in text and ESCAPED_SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()  # raises UnicodeEncodeError for an unpaired surrogate
        return msgspec.convert(values, body_type, strict=True)
    except (ValueError, RecursionError) as error:
        reason = "it is not JSON in UTF-8"
        if isinstance(error, msgspec.ValidationError | _InvalidJSONError):
            reason = str(error)[:150] + getattr(body_type, "hint", "")
        raise HTTPError(422, "validation", f"the body is not understood: {reason}") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object from its (key, value) pairs; raises an _InvalidJSONError for a duplicate key."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise _InvalidJSONError("a key is given twice")
    return values


def _finite(number: str) -> float:
    """Parse a JSON number; raises an _InvalidJSONError if it is beyond float64."""
    value = float(number)
    if not math.isfinite(value):
        raise _InvalidJSONError(f"the number {number[:20]} is out of range")
    return value


def _integer(number: str) -> int:
    """Parse a JSON integer; raises an _InvalidJSONError if it is beyond float64."""
    _finite(number)
    return int(number)


def _refuse_constant(name: str) -> float:
    """Raise a ValueError for NaN, Infinity and -Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant
)
