"""Asking a server over real sockets, politely and otherwise."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Reply(NamedTuple):
    """The response to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, path: str, body: Any = None, *, method: str = "", **headers: str) -> Reply:
    """One request on a connection of its own; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        return on(connection, path, body, method=method, **headers)
    finally:
        connection.close()


def on(
    connection: http.client.HTTPConnection, path: str, body: Any = None, *, method: str = "", **headers: str
) -> Reply:
    """One request on a connection that is kept."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    all_headers = {"content-type": "application/json"} if data is not None else {}
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method or ("GET" if body is None else "POST"), path, data, all_headers)
    answer = connection.getresponse()
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def raw(port: int, data: bytes, *, seconds: float = 10.0, pause: float = 0.0, answers: int = 0) -> bytes:
    """Whatever the server says to these bytes until it closes, says nothing more, or has given so many answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        body = b""
        try:
            connection.sendall(data)
            if pause:
                connection.settimeout(pause)
            while not (answers and whole_answers(body) == answers) and (part := connection.recv(1 << 16)):
                body += part
        except OSError:
            pass
        return body


def whole_answers(data: bytes) -> int:
    """Count the answers at the beginning of what a server said, each with a length and all of its body."""
    count = 0
    while (head := data.partition(b"\r\n\r\n"))[1]:
        length = re.search(rb"^content-length: *(\d+)", head[0], re.IGNORECASE | re.MULTILINE)
        if length is None or len(head[2]) < int(length[1]):
            break
        data, count = head[2][int(length[1]) :], count + 1
    return count


def status_of(answer: bytes) -> int:
    """0 where the connection was closed without a word."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def record(test: str, **figures: Any) -> None:
    """Append the figures of a long test to the file that HEEDFUL_RECORD names."""
    if file := os.environ.get("HEEDFUL_RECORD"):
        with open(file, "a", encoding="utf-8") as lines:
            print(json.dumps({"test": test} | figures), file=lines)


class Started:
    """heedful serve as a process of its own, when it is ready."""

    def __init__(self, *arguments: str, group: Path | None = None) -> None:
        """In that cgroup from its beginning on, if one is given."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "heedful", "serve", *arguments, "--port", "0"]
        if group is not None:
            command = ["sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(group), *command]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(100), self.lines
        self.port = int(self.lines[0].partition(" ")[0].rpartition(":")[2]) if self.lines[-1] == "ready\n" else 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line == "ready\n":
                self._ready.set()
        self._ready.set()

    @property
    def server(self) -> int:
        """The process that answers; the one that was started keeps it."""
        keeper = self.process.pid
        return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])

    def memory(self, what: str = "VmRSS") -> float:
        """In MB, that of the keeper with it; "VmHWM" is the most since `forget`."""
        count = 0
        for process in (self.process.pid, self.server):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            count += next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))
        return count * 1024 / 1e6

    def forget(self) -> None:
        """The most begins anew."""
        Path(f"/proc/{self.server}/clear_refs").write_text("5")

    def gauge(self, name: str) -> float:
        """A number of its metrics, over all labels."""
        lines = ask(self.port, "/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def stop(self) -> int:
        """Its exit status."""
        self.process.terminate()
        return self.ended()

    def ended(self, seconds: float = 60.0) -> int:
        """Wait for the process to end, and return its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def open_socket(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def closed_after(connection: socket.socket, start: float) -> float:
    """Seconds from the start until the server closed it."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start
