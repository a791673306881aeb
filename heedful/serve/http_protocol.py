"""The HTTP server: uvicorn's, strict, with timeouts for clients that send or read slowly."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from heedful.serve.connections import Connections
from heedful.serve.settings import Limits, ServeSettings, Timeouts

POLL_CLOSED: int = getattr(select, "POLLRDHUP", 0)  # what a system calls it; 0: it says so to the event loop alone
LINGER = 1.0  # seconds in which a refused body is still received, so that the refusal is
READ = 1 << 16  # bytes that a client reads in its time, or all that is left
LINGERING = 64  # refused connections that have that time at once; more are closed at once
PIECES, PIECE = 1_000, 256  # chunks of a body: 1,000, and one more for each 256 bytes


class _Connection(h11.Connection):
    """A body in a million chunks of one byte would keep the event loop busy for half a minute."""

    chunks = received = 0
    flooded = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.received = 0
        elif isinstance(event, h11.Data):
            self.chunks += 1
            self.received += len(event.data)
            if self.chunks > PIECES + self.received // PIECE:
                self.flooded = True
                raise h11.RemoteProtocolError("the body comes in too many chunks", error_status_hint=413)
        return event


class HttpProtocol(H11Protocol):
    """One connection."""

    limits: ClassVar[Limits]
    timeouts: ClassVar[Timeouts]
    counted: ClassVar[Connections]
    lingering: ClassVar[set[HttpProtocol]]  # refused for their number
    unread: ClassVar[
        dict[HttpProtocol, None]
    ]  # those with something that their clients have not read, the oldest first

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _Connection(h11.SERVER, self.limits.max_header_bytes)
        answer = self.app

        async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
            cycle = self.cycle

            async def sending(message: Message) -> None:
                last = message["type"] == "http.response.body" and not message.get("more_body")
                early = last and self.conn.their_state is h11.SEND_BODY  # it is answered before it is whole
                await send({**message, "more_body": True} if early else message)
                if early:  # uvicorn might close at once
                    cycle.response_complete = True
                    cycle.message_event.set()
                    self._close_soon()

            await answer({**scope, "heedful.left": self.left}, receive, sending)
            if not (cycle.response_started or cycle.disconnected):  # the client left, which was not heard here yet
                cycle.disconnected = True
                self.transport.abort()

        self.app = answer_early
        self._head: asyncio.TimerHandle | None = None  # until when the head of a request has to be here
        self._stall: asyncio.TimerHandle | None = None  # until when the client has to read something
        self._accepted = False  # counted among the open connections
        self._deaf = False  # what still comes is not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing is called whenever something is unread
        if refused := self.counted.accept(self._address):
            self._say(503, "unhealthy", refused)
            self.lingering.add(self)
            if len(self.lingering) > LINGERING:
                self.transport.close()
            return
        self._accepted = True
        self._head = self.loop.call_later(self.timeouts.headers_seconds, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._is_read()
        self.lingering.discard(self)
        if self._accepted:
            self._accepted = False
            self.counted.close(self._address)
        super().connection_lost(exc)

    @property
    def _address(self) -> str | None:
        """The client's; None where the socket has none."""
        return None if self.client is None else self.client[0]

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        super().data_received(data)
        if self.transport.is_closing() or not self._between():
            self._cancel()
        elif self._head is None:  # a new request has begun to come
            self._head = self.loop.call_later(self.timeouts.headers_seconds, self._late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self._between() and self.conn.trailing_data[0]:
            # the beginning of the next one is here already
            self._head = self._head or self.loop.call_later(self.timeouts.headers_seconds, self._late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())
        self.unread[self] = None
        while (
            sum(connection.transport.get_write_buffer_size() for connection in self.unread)
            > self.limits.max_send_buffer_bytes
        ):
            oldest = next(iter(self.unread))
            oldest._is_read()
            oldest.transport.abort()

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        """Stop the timer of an unread response."""
        self.unread.pop(self, None)
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refused."""
        if isinstance(self.conn, _Connection) and self.conn.flooded:
            return self._say(413, "too_large", "the body comes in too many chunks")
        self._say(400, "validation", "this is not HTTP/1.1 as this server reads it")

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:
            self.transport.close()

    def left(self) -> bool:
        """Whether the client has closed: as the system knows it now, at any moment and for any thread."""
        descriptor = self.transport.get_extra_info("socket").fileno()
        if descriptor < 0 or not POLL_CLOSED:
            return bool(descriptor < 0)
        look = select.poll()
        look.register(descriptor, POLL_CLOSED)
        return bool(look.poll(0))

    def _between(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or (self.cycle.response_complete and self.conn.their_state is h11.IDLE)

    def _cancel(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        self._say(408, "timeout", "the head of the request did not come in time")

    def _say(self, status: int, kind: str, message: str) -> None:
        """Answer without the application, if nothing was answered yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            started = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            started = False
        if not started and not self.transport.is_closing():
            body = orjson.dumps({"error": message, "error_type": kind})
            head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
            retry = "retry-after: 2\r\n" if status == 503 else ""
            self.transport.write(
                f"{head}{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
            )
        self._close_soon()

    def _close_soon(self) -> None:
        """Closed at once with something unread, the client would be reset and never see the answer."""
        if not self._deaf:
            self._deaf = True
            self.transport.resume_reading()
            self.loop.call_later(LINGER, self.transport.close)

    def _watch(self, before: int) -> None:
        """Abort when the client reads next to nothing; look again as long as it does."""

        def check() -> None:
            size = self.transport.get_write_buffer_size()
            if size > before - READ:
                self.transport.abort()
            else:
                self._watch(size)

        self._stall = self.loop.call_later(self.timeouts.write_seconds, check)


_PHRASES = {400: "Bad Request", 408: "Request Timeout", 413: "Content Too Large", 503: "Service Unavailable"}


class Server(uvicorn.Server):
    """At a signal it answers what is here and refuses what comes, and then ends; at a second one it ends at once."""

    def __init__(self, config: uvicorn.Config, timeouts: Timeouts, drain: Callable[[], None], idle: Callable[[], bool]):
        super().__init__(config)
        self.timeouts = timeouts
        self.drain = drain
        self.idle = idle
        self.asked: float | None = None  # when

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; not kept for uvicorn to raise it again, so that the exit status is 0."""
        if self.asked is None:
            self.asked = time.monotonic()
            self.drain()
            return
        os._exit(1)  # whatever the engine thread is at

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self.asked is not None:
            passed = time.monotonic() - self.asked
            if passed >= self.timeouts.graceful_shutdown_seconds or (
                passed >= self.timeouts.shutdown_delay_seconds and self.idle()
            ):
                self.should_exit = True
        return await super().on_tick(counter)


def create_server(
    app: ASGIApp,
    settings: ServeSettings,
    *,
    drain: Callable[[], None],
    idle: Callable[[], bool],
) -> Server:
    """Ready to run on sockets."""
    bound = {"limits": settings.limits, "timeouts": settings.timeouts, "unread": {}, "lingering": set()}
    wire = type("BoundWire", (HttpProtocol,), {**bound, "counted": Connections(settings)})
    config = uvicorn.Config(
        app,
        http=wire,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # each request has its line already
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.timeouts.keep_alive_seconds)),
        timeout_graceful_shutdown=max(1, round(settings.timeouts.graceful_shutdown_seconds / 5)),
    )
    return Server(config, settings.timeouts, drain, idle)


def on_hangup(call: Callable[[], None]) -> None:
    """Call it at SIGHUP, in the running event loop, where there is such a signal."""
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, call)
