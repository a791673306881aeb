"""The supervisor: a killed server is restarted, a server without its supervisor ends, and restarts are limited."""

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
from tests.support.http_client import ROOT, ServerProcess, ask, process_times, record

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
TEXT = "ada lives in paris"


@pytest.mark.timeout(600)  # it may have to start the server and load all models of `engines` on a busy machine
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_server_is_started_again(started: ServerProcess, engines: dict[str, Engine], kills: int) -> None:
    """The new process starts at once and needs little processor time; the wall time depends on the load."""
    server = started
    expected = pytest.approx(word_probabilities(engines["tag"]([TEXT])[0]), abs=1e-5)
    outcomes: Counter[object] = Counter()
    restart_seconds: list[float] = []
    stop = threading.Event()

    def send_requests() -> None:
        while not stop.is_set():
            try:
                reply = ask(server.port, "/token-classification", {"inputs": TEXT, "model": "tag"})
                is_wrong = reply.status == 200 and word_probabilities(reply.json) != expected
                outcomes["wrong" if is_wrong else reply.status] += 1
                time.sleep(0 if reply.status == 200 else 0.02)
            except (OSError, HTTPException):  # the server was killed before it answered
                outcomes["broken"] += 1

    threads = [threading.Thread(target=send_requests) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(kills):
        answered_before, killed_process = outcomes[200], server.server_pid
        while outcomes[200] < answered_before + 20:
            time.sleep(0.005)
        start, refused_before = time.clock_gettime(time.CLOCK_BOOTTIME), outcomes[503]
        os.kill(killed_process, signal.SIGKILL)
        while ready_status(server.port) != 200:
            time.sleep(0.02)
        restart_seconds.append(time.clock_gettime(time.CLOCK_BOOTTIME) - start)
        assert outcomes[503] > refused_before
        assert server.server_pid != killed_process
        started_at, processor_seconds = process_times(server.server_pid)
        assert -0.1 < started_at - start < 10
        assert processor_seconds < 10
    stop.set()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {200, 503, "broken"} and outcomes["broken"] <= 2 * kills, outcomes
    record(
        "restart",
        kills=kills,
        seconds=max(restart_seconds),
        seen={str(outcome): count for outcome, count in outcomes.items()},
    )


def test_connections_send_without_delay() -> None:
    """Without TCP_NODELAY, all responses of a connection but the first would be 40 ms late."""
    listeners = listen("localhost", 0)
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        with listener, socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def word_probabilities(answer: Any) -> dict[str, float]:
    """Return the probability of the label of each word, by word and label."""
    return {f"{word['text']} {word['label']}": word["probability"] for word in answer["words"]}


def ready_status(port: int) -> int:
    """Return the status of /ready, or 0 without a response."""
    try:
        return ask(port, "/ready").status
    except (OSError, HTTPException):
        return 0


def test_a_server_whose_supervisor_was_killed_ends() -> None:
    code = (
        "import os, signal, sys\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "sockets = listen('127.0.0.1', 0)\n"
        "connection = supervise(sockets, print)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "assert connection.recv(1) == b''\n"
        "print('ends')\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == -signal.SIGKILL and process.stdout == "ends\n", process


def test_requests_during_the_start_are_answered_while_they_are_sent() -> None:
    """The answer is 503. SIGHUP does not end a server that is starting."""
    code = (
        "import os, signal, time\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "sockets = listen('127.0.0.1', 0)\n"
        "print(sockets[0].getsockname()[1], flush=True)\n"
        "connection = supervise(sockets, print)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        address = "127.0.0.1", int(supervisor.stdout.readline())
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(b"POST /embed HTTP/1.1\r\ncontent-length: 2000000\r\n\r\n")
            answer = connection.recv(1 << 16)
            for _ in range(10):
                connection.sendall(b"x" * 100_000)
                time.sleep(0.01)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        supervisor.terminate()
        output, _ = supervisor.communicate(timeout=20)
    assert answer.startswith(b"HTTP/1.1 503") and b"the server is starting" in answer
    assert supervisor.returncode == 128 + signal.SIGTERM and output == ""


def test_the_supervisor_gives_up_after_three_early_kills() -> None:
    code = (
        "import os, signal\n"
        "from heedful.serve.supervisor import listen, supervise\n"
        "supervise(listen('127.0.0.1', 0), print)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.stdout.count("the server ended by SIGKILL, and starts again") == 2
    assert "ended by SIGKILL 3 times before it was ready: is there the memory?" in process.stderr
