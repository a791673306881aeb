"""`run`, for `heedful serve`: a server in this process. `background`: a server in a thread, for notebooks and tests."""

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

OTHER_FILES = 128  # estimated open files of a server besides its connections


def run(
    runs: dict[str, str],
    settings: ServeSettings,
    *,
    sockets: list[socket.socket],
    keys: tuple[bytes, ...] = (),
    hosts: tuple[str, ...] | None = None,
    log: Callable[[str], None],
    supervisor_connection: socket.socket | None = None,
) -> None:
    """Serve until a signal to stop. The server listens at once, and answers 503 until its models are loaded.

    Args:
        runs: Folders of the models by name.
        settings: Settings of the server.
        sockets: Listening sockets.
        keys: API keys. If empty, requests need no key.
        hosts: Allowed Host headers, without ports. If None, any Host header is allowed.
        log: Called with messages for the person who started the server.
        supervisor_connection: Connection to the supervisor process, see `supervisor.supervise`. The server ends when
            it is closed. If None, there is no supervisor.
    """
    log_to_stderr()
    needed_files = settings.limits.max_connections + OTHER_FILES
    if (max_files := open_files(needed_files)) < needed_files:
        log(f"the limit of open files is {max_files} (ulimit -n): too few for limits.max_connections")
    service = Service(runs, settings)
    app = create_app(service, keys=keys, hosts=hosts, wait=False)
    server = create_server(app, settings, drain=service.scheduler.drain, is_idle=service.scheduler.is_idle)
    try:
        asyncio.run(_serve(server, service, sockets, log, supervisor_connection))
    finally:
        service.scheduler.close()
    if service.failed is not None:
        raise service.failed
    if service.loading:  # the interpreter must not end normally while a thread runs torch
        os._exit(0)


async def _serve(
    server: Server,
    service: Service,
    sockets: list[socket.socket],
    log: Callable[[str], None],
    supervisor_connection: socket.socket | None,
) -> None:
    """Run a server, and load its models as soon as it listens. See `run` for the arguments."""

    def on_supervisor_message() -> None:
        assert supervisor_connection is not None
        if not supervisor_connection.recv(1):  # the supervisor has ended
            asyncio.get_running_loop().remove_reader(supervisor_connection)
            server.handle_exit(signal.SIGTERM, None)

    async def load_models() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if supervisor_connection is not None:
            supervisor_connection.send(supervisor.LISTENING)
            asyncio.get_running_loop().add_reader(supervisor_connection, on_supervisor_message)
        log(f"{url} listens, and loads {', '.join(service.runs)}")
        try:
            await service.start()
            if note := unused_note():
                log(note)
            memory.freeze_gc()
            for name, model_queue in service.model_queues.items():
                if model_queue.engine is not None and (line := model_queue.engine.gpu_line()):
                    log(f"{name} answers {line}")
            log("ready")
            if supervisor_connection is not None:
                supervisor_connection.send(supervisor.READY)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # end the server: without models, it would answer 503 for ever
            service.failed = error
            server.should_exit = True

    url = _url(sockets[0])
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reload_all)
    task = asyncio.ensure_future(load_models())
    try:
        await server.serve(sockets=sockets)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
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
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def background(
    runs: dict[str, str],
    settings: ServeSettings | None = None,
    *,
    keys: tuple[bytes, ...] = (),
    loader: Callable[[str], BundleEngine] | None = None,
) -> Iterator[RunningServer]:
    """Run a server in a thread, on a free port of 127.0.0.1; its models are loaded before the context begins.

    Args:
        runs: Folders of the models by name.
        settings: Settings of the server. If None, the defaults.
        keys: API keys. If empty, requests need no key.
        loader: Function that returns the engine of a folder. If None, `load_models`.

    Raises:
        HeedfulError: If a model cannot be loaded, or the server does not start.
    """
    resolved_settings = settings or ServeSettings()
    service = Service(runs, resolved_settings, loader=loader)
    app = create_app(service, keys=keys)
    server = create_server(app, resolved_settings, drain=service.scheduler.drain, is_idle=service.scheduler.is_idle)
    sockets = supervisor.listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(server.serve(sockets=sockets))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, name="heedful-server", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if errors or not server.started:
            failure = service.failed or HeedfulError("the server did not start")
            raise failure from (errors[0] if errors else failure.__cause__)
        yield RunningServer(port=port, service=service, server=server)
    finally:
        server.should_exit = True
        thread.join(30)
        service.scheduler.close()
        for listener in sockets:
            listener.close()


def open_files(count: int) -> int:
    """Raise this process's limit of open files to `count`, or to the system's maximum, and return the new limit.

    Windows has no such limit, so the result is `count`.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    new_limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    return new_limit


def log_to_stderr() -> None:
    """Write the server's log to stderr, with a line of JSON for each request."""
    log = logging.getLogger("heedful.serve")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_TimeFormatter())
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)


class _TimeFormatter(logging.Formatter):
    """Adds the time to log messages that are JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        return f'{{"time": "{self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")}", {record.getMessage()[1:]}'
