"""The local server of the page: who gets in, and to which files."""

from __future__ import annotations

import socket
from importlib.resources import files
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from heedful.look.local_server import LocalServer


def test_only_its_reader_gets_in(server: LocalServer) -> None:
    here = server.url.rstrip("/").rsplit("/", 1)[0]

    def status(url: str, **headers: str) -> tuple[int, Any]:
        try:
            with urlopen(Request(url, headers=headers), timeout=10) as answer:
                return answer.status, answer.headers
        except HTTPError as error:
            return error.code, error.headers

    code, headers = status(server.url)
    assert code == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer" and "no-store" in headers["Cache-Control"]
    assert status(f"{server.url}main.js")[0] == 200
    web = files("heedful.look") / "web"
    assert (web / "jsconfig.json").is_file() and (web / ".." / "page.py").is_file()  # exist, and are not served
    for path in (
        "/",
        "/about",
        "/ask/about",
        f"/{'x' * 32}/",
        f"/{server.token}/jsconfig.json",
        f"/{server.token}/../page.py",
        f"/{server.token}/%2e%2e/page.py",
        f"/{server.token}/..%2fpage.py",
        f"/{server.token}/%2e%2e%2fpage.py",
    ):
        assert status(here + path)[0] == 404, path
    assert status(server.url, Host="evil.example")[0] == 403
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as plain:
        plain.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
        assert b" 501 " in plain.recv(1000)
