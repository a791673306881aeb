"""A local HTTP server for the page: on 127.0.0.1 only, behind a random token, for the user who started it.

The server uses `http.server` and not `heedful.serve`: a page has one user, sends only GET requests, and needs no
further package.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from heedful.errors import HeedfulError
from heedful.look.page import MODULES, POLICY, STYLE, read_asset, to_json
from heedful.look.page_api import PageAPI

REQUEST_TIMEOUT = 20.0  # seconds that a client may take to send a request
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
HEADERS = {
    "Content-Security-Policy": POLICY.format(script="'self'", style="'self'", connect="'self'")
    + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LocalServer(ThreadingHTTPServer):
    """Serves one page under a secret path.

    Args:
        api: Answers the questions of the page.
        port: Port on 127.0.0.1. If 0, any free port.

    Raises:
        OSError: If the port cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, api: PageAPI, port: int = 0) -> None:
        self.api = api
        self.token = secrets.token_urlsafe(24)
        self.lock = threading.Lock()  # one question at a time, since answers set hooks on modules of the model
        super().__init__(("127.0.0.1", port), _Handler)
        actual_port = self.server_address[1]
        self.hosts = {f"127.0.0.1:{actual_port}", f"localhost:{actual_port}"}  # allowed Host headers

    @property
    def url(self) -> str:
        """URL of the page, with its token."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection, such as a client that disconnects."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for /TOKEN/, /TOKEN/FILE and /TOKEN/ask/QUESTION?PARAMETERS."""

    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "heedful", ""
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:  # the base class calls the method of this name
        if self.headers.get("Host") not in self.server.hosts:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Host header not allowed")
        url = urlsplit(self.path)
        _, token, *path = url.path.split("/") if url.path.count("/") >= 2 else ("", "", "")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found")
        match path:
            case [""]:
                self._send_asset("index.html")
            case [name] if name in (*MODULES, STYLE):
                self._send_asset(name)
            case ["ask", name]:
                self._send_answer(name, dict(parse_qsl(url.query, keep_blank_values=True)))
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

    def _send_asset(self, name: str) -> None:
        content_type = CONTENT_TYPES[name[name.rindex(".") :]]
        self._send(HTTPStatus.OK, f"{content_type}; charset=utf-8", read_asset(name).encode())

    def _send_answer(self, name: str, params: dict[str, str]) -> None:
        """Send an answer, or an error message; both have status 200, so that the page shows the message."""
        try:
            with self.server.lock:
                answer = to_json(self.server.api(name, params))
        except HeedfulError as error:
            answer = to_json({"error": str(error)})
        self._send(HTTPStatus.OK, "application/json", answer.encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": content_type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@contextmanager
def serve_in_background(api: PageAPI, port: int = 0) -> Iterator[LocalServer]:
    """Context in which a thread of this process serves the page.

    Raises:
        HeedfulError: If the port cannot be listened on.
    """
    try:
        server = LocalServer(api, port)
    except OSError as error:
        raise HeedfulError(f"port {port} of 127.0.0.1 cannot be listened on: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, name="heedful-look", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
