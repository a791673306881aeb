"""A server that is killed is started again, one whose keeper is killed ends, and nothing is tried for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.client import HTTPException
from typing import Any

import pytest

from heedful.infer.engine import Engine
from heedful.serve.supervisor import listen
from tests.support.http_client import ROOT, ServerProcess, ask, record

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be split here")
TEXT = "ada lives in paris"


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_killed_server_is_started_again(started: ServerProcess, engines: dict[str, Engine], kills: int) -> None:
    server = started
    alone = pytest.approx(shares(engines["tag"]([TEXT])[0]), abs=1e-5)
    seen: Counter[object] = Counter()
    took: list[float] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                reply = ask(server.port, "/token-classification", {"inputs": TEXT, "model": "tag"})
                seen[reply.status if reply.status != 200 or shares(reply.json) == alone else "wrong"] += 1
                time.sleep(0 if reply.status == 200 else 0.02)
            except (OSError, HTTPException):  # what was under way when it was killed has no answer
                seen["broken"] += 1

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(kills):
        before, killed = seen[200], server.server_pid
        while seen[200] < before + 20:
            time.sleep(0.005)
        start, before = time.monotonic(), seen[503]
        os.kill(killed, signal.SIGKILL)
        while ask_status(server.port) != 200:
            time.sleep(0.02)
        took.append(time.monotonic() - start)
        assert seen[503] > before and took[-1] < 10 and server.server_pid != killed
    stop.set()
    for thread in threads:
        thread.join()
    assert set(seen) <= {200, 503, "broken"} and seen["broken"] <= 2 * kills, seen
    record("restart", kills=kills, seconds=max(took), seen={str(what): count for what, count in seen.items()})


def test_a_body_does_not_wait_until_its_head_was_acknowledged() -> None:
    """Else every answer of a connection but the first comes 40 ms late; a connection has what its listener has."""
    listeners = listen("localhost", 0)
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        with listener, socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def shares(answer: Any) -> dict[str, float]:
    """How sure it is of the label of each word."""
    return {f"{word['text']} {word['label']}": word["probability"] for word in answer["words"]}


def ask_status(port: int) -> int:
    """0 where it was killed meanwhile."""
    try:
        return ask(port, "/ready").status
    except (OSError, HTTPException):
        return 0


def test_without_its_keeper_a_server_ends() -> None:
    code = (
        "import os, signal, sys\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "sockets = listen('127.0.0.1', 0)\n"
        "line = supervise(sockets, print)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "assert line.recv(1) == b''\n"
        "print('ends')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and done.stdout == "ends\n", done


def test_who_still_sends_hears_that_it_starts() -> None:
    """A request during the start is answered, even while it is still being sent; SIGHUP ends no starting server."""
    code = (
        "import os, signal, time\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "sockets = listen('127.0.0.1', 0)\n"
        "print(sockets[0].getsockname()[1], flush=True)\n"
        "line = supervise(sockets, print)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        address = "127.0.0.1", int(keeper.stdout.readline())
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(b"POST /embed HTTP/1.1\r\ncontent-length: 2000000\r\n\r\n")
            answer = connection.recv(1 << 16)
            for _ in range(10):
                connection.sendall(b"x" * 100_000)
                time.sleep(0.01)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        keeper.terminate()
        output, _ = keeper.communicate(timeout=20)
    assert answer.startswith(b"HTTP/1.1 503") and b"the server is starting" in answer
    assert keeper.returncode == 128 + signal.SIGTERM and output == ""


def test_a_server_that_never_gets_ready_is_not_tried_for_ever() -> None:
    code = (
        "import os, signal\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "supervise(listen('127.0.0.1', 0), print)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("the server ended by SIGKILL, and starts again") == 2
    assert "ended by SIGKILL 3 times before it was ready: is there the memory?" in done.stderr
