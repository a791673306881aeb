"""Measure the time to parse a request body: by `parse_body`, and by msgspec with a second parse for duplicate keys.

    python -m benchmarks.request_body

The script prints microseconds of processor time for each body of 100 inputs, the fastest of 50 rounds.
"""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from heedful.serve.body import parse_body
from heedful.serve.requests import PredictBody, QuestionAnsweringBody, TokenClassificationBody

TEXT = "the cat sat on the mat and looked at überall things " * 4
BODIES: tuple[tuple[str, Any, Any], ...] = (
    ("texts", PredictBody, [TEXT] * 100),
    ("pairs of texts", PredictBody, [{"text": TEXT, "text_pair": TEXT}] * 100),
    ("questions", QuestionAnsweringBody, [{"question": TEXT, "context": TEXT * 4}] * 100),
    ("lists of words", TokenClassificationBody, [TEXT.split()] * 100),
)
RUNS = 20  # parses of a round
ROUNDS = 50
MAX_VALUES = 100_000  # limit of the values of a body


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict; raise ValueError for a duplicate key."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values


def parse_twice(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """Parse a body with msgspec, and again with json for duplicate keys."""
    if raw.count(b",") + (raw.count(b'"') - raw.count(b'\\"')) // 2 > MAX_VALUES:
        raise ValueError("too many values")
    body = decoder.decode(raw)
    json.loads(raw, object_pairs_hook=unique_keys)
    return body


def fastest(parsers: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return microseconds of processor time of each parser, the least over rounds in which they alternate."""
    times = dict.fromkeys(parsers, float("inf"))
    for _ in range(ROUNDS):
        for name, parse in parsers.items():
            seconds = timeit.timeit(parse, timer=time.process_time, number=RUNS) / RUNS
            times[name] = min(times[name], seconds * 1e6)
    return times


def main() -> None:
    """Print a table."""
    print(f"{'100 inputs':16}{'bytes':>9}{'two parses':>12}{'one parse':>12}")
    for name, body_type, inputs in BODIES:
        raw = json.dumps({"inputs": inputs}, ensure_ascii=False).encode()
        times = fastest(
            {
                "twice": partial(parse_twice, msgspec.json.Decoder(body_type), raw),
                "once": partial(parse_body, body_type, raw, MAX_VALUES),
            }
        )
        print(f"{name:16}{len(raw):9,}{times['twice']:12.0f}{times['once']:12.0f}")


if __name__ == "__main__":
    main()
