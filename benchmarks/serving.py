"""A server under open-loop load: Poisson arrivals at shares of the measured capacity; goodput and latency."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from report import facts, machine_busy

from heedful.serve.run import Running, background
from heedful.serve.settings import ServeSettings

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "who",
    "wrote",
    "it",
    "first",
    "she",
    "lives",
    "here",
    "in",
    "france",
)
PERCENTILES = (50, 90, 99, 99.9)


@dataclass(kw_only=True, slots=True)
class Heard:
    """What came back."""

    seconds: list[float] = field(default_factory=list)  # of answers
    refused: list[float] = field(default_factory=list)  # seconds until a refusal
    statuses: Counter[int] = field(default_factory=Counter)


class Client:
    """Connections that are kept, one for each request under way."""

    def __init__(self, port: int, route: str) -> None:
        self.port, self.route = port, route
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: bytes, heard: Heard, start: float) -> None:
        """One request; its time counts from when it was due."""
        try:
            reader, writer = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
            head = f"POST {self.route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(size)
            status = int(answer[9:12])
            self.free.append((reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        heard.statuses[status] += 1
        (heard.seconds if status == 200 else heard.refused).append(time.perf_counter() - start)

    def close(self) -> None:
        """All of them."""
        for _, writer in self.free:
            writer.close()


def texts(count: int, words: int, seed: int) -> list[bytes]:
    """Bodies with texts of so many words."""
    draw = random.Random(seed)
    return [json.dumps({"inputs": " ".join(draw.choices(WORDS, k=words))}).encode() for _ in range(count)]


async def capacity(port: int, route: str, bodies: list[bytes], seconds: float, clients: int) -> float:
    """Answers per second when so many clients ask one after another."""
    client, heard, end = Client(port, route), Heard(), time.perf_counter() + seconds

    async def one(number: int) -> None:
        while time.perf_counter() < end:
            number += 1
            await client.ask(bodies[number % len(bodies)], heard, time.perf_counter())

    await asyncio.gather(*(one(number * 997) for number in range(clients)))
    client.close()
    return heard.statuses[200] / seconds


async def load(port: int, route: str, bodies: list[bytes], rate: float, seconds: float, seed: int) -> Heard:
    """Arrivals do not wait for answers."""
    client, heard, draw = Client(port, route), Heard(), random.Random(seed)
    due, tasks = time.perf_counter(), []
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(client.ask(draw.choice(bodies), heard, due)))
        due += draw.expovariate(rate)
    await asyncio.gather(*tasks)
    client.close()
    return heard


def row(name: str, rate: float, seconds: float, heard: Heard) -> dict[str, Any]:
    """A line of the table."""
    found: dict[str, Any] = {"load": name, "offered": rate, "goodput": heard.statuses[200] / seconds}
    for share in PERCENTILES:
        found[f"p{share:g} ms"] = 1000 * float(np.percentile(heard.seconds, share)) if heard.seconds else None
    found["refused p99 ms"] = 1000 * float(np.percentile(heard.refused, 99)) if heard.refused else None
    return found | {"statuses": {str(status): count for status, count in sorted(heard.statuses.items())}}


def measure(running: Running, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each share of the capacity in turn."""
    bodies = texts(2_000, options.words, seed=1)
    most = asyncio.run(capacity(running.port, options.route, bodies, options.seconds, options.clients))
    rows = [{"load": f"{options.clients} clients", "goodput": most}]
    for share in options.shares:
        heard = asyncio.run(load(running.port, options.route, bodies, share * most, options.seconds, seed=2))
        rows.append(row(f"{share:.0%}", share * most, options.seconds, heard))
        print(json.dumps(rows[-1]), flush=True)
        time.sleep(min(5.0, options.seconds))
    return rows


def main() -> None:
    """Load a server in a thread; the clients share its process and cores, so that the figures are a lower bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run or a model folder")
    parser.add_argument("--route", default="/embed")
    parser.add_argument("--words", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.9, 3.0, 0.5])
    options = parser.parse_args()
    busy = machine_busy()
    with background({"model": options.run}, ServeSettings()) as running:
        rows = measure(running, options)
    print(json.dumps({"machine": facts(), "busy before": busy, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
