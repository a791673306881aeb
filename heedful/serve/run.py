"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from heedful.errors import HeedfulError
from heedful.serve.app import application
from heedful.serve.service import Service
from heedful.serve.settings import ServeSettings
from heedful.serve.wire import Server, on_hangup, server


def run(
    runs: dict[str, str],
    settings: ServeSettings,
    *,
    host: str,
    port: int,
    keys: tuple[bytes, ...] = (),
    hosts: tuple[str, ...] | None = None,
    tell: Callable[[str], None],
) -> None:
    """Serve until a signal comes; it listens at once, and answers 503 until the models are loaded."""
    log_to_stderr()
    service = Service(runs, settings)
    app = application(service, keys=keys, hosts=hosts, wait=False)
    serving = server(
        app,
        settings,
        host=host,
        port=port,
        drain=service.queue.drain,
        idle=lambda: service.queue.requests == 0,
    )
    try:
        asyncio.run(_serve(serving, service, host, tell))
    finally:
        service.queue.close()
    if service.failed is not None:
        raise service.failed


async def _serve(serving: Server, service: Service, host: str, tell: Callable[[str], None]) -> None:
    async def loading() -> None:
        while not serving.started:
            await asyncio.sleep(0.01)
        name = f"[{host}]" if ":" in host else host
        port = serving.servers[0].sockets[0].getsockname()[1]
        tell(f"http://{name}:{port} listens, and loads {', '.join(service.runs)}")
        try:
            await service.start()
            tell("ready")
        except HeedfulError as error:
            service.failed = error
            serving.should_exit = True

    on_hangup(service.reload_all)
    task = asyncio.ensure_future(loading())
    try:
        await serving.serve()
    except SystemExit:  # uvicorn's, after it could not listen
        raise HeedfulError(f"{host}:{serving.config.port} cannot be listened on: is another server there?") from None
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
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
    loader: Callable[[str], Any] | None = None,
) -> Iterator[Running]:
    """A server on a free port of this machine, with its models loaded, as for notebooks and tests."""
    chosen = settings or ServeSettings()
    service = Service(runs, chosen, loader=loader)
    app = application(service, keys=keys)
    serving = server(
        app, chosen, host="127.0.0.1", port=0, drain=service.queue.drain, idle=lambda: service.queue.requests == 0
    )
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(serving.serve())
        except BaseException as error:  # to be raised where the server was asked for
            failed.append(error)

    thread = threading.Thread(target=serve, name="heedful-server", daemon=True)
    thread.start()
    try:
        while not serving.started and thread.is_alive():
            time.sleep(0.01)
        if failed or not serving.started:
            raise service.failed or HeedfulError("the server did not start")
        yield Running(port=serving.servers[0].sockets[0].getsockname()[1], service=service, server=serving)
    finally:
        serving.should_exit = True
        thread.join(30)
        service.queue.close()


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
