"""Python programs in processes of their own that do not import PyTorch and Heedful once more.

They are forked from one process, which has imported both and has done nothing else. What depends on a new interpreter
(imports, memory, variables that a library reads when it is imported) needs `subprocess` instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, AnyStr

ROOT = Path(__file__).parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MODULES = (
    *("torch", "heedful.cli", "heedful.infer.batch", "heedful.runs.finetune.run", "heedful.serve.run"),
    "tests.support.processes",
)
HEEDFUL = "from heedful.cli import main\nmain()"  # the command `heedful`
FORKS = "from tests.support.command_process import next_program\nexec(next_program({}))"


class Command(subprocess.Popen[AnyStr]):
    """A process that does what `python -c CODE ARGUMENTS` does, SIGINT included, which it never ignores."""

    def __init__(self, *arguments: object, code: str = HEEDFUL, **options: Any) -> None:
        """Start the process.

        Args:
            arguments: Its arguments, `sys.argv[1:]`.
            code: The program.
            options: stdin, stdout, stderr, text, cwd, env and start_new_session, as in `subprocess.Popen`.
        """
        super().__init__([sys.executable, "-c", code, *map(str, arguments)], **options)

    def _execute_child(  # type: ignore[override]
        self,
        args: list[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Path | str | None,
        env: dict[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *handles_and_more: Any,
    ) -> None:
        pipes = handles_and_more[:6]  # of stdin, stdout and stderr, the child's end and ours
        ends = pipes[0], pipes[3], pipes[5]
        program = {
            "code": args[2],
            "arguments": ["-c", *args[3:]],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "new_session": handles_and_more[11],
        }
        handles = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = _forks().ask({"program": program}, handles)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        pid, status = _forks().ask({"wait": self.pid})
        return pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if timeout is not None:
            return int(super()._wait(timeout))  # type: ignore[misc]
        while self._internal_poll() is None:
            time.sleep(0.005)
        return self.returncode


def run_command(
    *arguments: object, code: str = HEEDFUL, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, and capture what it writes."""
    with Command(*arguments, code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


# -- the process that forks -------------------------------------------------------------------------------------------


class _Forks:
    """The process that forks others. It ends with this one."""

    def __init__(self) -> None:
        self._control, end = socket.socketpair()
        self._lines, self._lock = self._control.makefile("rw", encoding="utf-8"), Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS.format(end.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            pass_fds=[end.fileno()],
        )
        end.close()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], handles: list[int] | None = None) -> Any:
        """Return its reply to a request, which begins with a byte, for the open files that come with it."""
        with self._lock:
            socket.send_fds(self._control, [b"."], handles or [])
            self._lines.write(json.dumps(request) + "\n")
            self._lines.flush()
            reply = self._lines.readline()
        assert reply, "the process that forks others has ended; its message is above"
        return json.loads(reply)

    def close(self) -> None:
        self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@cache
def _forks() -> _Forks:
    return _Forks()


def next_program(control_handle: int) -> str:
    """Fork for each request, and return in the fork, with the program that it has to run.

    Raises:
        SystemExit: When the other end of the socket is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in MODULES:
        import_module(module)
    gc.collect()
    gc.freeze()
    tasks = Path("/proc/self/task")
    assert not tasks.is_dir() or len(list(tasks.iterdir())) == 1, "a fork has one thread: an import has started another"
    with socket.socket(fileno=control_handle) as control, control.makefile("rw", encoding="utf-8") as lines:
        while True:
            start, handles, _, _ = socket.recv_fds(control, 1, 3)
            if not start:
                raise SystemExit
            request = json.loads(lines.readline())
            if "wait" in request:
                reply: Any = os.waitpid(request["wait"], os.WNOHANG)
            else:
                reply = os.fork()
                if reply == 0:
                    break
                for handle in handles:
                    os.close(handle)
            lines.write(json.dumps(reply) + "\n")
            lines.flush()
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    program = request["program"]
    if program["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["cwd"])
    sys.argv[:] = program["arguments"]
    return str(program["code"])
