"""An HTTP client and a server process for tests: requests over real sockets, valid and malformed."""

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
    """Send one request on a new connection, and return the reply; a body other than bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        return ask_on(connection, path, body, method=method, **headers)
    finally:
        connection.close()


def ask_on(
    connection: http.client.HTTPConnection, path: str, body: Any = None, *, method: str = "", **headers: str
) -> Reply:
    """Send one request on an open connection, and return the reply."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    all_headers = {"content-type": "application/json"} if data is not None else {}
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method or ("GET" if body is None else "POST"), path, data, all_headers)
    answer = connection.getresponse()
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def send_raw(port: int, data: bytes, *, seconds: float = 10.0, pause: float = 0.0, answers: int = 0) -> bytes:
    """Send bytes on a new connection, and return all bytes that the server sends back.

    Args:
        port: The port of the server.
        data: The bytes to send.
        seconds: Seconds to wait for each part of the response.
        pause: Seconds to wait after all bytes are sent, instead of `seconds`, unless 0.
        answers: The number of complete responses after which to return, unless 0. Otherwise the function returns when
            the server closes the connection, or sends nothing for the seconds above.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        responses = b""
        try:
            connection.sendall(data)
            if pause:
                connection.settimeout(pause)
            while not (answers and count_complete(responses) == answers) and (received := connection.recv(1 << 16)):
                responses += received
        except OSError:
            pass
        return responses


def count_complete(responses: bytes) -> int:
    """Return the number of complete responses at the beginning of some bytes, each with a content-length."""
    count = 0
    while True:
        head, separator, rest = responses.partition(b"\r\n\r\n")
        length = re.search(rb"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
        if not separator or length is None or len(rest) < int(length[1]):
            return count
        responses = rest[int(length[1]) :]
        count += 1


def reply_status(response: bytes) -> int:
    """Return the status of a response, or 0 if the connection was closed without one."""
    return int(response.split(b" ", 2)[1]) if response else 0


def record(test: str, **figures: Any) -> None:
    """Append the figures of a long test to the file that HEEDFUL_RECORD names."""
    if file := os.environ.get("HEEDFUL_RECORD"):
        with open(file, "a", encoding="utf-8") as lines:
            print(json.dumps({"test": test} | figures), file=lines)


class ServerProcess:
    """A running `heedful serve`: a supervisor process, and its child, which answers requests."""

    def __init__(self, *arguments: str, group: Path | None = None) -> None:
        """Start the process, and wait until it is ready or has ended.

        Args:
            arguments: Arguments of `heedful serve`.
            group: Folder of a cgroup in which it starts, or None.
        """
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
    def server_pid(self) -> int:
        """Process id of the child, which answers requests."""
        supervisor = self.process.pid
        return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])

    def memory(self, field: str = "VmRSS") -> float:
        """Return the memory of both processes in MB; with "VmHWM", the peak since `reset_peak_memory`."""
        kib = 0
        for process in (self.process.pid, self.server_pid):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            kib += next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
        return kib * 1024 / 1e6

    def reset_peak_memory(self) -> None:
        """Reset the peak memory of the child to its current memory."""
        Path(f"/proc/{self.server_pid}/clear_refs").write_text("5")

    def gauge(self, name: str) -> float:
        """Return a metric of the server, summed over all labels."""
        lines = ask(self.port, "/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        return self.wait()

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the process to end, and return its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def process_times(pid: int) -> tuple[float, float]:
    """Return when a process started, in seconds since the machine did, and the processor time that it has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()  # from the third field of proc(5) on
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[19]) / ticks, (int(fields[11]) + int(fields[12])) / ticks


def open_socket(port: int) -> socket.socket:
    """Open a connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def seconds_until_closed(connection: socket.socket, start: float) -> float:
    """Wait until the server closes a connection, and return the seconds since `start`."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start
