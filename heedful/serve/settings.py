"""What a server may be told: limits, deadlines, who may ask."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Literal

from heedful.errors import HeedfulError
from heedful.infer.precision import PrecisionOrAuto

LOOPBACK = ("127.0.0.1", "::1", "localhost")
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request, one connection or all of them may have; past each the answer is 413, 422, 429 or 503."""

    body: int = 2_000_000  # bytes
    headers: int = 16_384  # bytes
    connections: int = 1_024
    max_connections_per_address: int | None = None  # a quarter of connections, and loopback is not limited
    received: int = 64_000_000  # bytes of bodies that are being received, of all connections
    unsent: int = 64_000_000  # bytes of answers that clients have not read, of all connections
    requests: int = 512  # that wait or run
    queued_tokens: int = 262_144  # that wait
    queued_characters: int = 4_194_304  # of requests of more than 16,384 each, that wait to be tokenised or are
    tokens: int = 16_384  # of one request, in windows
    characters: int = 262_144  # of one request: 16 for each token
    inputs: int = 1_024  # of one request
    batch_tokens: int = 4_096
    written: int = 512  # tokens that /generate writes for a text
    weights: int = 1_000_000  # numbers of one answer of /attention
    candidates: int = 32_768  # tokens that one answer of /fill lists, for all its masks
    readers: int = 2  # threads that tokenise

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value < 1:
                raise HeedfulError(f"{each.name} is {value}: give a number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """In seconds."""

    request: float = 30.0  # from its head to its answer, unless X-Request-Timeout-Ms says otherwise
    longest: float = 300.0  # that X-Request-Timeout-Ms may ask for
    headers: float = 10.0  # to receive them
    body: float = 30.0  # to receive it
    write: float = 30.0  # in which a client reads 64 kB of its answer, or all that is left
    idle: float = 10.0  # of a connection between two requests
    drain: float = 25.0  # to answer what is here after SIGTERM
    linger: float = 0.5  # after SIGTERM, in which new requests are refused in words

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 <= getattr(self, each.name) <= 86_400:
                raise HeedfulError(f"{each.name} is {getattr(self, each.name)}: give seconds, up to a day")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a server behaves."""

    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    hosts: tuple[str, ...] = ()  # names by which it may be called, beside those of this machine
    origins: tuple[str, ...] = ()  # of pages elsewhere that may call it, as "https://example.org"
    behind_proxy: bool = False  # whether all clients come through a proxy, so that no address is limited
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks that are not limited, as "10.0.0.0/8"
    anyone: bool = False  # whether it may be open beyond this machine without a key
    precision: PrecisionOrAuto = "float32"  # in which models answer; auto is measured at the start
    device: Literal["cpu", "cuda"] = "cpu"  # on which they are computed
    log_text: bool = False  # whether inputs go into the log
    restart: bool = True  # whether a small process before the server starts it again when it was killed

    def __post_init__(self) -> None:
        if self.behind_proxy and self.limits.max_connections_per_address is not None:
            raise HeedfulError(
                "behind_proxy and limits.max_connections_per_address were given: behind a proxy all clients share its "
                "address; give one of them"
            )
        for each in self.trusted_proxies:
            try:
                ipaddress.ip_network(each)
            except ValueError:
                raise HeedfulError(
                    f"trusted_proxies has {each!r}: give an address or a network, as 10.0.0.7 or 10.0.0.0/8"
                ) from None

    @property
    def connections_per_address(self) -> int | None:
        """How many connections one address may have open; None if that is not limited."""
        if self.behind_proxy:
            return None
        most = self.limits.max_connections_per_address
        return max(1, self.limits.connections // 4) if most is None else most


def named(runs: Iterable[str]) -> dict[str, str]:
    """What is served by its name: "name=folder", else the last part of the folder's name."""
    found: dict[str, str] = {}
    for run in runs:
        name, equals, folder = run.partition("=")
        if not equals or not NAME.fullmatch(name):
            folder = run
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(run.partition("@")[0]).name).strip("-.")[:100] or "model"
        if name in found:
            raise HeedfulError(f"two models are called {name!r}: name them apart, as {name}-2={folder}")
        found[name] = folder
    if not found:
        raise HeedfulError("no model was given: heedful serve RUN")
    return found
