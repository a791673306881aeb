"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from heedful.csrc import unused_note
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.serve import memory, supervisor
from heedful.serve.app import create_app
from heedful.serve.http_protocol import Server, create_server
from heedful.serve.service import Service
from heedful.serve.settings import ServeSettings

FILES = 128  # that are open beside connections


def run(
    runs: dict[str, str],
    settings: ServeSettings,
    *,
    sockets: list[socket.socket],
    keys: tuple[bytes, ...] = (),
    hosts: tuple[str, ...] | None = None,
    log: Callable[[str], None],
    line: socket.socket | None = None,
) -> None:
    """Serve until a signal comes; it listens at once, and answers 503 until the models are loaded.

    `line` leads to its keeper, and when that is gone the server ends too.
    """
    log_to_stderr()
    files = settings.limits.max_connections + FILES
    if (most := open_files(files)) < files:
        log(f"{most} files may be open here (ulimit -n): too few for limits.max_connections")
    service = Service(runs, settings)
    app = create_app(service, keys=keys, hosts=hosts, wait=False)
    serving = create_server(
        app, settings, drain=service.queue.drain, is_idle=lambda: service.queue.active_requests == 0
    )
    try:
        asyncio.run(_serve(serving, service, sockets, log, line))
    finally:
        service.queue.close()
    if service.failed is not None:
        raise service.failed
    if service.loading:  # torch is not to be in the middle of something when the interpreter ends
        os._exit(0)


async def _serve(
    serving: Server,
    service: Service,
    sockets: list[socket.socket],
    log: Callable[[str], None],
    line: socket.socket | None,
) -> None:
    def hear() -> None:
        assert line is not None
        if not line.recv(1):
            asyncio.get_running_loop().remove_reader(line)
            serving.handle_exit(signal.SIGTERM, None)

    async def loading() -> None:
        while not serving.started:
            await asyncio.sleep(0.01)
        if line is not None:
            line.send(supervisor.LISTENING)
            asyncio.get_running_loop().add_reader(line, hear)
        log(f"{url} listens, and loads {', '.join(service.runs)}")
        try:
            await service.start()
            if note := unused_note():
                log(note)
            memory.freeze_gc()
            log("ready")
            if line is not None:
                line.send(supervisor.READY)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # else it would be loading for ever
            service.failed = error
            serving.should_exit = True

    url = _url(sockets[0])
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reload_all)
    task = asyncio.ensure_future(loading())
    try:
        await serving.serve(sockets=sockets)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    """A server in a thread of this process."""

    port: int
    service: Service
    server: Server

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def background(
    runs: dict[str, str],
    settings: ServeSettings | None = None,
    *,
    keys: tuple[bytes, ...] = (),
    loader: Callable[[str], BundleEngine] | None = None,
) -> Iterator[RunningServer]:
    """A server on a free port of this machine, with its models loaded, as for notebooks and tests."""
    chosen = settings or ServeSettings()
    service = Service(runs, chosen, loader=loader)
    app = create_app(service, keys=keys)
    serving = create_server(app, chosen, drain=service.queue.drain, is_idle=service.queue.is_idle)
    sockets = supervisor.listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(serving.serve(sockets=sockets))
        except BaseException as error:  # to be raised where the server was asked for
            failed.append(error)

    thread = threading.Thread(target=serve, name="heedful-server", daemon=True)
    thread.start()
    try:
        while not serving.started and thread.is_alive():
            time.sleep(0.01)
        if failed or not serving.started:
            raise service.failed or HeedfulError("the server did not start")
        yield RunningServer(port=port, service=service, server=serving)
    finally:
        serving.should_exit = True
        thread.join(30)
        service.queue.close()
        for listening in sockets:
            listening.close()


def open_files(count: int) -> int:
    """Raise the limit of open files to `count` or the system's maximum, and return it. Does nothing on Windows."""
    try:
        import resource
    except ModuleNotFoundError:
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def log_to_stderr() -> None:
    """One line of JSON for each request."""
    log = logging.getLogger("heedful.serve")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line())
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f'{{"time": "{self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")}", {record.getMessage()[1:]}'
