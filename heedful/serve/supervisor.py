"""Keeper: a small process before the server, which starts it again when it was killed, and answers 503 meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from heedful.errors import HeedfulError

LISTENING, READY = b"l", b"r"  # what a server tells its keeper
TRIES = 3  # servers in a row that are killed before they were ready
BACKLOG = 2048
SENT = 1 << 17  # bytes of answers that the system holds for a client that does not read them; it may hold twice as many
REFUSALS, LINGER = 256, 2.0  # connections that are refused at once, and the seconds that each may take
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_AT_FIRST: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_IGN}  # until it listens
_TOLD = b'{"error":"the server is starting","error_type":"unhealthy"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_TOLD), _TOLD)
)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address of this name; all on one port, and 0 is any that is free."""
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            try:
                taken = found[0].getsockname()[1] if found else port
                place = (address[0], taken, *address[2:])
                found.append(socket.create_server(place, family=family, backlog=BACKLOG))
                found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT)  # so of each connection
                found[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a body waits for no word of its head
            except OSError as error:  # a name may have an address of a kind that this machine has not
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except OSError as error:
        for each in found:
            each.close()
        if error.errno == errno.EADDRINUSE:
            raise HeedfulError(f"{host}:{port} cannot be listened on: is another server there?") from None
        raise HeedfulError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    if not found:
        raise HeedfulError(f"{host}:{port} cannot be listened on: it is no address of this machine")
    return found


def supervise(sockets: Sequence[socket.socket], log: Callable[[str], None]) -> socket.socket | None:
    """Split the process: this returns in the server, with the line to its keeper, and ends in the keeper with it.

    None, where processes cannot be split: there the server has no keeper.
    """
    return _Keeper(sockets, log).run() if hasattr(os, "fork") else None


class _Keeper:
    def __init__(self, sockets: Sequence[socket.socket], log: Callable[[str], None]) -> None:
        self.sockets, self.tell = list(sockets), log
        self.selector = selectors.PollSelector()
        self.refused: dict[socket.socket, float] = {}  # until when each may take
        self.told: set[socket.socket] = set()  # of those: what still comes of them is read, and that is all
        self.stopping = self.listening = self.ready = False
        self.server = 0  # its process

    def run(self) -> socket.socket:
        """Again and again."""
        self.woken, self.wake = socket.socketpair()
        for each in (self.woken, self.wake, *self.sockets):
            each.setblocking(False)
        killed = 0
        while True:
            line = self._split()
            if line is None:
                return self.line
            self.listening = self.ready = False
            status = self._watch(line)
            if self.stopping or status == 0 or (status > 0 and not self.ready):
                raise SystemExit(status if status >= 0 else 128 - status)
            killed = 0 if self.ready else killed + 1
            name = signal.Signals(-status).name if status < 0 else f"status {status}"
            if killed == TRIES:
                raise HeedfulError(
                    f"the server ended by {name} {TRIES} times before it was ready: is there the memory?"
                )
            self.tell(f"the server ended by {name}, and starts again")

    def _split(self) -> socket.socket | None:
        """The keeper's end of the line; None in the server, whose end is `line` then."""
        here, there = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # none may come to the server before it is one
        self.server = os.fork()
        if self.server:
            there.close()
            signal.set_wakeup_fd(self.wake.fileno())
            for each in SIGNALS:
                signal.signal(each, self._signalled)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return here
        signal.set_wakeup_fd(-1)
        for each in SIGNALS:
            signal.signal(each, _AT_FIRST.get(each.name, signal.SIG_DFL))
        os.setpgid(0, 0)  # an interruption of the terminal comes by the keeper, once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.selector.close()
        for other in (here, self.woken, self.wake, *self.refused):
            other.close()
        self.line = there
        return None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Hand it on."""
        self.stopping = self.stopping or number != getattr(signal, "SIGHUP", None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.server, number)

    def _watch(self, line: socket.socket) -> int:
        """The server's status, when it has ended; as long as it does not listen, others are refused here."""
        self.selector = selectors.PollSelector()
        for each in (line, self.woken, *self.sockets, *self.refused):
            self.selector.register(each, selectors.EVENT_READ)
        with self.selector, line:
            while True:
                for key, _ in self.selector.select(LINGER):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is line:
                        if not (told := _received(line)):
                            return os.waitstatus_to_exitcode(os.waitpid(self.server, 0)[1])
                        self._hear(told)
                    elif key.fileobj is self.woken:
                        _received(self.woken)
                        if self.stopping:
                            self._listen_no_more()
                    elif key.fileobj in self.refused:
                        self._refuse(key.fileobj)
                    else:
                        self._accept(key.fileobj)
                self._give_up()

    def _hear(self, told: bytes) -> None:
        self.ready = self.ready or READY in told
        if LISTENING in told and not self.listening:
            self.listening = True
            for each in self.sockets:
                self.selector.unregister(each)

    def _listen_no_more(self) -> None:
        """The server refuses in words as long as it listens; then nobody does."""
        for each in self.sockets:
            if not self.listening:
                self.selector.unregister(each)
            each.close()
        self.sockets = []

    def _accept(self, listener: socket.socket) -> None:
        if listener not in self.sockets or self.listening:  # since this was selected
            return
        if len(self.refused) >= REFUSALS:
            self._drop(next(iter(self.refused)))
        with contextlib.suppress(OSError):  # the server was quicker
            connection = listener.accept()[0]
            connection.setblocking(False)
            self.refused[connection] = time.monotonic() + LINGER
            self.selector.register(connection, selectors.EVENT_READ)

    def _refuse(self, connection: socket.socket) -> None:
        """Say so at its first word, and let it go when it has heard."""
        try:
            if connection.recv(1 << 16):
                if connection not in self.told:
                    self.told.add(connection)
                    with contextlib.suppress(BlockingIOError):
                        connection.sendall(REFUSAL)
                        connection.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        self._drop(connection)

    def _give_up(self) -> None:
        now = time.monotonic()
        for each in [each for each, until in self.refused.items() if now > until]:
            self._drop(each)

    def _drop(self, connection: socket.socket) -> None:
        del self.refused[connection]
        self.told.discard(connection)
        self.selector.unregister(connection)
        connection.close()


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(1 << 12)
    except BlockingIOError:
        return b" "
    except OSError:
        return b""
