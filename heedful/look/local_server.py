"""The page on this machine: 127.0.0.1, behind a random token, for the one person who started it.

It is Python's own server and not that of `serve`: one reader, GET alone, nothing that has to be installed.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from heedful.errors import HeedfulError
from heedful.look import page
from heedful.look.page_api import PageAPI

PATIENCE = 20.0  # seconds for a client to say what it wants
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
HEADERS = {
    "Content-Security-Policy": page.POLICY.format(script="'self'", style="'self'", connect="'self'")
    + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LocalServer(ThreadingHTTPServer):
    """Serves one page; whoever does not know its token finds nothing."""

    daemon_threads = True

    def __init__(self, asks: PageAPI, port: int = 0) -> None:
        self.asks, self.token = asks, secrets.token_urlsafe(24)
        self.turn = threading.Lock()  # one question at a time: models are watched while they run
        super().__init__(("127.0.0.1", port), _Handler)
        here = self.server_address[1]
        self.names = {f"127.0.0.1:{here}", f"localhost:{here}"}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "heedful", ""
    timeout = PATIENCE

    def do_GET(self) -> None:  # the library's name
        if self.headers.get("Host") not in self.server.names:
            return self._say(HTTPStatus.FORBIDDEN, "text/plain", b"this is not the name of this page")
        path = urlsplit(self.path)
        _, token, *rest = path.path.split("/") if path.path.count("/") >= 2 else ("", "", "")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._say(HTTPStatus.NOT_FOUND, "text/plain", b"nothing is here")
        match rest:
            case [""]:
                self._file("index.html")
            case [name] if name in (*page.MODULES, page.STYLE):
                self._file(name)
            case ["ask", name]:
                self._answer(name, dict(parse_qsl(path.query, keep_blank_values=True)))
            case _:
                self._say(HTTPStatus.NOT_FOUND, "text/plain", b"nothing is here")

    def _file(self, name: str) -> None:
        kind = KINDS[name[name.rindex(".") :]]
        self._say(HTTPStatus.OK, f"{kind}; charset=utf-8", page.read_asset(name).encode())

    def _answer(self, name: str, params: dict[str, str]) -> None:
        """What cannot be answered is told in the same form: it is for the reader, not for the browser's console."""
        try:
            with self.server.turn:
                found = page.to_json(self.server.asks(name, params))
        except HeedfulError as error:
            found = page.to_json({"error": str(error)})
        self._say(HTTPStatus.OK, "application/json", found.encode())

    def _say(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed by the library."""


@contextmanager
def serve_in_background(asks: PageAPI, port: int = 0) -> Iterator[LocalServer]:
    """The page in a thread of this process."""
    try:
        server = LocalServer(asks, port)
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
