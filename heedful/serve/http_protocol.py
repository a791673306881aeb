"""`create_server`: uvicorn's HTTP/1.1 server with limits and timeouts against slow or greedy clients."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from heedful.serve.connections import Connections
from heedful.serve.settings import Limits, ServeSettings, Timeouts

# Internals of uvicorn's H11Protocol that this module relies on:
# - `app` is called for each request, with a new `cycle`; `response_started`, `response_complete`, `disconnected` and
#   `message_event` of the cycle are the state of the exchange.
# - `conn` is the h11 connection, and `client` the peer's (address, port).
# - `send_400_response` is called when h11 rejects the input, `on_response_complete` after the end of a response, and
#   `shutdown` when the server stops.

LINGER_SECONDS = 1.0  # seconds from a final response until its connection is closed; meanwhile input is discarded
MAX_LINGERING = 64  # refused connections that are closed after LINGER_SECONDS; further ones are closed at once
MIN_READ_BYTES = 1 << 16  # bytes that a client must read within write_seconds, unless fewer are left
FREE_CHUNKS = 1_000  # number of chunks that any body may have
MIN_CHUNK_BYTES = 256  # minimum mean size in bytes of chunks beyond FREE_CHUNKS
TOO_MANY_CHUNKS = "the body is sent in too many small chunks: send larger ones"
POLL_CLOSED: int = getattr(select, "POLLRDHUP", 0)  # poll event of Linux: the peer closed; 0 on other systems


class _ChunkLimitedConnection(h11.Connection):
    """An h11 connection that rejects bodies in too many small chunks, since each chunk costs time."""

    chunks = 0  # chunks of the current request's body so far
    body_bytes = 0  # bytes of the current request's body so far
    too_many_chunks = False  # whether a body was rejected for its number of chunks

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.body_bytes = 0
        elif isinstance(event, h11.Data):
            self.chunks += 1
            self.body_bytes += len(event.data)
            if self.chunks > FREE_CHUNKS + self.body_bytes // MIN_CHUNK_BYTES:
                self.too_many_chunks = True
                raise h11.RemoteProtocolError(TOO_MANY_CHUNKS, error_status_hint=413)
        return event


@dataclass(kw_only=True, slots=True)
class SharedState:
    """Limits, timeouts and connections of a server, shared by the protocol objects of its connections."""

    limits: Limits
    timeouts: Timeouts
    open_connections: Connections
    lingering: set[HttpProtocol] = field(default_factory=set)  # refused connections that are not closed yet
    write_paused: dict[HttpProtocol, None] = field(default_factory=dict)  # connections with unread output, oldest first


class HttpProtocol(H11Protocol):
    """uvicorn's protocol of a connection, with timeouts, limits, and error responses before the application runs."""

    conn: _ChunkLimitedConnection

    def __init__(self, shared: SharedState, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn = _ChunkLimitedConnection(h11.SERVER, shared.limits.max_header_bytes)
        self.shared = shared
        self._wrapped_app: ASGIApp = self.app
        self.app = self._run_app
        self._header_timer: asyncio.TimerHandle | None = None  # timeout for receiving a request's headers
        self._write_timer: asyncio.TimerHandle | None = None  # timeout for the client to read output
        self._is_counted = False  # whether `open_connections` counts this connection
        self._discard_input = False  # whether further input is ignored, since the connection will be closed

    # -- called by asyncio and uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # asyncio calls pause_writing whenever output is unread
        if reason := self.shared.open_connections.accept(self._client_address):
            self._send_error(503, "unhealthy", reason)
            self.shared.lingering.add(self)
            if len(self.shared.lingering) > MAX_LINGERING:
                self.transport.close()
            return
        self._is_counted = True
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._end_write_pause()
        self.shared.lingering.discard(self)
        if self._is_counted:
            self._is_counted = False
            self.shared.open_connections.close(self._client_address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discard_input:
            return
        super().data_received(data)
        if self.transport.is_closing() or not self._is_idle():
            self._cancel_header_timer()
        else:  # only a part of the next request's headers was received
            self._start_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self._is_idle() and self.conn.trailing_data[0]:
            self._start_header_timer()  # a part of the next request's headers was received

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()
        self.shared.write_paused[self] = None
        self._limit_unread_output()

    def resume_writing(self) -> None:
        self._end_write_pause()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 rejected; replaces the message of uvicorn."""
        if self.conn.too_many_chunks:
            self._send_error(413, "too_large", TOO_MANY_CHUNKS)
        else:
            self._send_error(400, "validation", "invalid HTTP/1.1 request")

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # h11 did not see the end of a response of _run_app or _send_error
            self.transport.close()

    # -- one request

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; if its response ends before the body was received, keep the connection open for a while.

        uvicorn would close the connection at once. Closing a connection with unread input resets it, so that the client
        might never see the response. Therefore the last part of such a response is sent with more_body=True, so that
        uvicorn neither completes the cycle nor closes the connection. This method completes the cycle, and closes the
        connection after LINGER_SECONDS.
        """
        cycle = self.cycle

        async def send_and_linger(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_early = is_last and self.conn.their_state is h11.SEND_BODY
            await send({**message, "more_body": True} if is_early else message)
            if is_early:
                cycle.response_complete = True
                cycle.message_event.set()
                self._close_soon()

        await self._wrapped_app({**scope, "heedful.is_disconnected": self.is_disconnected}, receive, send_and_linger)
        if not cycle.response_started and not cycle.disconnected:
            # the application saw that the client disconnected before the event loop did
            cycle.disconnected = True
            self.transport.abort()

    def is_disconnected(self) -> bool:
        """Return whether the client closed its end of the connection. Any thread may call this method.

        Only Linux reports it. On other systems, the result is True only after the server closed the connection.
        """
        descriptor = self.transport.get_extra_info("socket").fileno()
        if descriptor < 0 or not POLL_CLOSED:
            return bool(descriptor < 0)
        poll = select.poll()
        poll.register(descriptor, POLL_CLOSED)
        return bool(poll.poll(0))

    @property
    def _client_address(self) -> str | None:
        """The client's IP address, or None for a socket without addresses, such as a Unix socket."""
        return None if self.client is None else self.client[0]

    def _is_idle(self) -> bool:
        """Return whether no request is being answered or received."""
        return self.cycle is None or (self.cycle.response_complete and self.conn.their_state is h11.IDLE)

    # -- timeouts and errors

    def _start_header_timer(self) -> None:
        """Start the timeout for the headers of the next request, unless it is running."""
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.shared.timeouts.headers_seconds, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        self._send_error(408, "timeout", "the request headers were not received in time")

    def _start_write_timer(self) -> None:
        """After write_seconds, abort the connection if the client read less than MIN_READ_BYTES; else start again."""
        size_before = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() > size_before - MIN_READ_BYTES:
                self.transport.abort()
            else:
                self._start_write_timer()

        self._write_timer = self.loop.call_later(self.shared.timeouts.write_seconds, check)

    def _end_write_pause(self) -> None:
        """Stop the write timeout, and remove the connection from those with unread output."""
        self.shared.write_paused.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _limit_unread_output(self) -> None:
        """Abort the connections paused longest until the unread output of all connections is within the limit."""
        paused = self.shared.write_paused
        while (
            sum(connection.transport.get_write_buffer_size() for connection in paused)
            > self.shared.limits.max_send_buffer_bytes
        ):
            oldest = next(iter(paused))
            oldest._end_write_pause()
            oldest.transport.abort()

    def _send_error(self, status: int, error_type: str, message: str) -> None:
        """Send an error response unless a response has begun, and close the connection after LINGER_SECONDS."""
        is_started = False
        if self.cycle is not None and not self.cycle.response_complete:
            is_started = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_started and not self.transport.is_closing():
            body = orjson.dumps({"error": message, "error_type": error_type})
            headers = ["content-type: application/json", f"content-length: {len(body)}", "connection: close"]
            headers += ["retry-after: 2"] if status == 503 else []
            head = "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *headers])
            self.transport.write(f"{head}\r\n\r\n".encode() + body)
        self._close_soon()

    def _close_soon(self) -> None:
        """Discard further input, and close the connection after LINGER_SECONDS: unread input would reset it."""
        if not self._discard_input:
            self._discard_input = True
            self.transport.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown.

    After the first signal, the server rejects new requests and exits when accepted ones are finished. After a second
    signal, it exits at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        shared: SharedState,
        drain: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self.shared = shared
        self.drain = drain
        self.is_idle = is_idle
        self.stop_requested_at: float | None = None  # time.monotonic() of the first signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. The exit status is 0; with uvicorn's handler, which raises the signal again, it is not."""
        if self.stop_requested_at is not None:
            os._exit(1)  # without waiting for any thread
        self.stop_requested_at = time.monotonic()
        self.drain()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit: after the first signal, if accepted requests are answered or the time is up.

        uvicorn calls this ten times a second.
        """
        if self.stop_requested_at is not None:
            timeouts = self.shared.timeouts
            seconds = time.monotonic() - self.stop_requested_at
            is_finished = seconds >= timeouts.shutdown_delay_seconds and self.is_idle()
            if is_finished or seconds >= timeouts.graceful_shutdown_seconds:
                self.should_exit = True
        return await super().on_tick(counter)


def create_server(
    app: ASGIApp,
    settings: ServeSettings,
    *,
    drain: Callable[[], None],
    is_idle: Callable[[], bool],
) -> Server:
    """Create a server, which can then run on sockets.

    Args:
        app: The application.
        settings: Limits and timeouts.
        drain: Called at the first signal to stop; makes the application reject new requests.
        is_idle: Returns whether all accepted requests are answered.
    """
    timeouts = settings.timeouts
    shared = SharedState(limits=settings.limits, timeouts=timeouts, open_connections=Connections(settings))
    config = uvicorn.Config(
        app,
        http=partial(HttpProtocol, shared),  # type: ignore[arg-type]  # uvicorn calls it with keywords only
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # the application logs each request
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, round(timeouts.keep_alive_seconds)),
        # time for open connections after should_exit; on_tick has waited for accepted requests before
        timeout_graceful_shutdown=max(1, round(timeouts.graceful_shutdown_seconds / 5)),
    )
    return Server(config, shared=shared, drain=drain, is_idle=is_idle)
