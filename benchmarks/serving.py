"""Measure a server under load: its capacity, and the latency at shares of this rate and beyond it.

The capacity is the most answers a second. Tests of the server's load and memory use `Client`, `capacity` and `load`
too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import minilm
from report import RESULTS, check_destination, grid, machine_busy, write

ABOUT = """`heedful serve` as it is installed, in a process of its own with {threads} threads, and all-MiniLM-L6-v2 at
`/embed`, one text of random words in each request. The clients are one process of asyncio **on the same cores**, so
these figures are a lower bound. At most: {clients} connections, each of which asks again as soon as it was answered,
for {seconds:g} s. Then arrivals that do not wait for answers (Poisson), at shares of that, for {seconds:g} s each; a
request's time counts from when it was due. Beyond 100 % requests carry a deadline of {patience} ms, and what cannot
be answered in time is refused. Others took at most {others:.0%} of the machine in a measurement."""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "who", "wrote", "it", "first", "she", "lives", "here")
LENGTHS = (12, 100)  # words of a text
SHARES = (0.5, 0.7, 0.9, 3.0, 0.5)  # rates of the requests, as shares of the capacity
PERCENTILES = (50, 90, 99)
PATIENCE = 3_000  # deadline of requests at rates beyond the capacity, in milliseconds
REST = 2.0  # seconds between measurements
IDLE = 5.0  # seconds after which a connection is not used again: the server closes it after 10


@dataclass(kw_only=True, slots=True)
class Heard:
    """The times and statuses of the responses that clients heard from the server."""

    seconds: list[float] = field(default_factory=list)  # times until responses with status 200
    refused: list[float] = field(default_factory=list)  # times until responses with another status
    statuses: Counter[int] = field(default_factory=Counter)  # responses by status; 0 is a broken connection


class Client:
    """A client that keeps its connections open and reuses them, one for each concurrent request."""

    def __init__(self, port: int, route: str, headers: Mapping[str, str] | None = None) -> None:
        all_headers = {"host": "localhost", "content-type": "application/json"} | dict(headers or {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        self.port, self.head = port, f"POST {route} HTTP/1.1\r\n{lines}"
        self.free: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: bytes, heard: Heard, start: float) -> None:
        """Send one request and record its response; its time is counted from `start`, when it was due."""
        writer = None
        try:
            reader, writer = self._free() or await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"{self.head}content-length: {len(body)}\r\n\r\n".encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            body_bytes = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(body_bytes)
            status = int(head[9:12])
            self.free.append((time.perf_counter(), reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            status = 0
            if writer is not None:
                writer.close()
        heard.statuses[status] += 1
        (heard.seconds if status == 200 else heard.refused).append(time.perf_counter() - start)

    def _free(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Return the connection that was used last, or None if it may be closed by the server."""
        if self.free and time.perf_counter() - self.free[-1][0] < IDLE:
            return self.free.pop()[1:]
        return None

    async def close(self) -> None:
        """Close all connections."""
        for _, _, writer in self.free:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, _, writer in self.free), return_exceptions=True)


def texts(count: int, words: int, seed: int) -> list[bytes]:
    """Return request bodies, each with a text of `words` random words."""
    generator = random.Random(seed)
    return [json.dumps({"inputs": " ".join(generator.choices(WORDS, k=words))}).encode() for _ in range(count)]


async def run_clients(port: int, route: str, bodies: list[bytes], seconds: float, clients: int) -> Heard:
    """Run several clients, each of which sends its next request when the last one is answered."""
    client, heard = Client(port, route), Heard()
    end = time.perf_counter() + seconds

    async def run_one(index: int) -> None:
        while time.perf_counter() < end:
            index += 1
            await client.ask(bodies[index % len(bodies)], heard, time.perf_counter())

    await asyncio.gather(*(run_one(index * 997) for index in range(clients)))
    await client.close()
    return heard


async def capacity(port: int, route: str, bodies: list[bytes], seconds: float, clients: int) -> float:
    """Return the answers per second that several clients get together."""
    return (await run_clients(port, route, bodies, seconds, clients)).statuses[200] / seconds


