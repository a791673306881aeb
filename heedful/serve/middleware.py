"""`AccessMiddleware`: checks of a request's headers, error responses, and a log line for each request.

Starlette's checks of hosts and origins are not used: TrustedHostMiddleware takes the first of several Host headers and
cannot parse "[::1]:80", and CORSMiddleware answers requests of origins that are not allowed.
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
    failure_reason,
)
from heedful.serve.settings import LOOPBACK, ServeSettings

LOG = logging.getLogger("heedful.serve")
PATHS_WITHOUT_KEY = ("/health", "/live", "/ready", "/v2/health/live", "/v2/health/ready")
CLOSE = ("connection", "close")
MAX_MESSAGE_CHARACTERS = 400  # maximum characters of an error message; the rest is cut off
MIN_KEY_CHARACTERS = 16  # minimum characters of an API key
HEADERS = [  # headers of every response
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
]
PREFLIGHT_HEADERS = [  # headers of the response to a CORS preflight request
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-request-timeout-ms"),
    (b"access-control-max-age", b"600"),
]
CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)


class HTTPError(Exception):
    """An error that is sent as an HTTP response."""

    def __init__(self, status: int, kind: str, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        """`kind` is the type of the error for programs: "error_type" in the response."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.headers = headers


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response."""


@dataclass(kw_only=True, slots=True)
class RequestLog:
    """The log entry of a request, with its headers and its deadline."""

    start: float  # time.monotonic() when the headers were received
    deadline: float  # time.monotonic() until which the response must be sent
    route: str = ""  # path of the route, or "" for an unknown path
    status: int = 0  # HTTP status, or 0 before the response
    tokens: int = 0  # number of tokens that the model read
    reason: str = ""  # reason why the request failed, or ""
    text: list[str] | None = None  # beginnings of the texts, or None if texts are not logged
    is_disconnected: Callable[[], bool] = lambda: False  # returns whether the client closed the connection
    headers: dict[bytes, list[bytes]] = field(default_factory=dict)  # values of each header, by lowercase name

    def header(self, name: bytes) -> str:
        """Return the value of a header, or "" if it is missing."""
        return b", ".join(self.headers.get(name, [])).decode("latin-1")


def to_http_error(error: BaseException) -> HTTPError:
    """Return the error response for an exception. Internal errors get a general message."""
    match error:
        case HTTPError():
            return error
        case QueueFullError():
            seconds = str(max(1, int(error.retry)) + randbelow(3))  # random, so that not all clients retry at once
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
    return HTTPError(500, "backend", "the server failed on this request; the error is in its log")


def read_api_keys(path: Path) -> tuple[bytes, ...]:
    """Return the API keys of a file with one key on each line.

    Raises:
        HeedfulError: If the file cannot be read, has no key, or has a key that is too short or not ASCII.
    """
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise HeedfulError(f"{path} cannot be read: {error.strerror}") from None
    keys = tuple(line for line in lines if line)
    if not keys or any(len(key) < MIN_KEY_CHARACTERS or not re.fullmatch(rb"[!-~]+", key) for key in keys):
        raise HeedfulError(
            f"{path} holds no key: write one on a line, {MIN_KEY_CHARACTERS} or more ASCII characters without spaces, "
            "as python -c 'import secrets; print(secrets.token_urlsafe(32))' makes it"
        )
    return keys


class AccessMiddleware:
    """ASGI middleware that checks the headers of each request, and logs and counts each response."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServeSettings,
        keys: tuple[bytes, ...] = (),
        hosts: tuple[str, ...] | None = LOOPBACK,
        on_response: Callable[[str, RequestLog, float], None] | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            settings: Settings of the server.
            keys: API keys. If empty, requests need no key.
            hosts: Allowed Host headers, without ports. If None, any Host header is allowed.
            on_response: Called after each request with its method, its log entry and its duration in seconds.
        """
        self.app = app
        self.settings = settings
        self.keys = keys
        self.hosts = hosts
        self.on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        now = time.monotonic()
        record = RequestLog(start=now, deadline=now + self.settings.timeouts.request_seconds)
        record.is_disconnected = scope.get("heedful.is_disconnected", record.is_disconnected)
        for name, value in scope["headers"]:
            record.headers.setdefault(name.lower(), []).append(value)
        scope["heedful"] = record

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", []), *self._headers(record)]
            await send(message)

        try:
            try:
                self._check_head(scope, record)
                if self._is_allowed_preflight(scope, record):
                    start = {"type": "http.response.start", "status": 204, "headers": PREFLIGHT_HEADERS}
                    await send_with_headers(start)
                    await send_with_headers({"type": "http.response.body"})
                else:
                    await self.app(scope, receive, send_with_headers)
            except HTTPError as error:
                record.reason = record.reason or error.kind
                await send_error(send_with_headers, error, scope["path"])
        except ClientDisconnectedError:
            record.status, record.reason = 499, "client_disconnected"
        except asyncio.CancelledError:
            record.status, record.reason = 499, "cancelled"
            raise
        except Exception as error:
            record.reason = failure_reason(error)
            if not record.status:
                await send_error(send_with_headers, to_http_error(error), scope["path"])
        finally:
            self._log(scope, record)

    def _headers(self, record: RequestLog) -> list[tuple[bytes, bytes]]:
        """Return the headers to add to a response."""
        headers = [*HEADERS, (b"content-security-policy", CONTENT_POLICY)]
        if (origin := record.header(b"origin")) in self.settings.cors_allow_origins and origin:
            headers += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            headers += [(b"access-control-expose-headers", b"retry-after")]
        return headers

    def _is_allowed_preflight(self, scope: Scope, record: RequestLog) -> bool:
        """Return whether this is a CORS preflight of an allowed origin; browsers send it without an API key."""
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in record.headers
        return is_preflight and record.header(b"origin") in self.settings.cors_allow_origins

    def _check_head(self, scope: Scope, record: RequestLog) -> None:
        """Check the path and the headers of a request before its body is read, and set the requested deadline.

        Raises:
            HTTPError: If the request is refused.
        """
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
        if self.hosts is not None and _host_name(record.header(b"host")) not in self.hosts:
            raise HTTPError(403, "forbidden", "this Host header is not allowed: add the name with --allowed-hosts")
        if "websocket" in record.header(b"upgrade").lower():  # other upgrades may be ignored (RFC 9110, 7.8)
            raise HTTPError(403, "forbidden", "this server has no WebSockets")
        follows_link = path == "/" and scope["method"] == "GET" and record.header(b"sec-fetch-mode") == "navigate"
        if not follows_link:  # pages of any site may link to the page of this server
            self._check_origin(record)
        is_public = path in PATHS_WITHOUT_KEY or path == "/" or path.startswith("/web/")
        if self.keys and not is_public and not self._is_allowed_preflight(scope, record):
            self._check_key(record)
        if timeout := record.header(b"x-request-timeout-ms"):
            if not re.fullmatch(r"[0-9]{1,9}", timeout) or not int(timeout):
                raise HTTPError(400, "validation", "X-Request-Timeout-Ms must be a number of milliseconds, from 1")
            record.deadline = record.start + min(int(timeout) / 1000, self.settings.timeouts.max_request_seconds)

    def _check_origin(self, record: RequestLog) -> None:
        """Raise an HTTPError if the request comes from a page of another site whose origin is not allowed."""
        if b"origin" not in record.headers:
            if record.header(b"sec-fetch-site") in ("cross-site", "same-site"):
                raise HTTPError(403, "forbidden", "pages of other sites may not call this server")
            return
        origin = record.header(b"origin")
        origin_host = urlsplit(origin).netloc if origin.startswith(("http://", "https://")) else ""
        is_own = bool(origin_host) and origin_host == record.header(b"host")
        if origin not in self.settings.cors_allow_origins and not is_own:
            raise HTTPError(
                403,
                "forbidden",
                "pages of this origin may not call this server: allow it with --cors-allow-origins",
            )

    def _check_key(self, record: RequestLog) -> None:
        """Raise an HTTPError if the request has none of the API keys."""
        credential = record.header(b"authorization").encode("latin-1")
        credential = credential[7:] if credential[:7].lower() == b"bearer " else b""
        # sum() compares all keys, so that the duration does not reveal which one is similar
        if not sum(hmac.compare_digest(credential, key) for key in self.keys):
            raise HTTPError(
                401, "unauthorized", "give a key: Authorization: Bearer KEY", [("www-authenticate", "Bearer")]
            )

    def _log(self, scope: Scope, record: RequestLog) -> None:
        """Log a request in one line of JSON, and count it."""
        seconds = time.monotonic() - record.start
        if self.on_response is not None:
            self.on_response(scope["method"], record, seconds)
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
        level = logging.WARNING if record.status >= 500 else logging.INFO
        LOG.log(level, "%s", json.dumps(line, allow_nan=False))  # ASCII without line breaks


async def send_error(send: Send, error: HTTPError, path: str) -> None:
    """Send an error response of at most 2 kB, in OpenAI's form for paths under /v1."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "…"
    message = message.encode("utf-8", "replace").decode()
    content: Mapping[str, object] = {"error": message, "error_type": error.kind}
    if path.startswith("/v1/"):
        content = {"error": {"message": message, "type": error.kind, "code": error.status}}
    headers = [(name.encode(), value.encode()) for name, value in error.headers]
    await send_json(send, content, error.status, headers)


async def send_json(
    send: Send, content: object, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send a JSON response."""
    body = orjson.dumps(content)
    body_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*body_headers, *headers]})
    await send({"type": "http.response.body", "body": body})


def _host_name(host: str) -> str:
    """Return a Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
