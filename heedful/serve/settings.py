"""Settings of a server: limits, timeouts and access."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import PurePath

from heedful.errors import HeedfulError
from heedful.infer.precision import PrecisionOrAuto

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MODEL_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a request, a connection and the server; excess is answered with 413, 422, 429, 431 or 503."""

    max_body_bytes: int = 2_000_000  # maximum bytes of the body of a request
    max_header_bytes: int = 16_384  # maximum bytes of the headers of a request
    max_connections: int = 1_024  # maximum open connections
    max_connections_per_address: int | None = None  # connections of one address; none: a quarter, loopback exempt
    max_receive_buffer_bytes: int = 64_000_000  # bytes of request bodies being received, over all connections
    max_send_buffer_bytes: int = 64_000_000  # bytes of responses that clients have not read yet, over all connections
    max_concurrent_requests: int = 512  # requests that are waiting or running
    max_queued_tokens: int = 262_144  # tokens of waiting requests
    max_queued_characters: int = 4_194_304  # characters of requests above 16,384 characters that wait to be tokenised
    max_request_tokens: int = 16_384  # tokens of one request, over all windows
    max_request_characters: int = 262_144  # characters of one request
    max_client_batch_size: int = 1_024  # inputs of one request
    max_batch_tokens: int | None = None  # tokens of a batch; none: 4,096, up to 32,768 on a GPU
    max_new_tokens: int = 512  # tokens that /generate may generate for one text
    max_attention_weights: int = 1_000_000  # numbers in one response of /attention
    max_fill_mask_candidates: int = 32_768  # tokens in one response of /fill-mask, over all its masks
    tokenization_workers: int = 2  # threads that tokenise

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None and value < 1:
                raise HeedfulError(f"{setting.name} is {value}: give a number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Timeouts in seconds."""

    request_seconds: float = 30.0  # from a request's headers to its response, unless it has X-Request-Timeout-Ms
    max_request_seconds: float = 300.0  # largest value of X-Request-Timeout-Ms, in seconds
    headers_seconds: float = 10.0  # to receive a request's headers
    body_seconds: float = 30.0  # to receive a request's body
    write_seconds: float = 30.0  # for a client to read 64 kB of a response, or the rest of it
    keep_alive_seconds: float = 10.0  # until an idle connection is closed
    graceful_shutdown_seconds: float = 25.0  # to answer accepted requests after SIGTERM
    shutdown_delay_seconds: float = 0.5  # time after SIGTERM in which new requests are answered with 503

    def __post_init__(self) -> None:
        for setting in fields(self):
            if not 0 <= getattr(self, setting.name) <= 86_400:
                raise HeedfulError(f"{setting.name} is {getattr(self, setting.name)}: give seconds, up to a day")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Settings of a server."""

    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    allowed_hosts: tuple[str, ...] = ()  # Host headers to accept besides this machine's names
    cors_allow_origins: tuple[str, ...] = ()  # origins whose pages may call the server, such as "https://example.org"
    behind_proxy: bool = False  # all clients connect through a proxy: no limit of connections per address
    trusted_proxies: tuple[str, ...] = ()  # proxies exempt from the limit of one address, such as "10.0.0.0/8"
    allow_unauthenticated: bool = False  # listen beyond this machine without API keys
    precision: PrecisionOrAuto | None = None  # precision of models; none: float32, bfloat16 on a GPU; auto: measured
    device: str = "auto"  # device that runs the models: cpu, cuda, cuda:1, ...; auto: a GPU where there is one
    log_text: bool = False  # write the inputs of requests to the log
    restart_on_crash: bool = True  # a supervisor process starts the server again after a crash

    def __post_init__(self) -> None:
        if self.behind_proxy and self.limits.max_connections_per_address is not None:
            raise HeedfulError(
                "behind_proxy and limits.max_connections_per_address were given: behind a proxy all clients share its "
                "address; give one of them"
            )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise HeedfulError(
                    f"trusted_proxies has {proxy!r}: give an address or a network, as 10.0.0.7 or 10.0.0.0/8"
                ) from None

    @property
    def connections_per_address(self) -> int | None:
        """The maximum open connections of one address, or None without a limit."""
        if self.behind_proxy:
            return None
        maximum = self.limits.max_connections_per_address
        return max(1, self.limits.max_connections // 4) if maximum is None else maximum


def name_models(runs: Iterable[str]) -> dict[str, str]:
    """Return the folders of the models to serve, by the names under which they are served.

    Args:
        runs: NAME=FOLDER, or FOLDER, whose last part becomes the name.

    Raises:
        HeedfulError: If two models have the same name, or no model is named.
    """
    folders: dict[str, str] = {}
    for run in runs:
        name, equals, folder = run.partition("=")
        if not equals or not MODEL_NAME.fullmatch(name):
            folder = run
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(run.partition("@")[0]).name).strip("-.")[:100] or "model"
        if name in folders:
            raise HeedfulError(f"two models are called {name!r}: name them apart, as {name}-2={folder}")
        folders[name] = folder
    if not folders:
        raise HeedfulError("no model was given: heedful serve RUN")
    return folders