async def load(
    port: int,
    route: str,
    bodies: list[bytes],
    rate: float,
    seconds: float,
    seed: int,
    headers: Mapping[str, str] | None = None,
) -> Heard:
    """Send requests at random times (Poisson) with a rate, whether or not earlier ones are answered."""
    client, heard, generator = Client(port, route, headers), Heard(), random.Random(seed)
    due, tasks = time.perf_counter(), set()
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.ensure_future(client.ask(generator.choice(bodies), heard, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += generator.expovariate(rate)
    await asyncio.gather(*tasks)
    await client.close()
    return heard


# -- the record -----------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: str) -> Iterator[int]:
    """Run heedful serve in another process, and yield its port."""
    command = [sys.executable, "-m", "heedful", "serve", f"model={folder}", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if match := re.match(r"http://127\.0\.0\.1:(\d+) listens", line):
                port = int(match[1])
            if line == "ready\n":
                break
        else:
            raise RuntimeError(f"the server ended with {process.wait()}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe of the log never fills
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def row(name: str, offered: float | None, seconds: float, heard: Heard) -> dict[str, Any]:
    """Summarise one load as a row of the table, with times in milliseconds.

    Args:
        name: The name of the load.
        offered: Requests a second. If None, clients wait for answers.
        seconds: How long requests were sent.
        heard: The responses.
    """
    summary: dict[str, Any] = {"load": name, "offered": offered, "answered": heard.statuses[200] / seconds}
    for q in PERCENTILES:
        summary[f"p{q}"] = 1e3 * float(np.percentile(heard.seconds, q)) if heard.seconds else None
    summary["refused p99"] = 1e3 * float(np.percentile(heard.refused, 99)) if heard.refused else None
    return summary | {"statuses": {str(status): count for status, count in sorted(heard.statuses.items())}}


def measure(port: int, words: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Measure each load; return the rows, and the largest share of the machine that other processes used."""
    bodies = texts(2_000, words, seed=1)
    asyncio.run(run_clients(port, options.route, bodies, min(5.0, options.seconds), options.clients))
    rows: list[dict[str, Any]] = []
    for clients in (1, options.clients):
        heard = asyncio.run(run_clients(port, options.route, bodies, options.seconds, clients))
        rows.append(row(f"{clients} at once", None, options.seconds, heard))
    max_rate, others = rows[-1]["answered"], 0.0
    for share in options.shares:
        time.sleep(REST)
        headers = {"x-request-timeout-ms": str(PATIENCE)} if share > 1 else {}
        start, start_busy = time.perf_counter(), machine_busy() - _own_seconds()
        heard = asyncio.run(load(port, options.route, bodies, share * max_rate, options.seconds, 2, headers))
        core_seconds = (time.perf_counter() - start) * (os.cpu_count() or 1)
        others = max(others, (machine_busy() - _own_seconds() - start_busy) / core_seconds)
        rows.append(row(f"{share:.0%}", share * max_rate, options.seconds, heard))
    return rows, others


def _own_seconds() -> float:
    """Return the seconds of processor time of this process and its descendants."""
    tick, seconds, waiting = os.sysconf("SC_CLK_TCK"), 0.0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / tick
        waiting += map(int, Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split())
    return seconds


def table(words: int, rows: list[dict[str, Any]]) -> str:
    """Format the rows of a text length as Markdown."""
    times = [f"p{q}" for q in PERCENTILES]
    columns = ["load", "offered/s", "answered/s", *(f"{name}, ms" for name in times), "refused, p99, ms", "statuses"]
    cells = []
    for row in rows:
        numbers = [row[name] for name in ("offered", "answered", *times, "refused p99")]
        statuses = ", ".join(f"{count:,} × {status}" for status, count in row["statuses"].items())
        cells.append([row["load"], *("" if number is None else f"{number:,.1f}" for number in numbers), statuses])
    return f"## {words} words in a text\n\n" + grid(columns, cells)


def main() -> None:
    """Measure all text lengths, print the tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="another run or model folder, of which no record is made")
    parser.add_argument("--route", default="/embed")
    parser.add_argument("--words", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--quick", action="store_true", help="rehearse each load for one second, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    options.seconds = 1.0 if options.quick else options.seconds
    if not options.quick and not options.run:
        check_destination(options.output)
    rows_by_words: dict[int, list[dict[str, Any]]] = {}
    others = 0.0
    with served(options.run or minilm()) as port:
        for words in options.words:
            rows_by_words[words], share = measure(port, words, options)
            others = max(others, share)
    tables = [table(words, rows) for words, rows in rows_by_words.items()]
    print("\n".join(tables))
    if not options.quick and not options.run:
        about = ABOUT.format(
            threads=os.environ.get("OMP_NUM_THREADS") or os.cpu_count(),
            clients=options.clients,
            seconds=options.seconds,
            patience=PATIENCE,
            others=others,
        )
        data = {str(words): rows for words, rows in rows_by_words.items()}
        print(write("serving", about, tables, data, options.output))


if __name__ == "__main__":
    main()
