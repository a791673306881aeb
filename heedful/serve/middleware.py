"""Access checks by the head of a request, error responses, and one log line for each request.

Host and CORS checks are not Starlette's: TrustedHostMiddleware takes the first of several Host headers and cannot read
"[::1]:80", and CORSMiddleware answers requests of origins that are not allowed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbelow
from urllib.parse import urlsplit

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heedful.errors import HeedfulError
from heedful.infer.scheduling.errors import (
    DeadlineExceededError,
    InferenceFailedError,
    QueueFullError,
    TooLongError,
    UnavailableError,
)
from heedful.serve.settings import LOOPBACK, ServeSettings

LOG = logging.getLogger("heedful.serve")
OPEN = ("/health", "/live", "/ready", "/v2/health/live", "/v2/health/ready")  # need no key
CLOSE = ("connection", "close")
LONGEST_MESSAGE = 400  # characters
KEY_LENGTH = 16
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
]
PREFLIGHT = [  # headers for pages of allowed origins
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-request-timeout-ms"),
    (b"access-control-max-age", b"600"),
]
CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)


class HTTPError(Exception):
    """An HTTP error response."""

    def __init__(self, status: int, kind: str, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.headers = headers


class ClientDisconnectedError(Exception):
    """The client went away."""


@dataclass(kw_only=True, slots=True)
class RequestLog:
    """The log entry of a request."""

    start: float
    deadline: float
    route: str = ""
    status: int = 0
    tokens: int = 0
    reason: str = ""
    text: list[str] | None = None
    left: Callable[[], bool] = lambda: False  # whether the client has closed
    headers: dict[bytes, list[bytes]] = field(default_factory=dict)

    def header(self, name: bytes) -> str:
        """Return the value of a header, "" if it is missing."""
        return b", ".join(self.headers.get(name, [])).decode("latin-1")


def to_http_error(error: BaseException) -> HTTPError:
    """Return the response to an exception; it holds only what the client can act on."""
    match error:
        case HTTPError():
            return error
        case QueueFullError():
            seconds = str(max(1, int(error.retry)) + randbelow(3))  # all at once would be as bad as now
            return HTTPError(429, "overloaded", str(error), [("retry-after", seconds)])
        case UnavailableError():
            return HTTPError(503, "unhealthy", str(error), [("retry-after", str(1 + randbelow(3)))])
        case DeadlineExceededError():
            return HTTPError(504, "timeout", str(error))
        case TooLongError():
            return HTTPError(413, "too_large", str(error))
        case InferenceFailedError():
            return HTTPError(500, "backend", str(error))
        case HeedfulError():
            return HTTPError(422, "validation", str(error))
    return HTTPError(500, "backend", "something went wrong here; it was logged")


def read_api_keys(path: Path) -> tuple[bytes, ...]:
    """Return the API keys of a file with one on each line."""
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise HeedfulError(f"{path} cannot be read: {error.strerror}") from None
    keys = tuple(line for line in lines if line)
    if not keys or any(len(key) < KEY_LENGTH or not re.fullmatch(rb"[!-~]+", key) for key in keys):
        raise HeedfulError(
            f"{path} holds no key: write one on a line, {KEY_LENGTH} or more ASCII characters without spaces, "
            "as python -c 'import secrets; print(secrets.token_urlsafe(32))' makes it"
        )
    return keys


class AccessMiddleware:
    """ASGI middleware around everything: checks the head of each request, and logs and counts each answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServeSettings,
        keys: tuple[bytes, ...] = (),
        hosts: tuple[str, ...] | None = LOOPBACK,
        seen: Callable[[str, RequestLog, float], None] | None = None,
    ) -> None:
        """`hosts` are the names by which the server may be called; None: any. `seen` is called after each request."""
        self.app = app
        self.settings = settings
        self.keys = keys
        self.hosts = hosts
        self.seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        now = time.monotonic()
        record = RequestLog(start=now, deadline=now + self.settings.timeouts.request_seconds)
        record.left = scope.get("heedful.is_disconnected", record.left)
        for name, value in scope["headers"]:
            record.headers.setdefault(name.lower(), []).append(value)
        scope["heedful"] = record

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", []), *self._headers(record)]
            await send(message)

        try:
            try:
                self._check(scope, record)
                if self._preflight(scope, record):
                    await sending({"type": "http.response.start", "status": 204, "headers": PREFLIGHT})
                    await sending({"type": "http.response.body"})
                else:
                    await self.app(scope, receive, sending)
            except HTTPError as trouble:
                record.reason = record.reason or trouble.kind
                await send_error(sending, trouble, scope["path"])
        except ClientDisconnectedError:
            record.status, record.reason = 499, "client_disconnected"
        except asyncio.CancelledError:
            record.status, record.reason = 499, "cancelled"
            raise
        except Exception as error:
            record.reason = f"{type(error).__name__}"
            if not record.status:
                await send_error(sending, to_http_error(error), scope["path"])
        finally:
            self._log(scope, record)

    def _headers(self, record: RequestLog) -> list[tuple[bytes, bytes]]:
        headers = [*HEADERS, (b"content-security-policy", CONTENT_POLICY)]
        if (origin := record.header(b"origin")) in self.settings.cors_allow_origins and origin:
            headers += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            headers += [(b"access-control-expose-headers", b"retry-after")]
        return headers

    def _preflight(self, scope: Scope, record: RequestLog) -> bool:
        """Return whether this is a preflight request of an allowed origin; browsers send it without a key."""
        asked = scope["method"] == "OPTIONS" and b"access-control-request-method" in record.headers
        return asked and record.header(b"origin") in self.settings.cors_allow_origins

    def _check(self, scope: Scope, record: RequestLog) -> None:
        """Refuse by what the head says; nothing of the body was read yet."""
        path: str = scope["path"]
        headers = record.headers
        if not path.startswith("/") or len(path) > 1000 or re.search(r"[\0-\x1f\\]|(^|/)\.\.(/|$)", path):
            raise HTTPError(404, "not_found", "there is no such path")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self.settings.limits.max_header_bytes:
            raise HTTPError(
                431, "too_large", f"the headers have more than {self.settings.limits.max_header_bytes} bytes", [CLOSE]
            )
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise HTTPError(400, "validation", "give content-length or transfer-encoding, not both", [CLOSE])
        if len(headers.get(b"host", [])) != 1:
            raise HTTPError(400, "validation", "give one host header", [CLOSE])
        if self.hosts is not None and _name(record.header(b"host")) not in self.hosts:
            raise HTTPError(403, "forbidden", "this Host header is not allowed: add the name with --allowed-hosts")
        if "websocket" in record.header(b"upgrade").lower():  # what else is offered need not be taken
            raise HTTPError(403, "forbidden", "there is nothing to upgrade to")
        if not (path == "/" and scope["method"] == "GET" and record.header(b"sec-fetch-mode") == "navigate"):
            self._check_origin(record)  # any site may link to the page
        free = path in OPEN or path == "/" or path.startswith("/web/") or self._preflight(scope, record)
        if self.keys and not free:
            self._check_key(record)
        if timeout := record.header(b"x-request-timeout-ms"):
            if not re.fullmatch(r"[0-9]{1,9}", timeout) or not int(timeout):
                raise HTTPError(400, "validation", "X-Request-Timeout-Ms is to be milliseconds, from 1")
            record.deadline = record.start + min(int(timeout) / 1000, self.settings.timeouts.max_request_seconds)

    def _check_origin(self, record: RequestLog) -> None:
        if b"origin" not in record.headers:
            if record.header(b"sec-fetch-site") in ("cross-site", "same-site"):
                raise HTTPError(403, "forbidden", "pages of other sites may not call this server")
            return
        origin = record.header(b"origin")
        own = urlsplit(origin).netloc if origin.startswith(("http://", "https://")) else ""
        if origin not in self.settings.cors_allow_origins and (not own or own != record.header(b"host")):
            raise HTTPError(
                403,
                "forbidden",
                "pages of this origin may not call this server: allow it with --cors-allow-origins",
            )

    def _check_key(self, record: RequestLog) -> None:
        credential = record.header(b"authorization").encode("latin-1")
        credential = credential[7:] if credential[:7].lower() == b"bearer " else b""
        if not sum(hmac.compare_digest(credential, key) for key in self.keys):  # a sum compares all of them
            raise HTTPError(
                401, "unauthorized", "give a key: Authorization: Bearer KEY", [("www-authenticate", "Bearer")]
            )

    def _log(self, scope: Scope, record: RequestLog) -> None:
        seconds = time.monotonic() - record.start
        if self.seen is not None:
            self.seen(scope["method"], record, seconds)
        line = {
            "method": scope["method"][:20],
            "path": scope["path"][:200],
            "status": record.status,
            "duration_ms": round(1000 * seconds, 1),
            "tokens": record.tokens,
        }
        if record.reason:
            line["reason"] = record.reason
        if self.settings.log_text and record.text is not None:
            line["text"] = record.text
        LOG.log(
            logging.WARNING if record.status >= 500 else logging.INFO, "%s", json.dumps(line, allow_nan=False)
        )  # ASCII: one line


async def send_error(send: Send, trouble: HTTPError, path: str) -> None:
    """Send an error response of at most 2 kB; in OpenAI's form for paths under /v1."""
    message = trouble.message if len(trouble.message) <= LONGEST_MESSAGE else trouble.message[:LONGEST_MESSAGE] + "…"
    message = message.encode("utf-8", "replace").decode()
    content: Mapping[str, object] = {"error": message, "error_type": trouble.kind}
    if path.startswith("/v1/"):
        content = {"error": {"message": message, "type": trouble.kind, "code": trouble.status}}
    headers = [(name.encode(), value.encode()) for name, value in trouble.headers]
    await send_json(send, content, trouble.status, headers)


async def send_json(
    send: Send, content: object, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send a JSON response."""
    body = orjson.dumps(content)
    about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*about, *headers]})
    await send({"type": "http.response.body", "body": body})


def _name(host: str) -> str:
    """The host without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
