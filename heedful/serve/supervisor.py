"""`supervise`: a small parent process that restarts a killed server, and answers 503 until the new one listens.

systemd and Kubernetes restart a server too, but they neither keep its socket open nor answer while it starts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from threading import Thread
from types import FrameType

from heedful.errors import HeedfulError

LISTENING, READY = b"l", b"r"  # messages from a server to its supervisor
MAX_EARLY_KILLS = 3  # consecutive servers that were killed before they were ready, after which the supervisor gives up
BACKLOG = 2048  # maximum connections that wait to be accepted
SEND_BUFFER_BYTES = 1 << 17  # size of each connection's send buffer; the system may double it
MAX_REFUSALS = 256  # maximum connections that are answered with 503 at the same time
LINGER_SECONDS = 2.0  # maximum seconds for one of these connections
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_REFUSAL_BODY = b'{"error":"the server is starting","error_type":"unhealthy"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on all addresses of a host, with the same port.

    Args:
        host: Name or address of this machine.
        port: The port, or 0 for any free port.

    Raises:
        HeedfulError: If the port is taken, or the name is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            try:
                chosen_port = sockets[0].getsockname()[1] if sockets else port
                socket_address = (address[0], chosen_port, *address[2:])
                sockets.append(socket.create_server(socket_address, family=family, backlog=BACKLOG))
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
                # without TCP_NODELAY, the body of a response waits until the client has acknowledged the headers
                sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:  # a name can have addresses of a family that this machine does not support
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except OSError as error:
        for listener in sockets:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise HeedfulError(f"{host}:{port} cannot be listened on: is another server there?") from None
        raise HeedfulError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    if not sockets:
        raise HeedfulError(f"{host}:{port} cannot be listened on: it is no address of this machine")
    return sockets


def supervise(sockets: Sequence[socket.socket], log: Callable[[str], None]) -> socket.socket | None:
    """Fork, and return in the child, which becomes the server. The parent becomes the supervisor and does not return.

    Args:
        sockets: Listening sockets of the server.
        log: Called with messages for the person who started the server.

    Returns:
        The server's connection to its supervisor, on which the server sends LISTENING and READY. None on systems
        without fork, which have no supervisor.

    Raises:
        SystemExit: In the supervisor, with the status of the server.
        HeedfulError: In the supervisor, if servers are killed before they are ready.
    """
    return _Supervisor(sockets, log).run() if hasattr(os, "fork") else None


class _Supervisor:
    """The state of a supervisor; see `supervise`."""

    def __init__(self, sockets: Sequence[socket.socket], log: Callable[[str], None]) -> None:
        self.sockets = list(sockets)
        self.log = log
        self.stopping = False  # whether a signal to stop was received
        self.listening = False  # whether the current server listens
        self.ready = False  # whether the current server has loaded its models
        self.server = 0  # process ID of the current server; 0 in the server itself
        self.refusals: list[Thread] = []  # threads that answer 503
        self.wakeup_reader, self.wakeup_writer = socket.socketpair()  # a signal makes the reader readable

    def run(self) -> socket.socket:
        """Start servers until one ends without being killed. In a server, return its connection to the supervisor."""
        for opened in (self.wakeup_reader, self.wakeup_writer, *self.sockets):
            opened.setblocking(False)
        early_kills = 0
        while True:
            connection = self._fork()
            if not self.server:
                return connection
            status = self._watch(connection)
            if self.stopping or status == 0 or (status > 0 and not self.ready):
                raise SystemExit(status if status >= 0 else 128 - status)
            early_kills = 0 if self.ready else early_kills + 1
            name = signal.Signals(-status).name if status < 0 else f"status {status}"
            if early_kills == MAX_EARLY_KILLS:
                raise HeedfulError(
                    f"the server ended by {name} {early_kills} times before it was ready: is there the memory?"
                )
            self.log(f"the server ended by {name}, and starts again")

    def _fork(self) -> socket.socket:
        """Fork a server. In each of the two processes, return the connection to the other."""
        for refusal in self.refusals:  # a fork does not copy threads
            refusal.join()
        own, peer = socket.socketpair()
        self.listening = self.ready = False
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both processes have set their handlers
        self.server = os.fork()
        if self.server:
            signal.set_wakeup_fd(self.wakeup_writer.fileno())
            for signal_number in SIGNALS:
                signal.signal(signal_number, self._forward)
        else:
            own, peer = peer, own
            signal.set_wakeup_fd(-1)
            for signal_number in SIGNALS:
                signal.signal(signal_number, _initial_handler(signal_number))
            os.setpgid(0, 0)  # so that Ctrl-C reaches the server once, through the supervisor
            self.wakeup_reader.close()
            self.wakeup_writer.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        peer.close()
        return own

    def _forward(self, signal_number: int, frame: FrameType | None) -> None:
        """Send a signal to the server. After any signal but SIGHUP, the supervisor ends with the server."""
        self.stopping = self.stopping or signal_number != getattr(signal, "SIGHUP", None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.server, signal_number)

    def _watch(self, connection: socket.socket) -> int:
        """Answer 503 until the server listens, wait until it ends, and return its exit status."""
        with selectors.PollSelector() as selector, connection:
            for opened in (connection, self.wakeup_reader, *self.sockets):
                selector.register(opened, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is connection:
                        message = _receive(connection)
                        if not message:
                            return os.waitstatus_to_exitcode(os.waitpid(self.server, 0)[1])
                        self.ready = self.ready or READY in message
                        if LISTENING in message and not self.listening:
                            self.listening = True
                            for listener in self.sockets:
                                selector.unregister(listener)
                    elif key.fileobj is self.wakeup_reader:
                        _receive(self.wakeup_reader)
                        if self.stopping:
                            self._close(selector)
                    elif key.fileobj in self.sockets and not self.listening:  # an earlier event can change either
                        assert isinstance(key.fileobj, socket.socket)
                        self._refuse(key.fileobj)

    def _close(self, selector: selectors.BaseSelector) -> None:
        """Close the listening sockets of the supervisor."""
        for listener in self.sockets:
            if not self.listening:
                selector.unregister(listener)
            listener.close()
        self.sockets = []

    def _refuse(self, listener: socket.socket) -> None:
        """Accept a connection, and answer 503 in a thread, or close it at once if there are too many threads."""
        self.refusals = [refusal for refusal in self.refusals if refusal.is_alive()]
        with contextlib.suppress(OSError):  # raised if the server has accepted the connection meanwhile
            client = listener.accept()[0]
            if len(self.refusals) == MAX_REFUSALS:
                client.close()
                return
            self.refusals.append(Thread(target=_send_refusal, args=(client,), daemon=True))
            self.refusals[-1].start()


def _initial_handler(signal_number: signal.Signals) -> Callable[[int, FrameType | None], object] | signal.Handlers:
    """Return the handler of a signal for a server that does not listen yet."""
    if signal_number == signal.SIGINT:
        return signal.default_int_handler
    return signal.SIG_DFL if signal_number == signal.SIGTERM else signal.SIG_IGN


def _send_refusal(client: socket.socket) -> None:
    """Answer 503, then discard further input: closing a connection with unread input would reset it."""
    deadline = time.monotonic() + LINGER_SECONDS
    with client, contextlib.suppress(OSError):
        client.settimeout(LINGER_SECONDS)
        if client.recv(1 << 16):
            client.sendall(REFUSAL)
            client.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline and client.recv(1 << 16):
                pass


def _receive(connection: socket.socket) -> bytes:
    """Return the received bytes, b" " if no byte has arrived yet, or b"" if the connection is closed."""
    try:
        return connection.recv(1 << 12)
    except BlockingIOError:
        return b" "
    except OSError:
        return b""
