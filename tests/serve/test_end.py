"""The `heedful serve` process: the arguments and models it refuses to start with, and how signals stop it."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.cli.serve import _read_api_keys
from heedful.serve.run import background, open_files, run
from heedful.serve.settings import ServeSettings
from heedful.serve.supervisor import listen
from tests.support.http_client import ROOT, Reply, ServerProcess, ask, record


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_at_a_signal_what_is_there_is_answered(folders: dict[str, str], count: int) -> None:
    """After SIGTERM, /ready and new requests get 503, and every request that was accepted is answered.

    When the server refuses requests, connections that it has not yet accepted, or requests that are not yet fully sent,
    may break. Other requests are lost if their connections break.
    """
    server = ServerProcess(f"tag={folders['tag']}", "--timeouts.shutdown_delay_seconds=1.0")
    replies: list[Reply] = []
    lost: Counter[str] = Counter()

    def send_requests() -> None:
        while True:
            try:
                replies.append(ask(server.port, "/token-classification", {"inputs": "ada lives in paris"}))
            except ConnectionRefusedError:
                return
            except OSError as error:
                is_broken = isinstance(error, ConnectionResetError | BrokenPipeError)
                server_refuses = any(reply.status == 503 for reply in replies)
                if not (is_broken and server_refuses):
                    lost[type(error).__name__] += 1
                return

    threads = [threading.Thread(target=send_requests) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 1000
    while len(replies) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    readiness = ask(server.port, "/ready")
    assert readiness.status == 503 and readiness.json == {"ready": False}
    assert ask(server.port, "/live").status == 200
    assert server.wait(40) == 0
    for thread in threads:
        thread.join()
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) == {200, 503} and statuses[200] >= count, statuses
    assert not lost, lost
    record("shutdown", answered=statuses[200], refused=statuses[503], lost=sum(lost.values()))
    refusal = next(reply for reply in replies if reply.status == 503)
    assert refusal.json["error"] == "this server is stopping" and int(refusal.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_a_second_signal_does_not_wait(folders: dict[str, str]) -> None:
    server = ServerProcess(
        f"tag={folders['tag']}",
        "--timeouts.shutdown_delay_seconds=60.0",
        "--timeouts.graceful_shutdown_seconds=60.0",
    )
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.wait(40)
    assert time.monotonic() - start < 30  # two seconds on a quiet machine; one signal alone takes 60


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = ServerProcess(str(tmp_path))
    assert server.wait(60) == 2
    assert "model_type is None" in server.lines[-1] and "Traceback" not in "".join(server.lines)


def test_an_unexpected_error_while_loading_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("heedful.serve.service.load_models", load)
    monkeypatch.setattr("heedful.serve.run.log_to_stderr", lambda: None)
    sockets = listen("127.0.0.1", 0)
    with pytest.raises(MemoryError, match="out of memory"):
        run({"x": "nowhere"}, ServeSettings(), sockets=sockets, log=lambda line: None)
    with pytest.raises(MemoryError, match="out of memory"), background({"x": "nowhere"}):
        pass


def test_a_signal_does_not_wait_for_a_model_that_is_being_loaded() -> None:
    code = (
        "import os, signal, time\n"
        "from heedful.serve import run, service, settings, supervisor\n"
        "service.load_models = lambda *folder, **options: time.sleep(60)\n"
        "stop = lambda line: os.kill(os.getpid(), signal.SIGTERM)\n"
        "run.run({'x': 'y'}, settings.ServeSettings(), sockets=supervisor.listen('127.0.0.1', 0), log=stop)\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert completed.returncode == 0 and "Traceback" not in completed.stderr, completed.stderr


def test_the_limit_of_open_files_is_raised_to_what_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert open_files(100) == 100 and resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
        assert open_files(300) == 300 and resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        if hard != resource.RLIM_INFINITY:
            assert open_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_in_use_is_reported(folders: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "heedful", "serve", folders["tag"], "--port", str(listener.getsockname()[1])]
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert completed.returncode == 2 and "cannot be listened on" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--host", "0.0.0.0"],
            "--allow-unauthenticated=true",
        ),
        (
            ["x", "--limits.bodies=1"],
            "--limits.bodies is neither a flag nor a setting of heedful serve (did you mean --limits.max_body_bytes?)",
        ),
        (["x", "--limits.max_body_bytes=0"], "max_body_bytes is 0: give a number from 1"),
        (["a=x", "a=y"], "two models are called 'a'"),
        (["x", "--api-key-file", "/nowhere/keys"], "/nowhere/keys cannot be read"),
    ],
)
def test_arguments_that_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as system_exit:
        main(["serve", *arguments])
    assert system_exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o400, 0), (0o644, 1), (0o620, 1)])
def test_a_key_file_that_others_may_read_or_change_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warnings: int
) -> None:
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef\n")
    file.chmod(mode)
    assert _read_api_keys(file) == (b"0123456789abcdef",)
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == stderr.count(f"its mode {mode:04o} lets other users read it") == warnings


def test_help_and_a_wrong_setting_import_neither_torch_nor_a_server() -> None:
    for arguments in (["serve", "--help"], ["serve", "x", "--limits.bodies=1"]):
        code = (
            f"import sys; from heedful.cli import main\n"
            f"try: main({arguments})\n"
            "except SystemExit as stop: pass\n"
            "print({'torch', 'numpy', 'starlette', 'uvicorn', 'msgspec'} & set(sys.modules))"
        )
        completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert completed.stdout.splitlines()[-1] == "set()"
