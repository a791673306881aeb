"""How many connections are open, in all and from one address."""

from __future__ import annotations

import ipaddress
from collections import Counter

from heedful.serve.settings import ServeSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NETWORK = 64  # bits of an IPv6 address that one client has


class Connections:
    """Counts the connections that were accepted, and refuses those past the limits."""

    def __init__(self, settings: ServeSettings) -> None:
        self.most = settings.limits.max_connections
        self.most_per_address = settings.connections_per_address
        self._loopback_too = settings.limits.max_connections_per_address is not None
        self._proxies = tuple(ipaddress.ip_network(proxy) for proxy in settings.trusted_proxies)
        self.open = 0
        self._of: Counter[str] = Counter()

    def accept(self, client: str | None) -> str:
        """Count a connection of a client's address (None: it has none); "", or why it is refused and not counted."""
        if self.open >= self.most:
            return f"{self.most} connections are open (limits.max_connections); try again later"
        key = self._key(client)
        if key and self.most_per_address is not None and self._of[key] >= self.most_per_address:
            return (
                f"{self._of[key]} connections from this address are open (limits.max_connections_per_address); close "
                "some, or start the server with --behind-proxy if this is a proxy"
            )
        self.open += 1
        if key:
            self._of[key] += 1
        return ""

    def close(self, client: str | None) -> None:
        """An accepted connection has ended."""
        self.open -= 1
        if key := self._key(client):
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]

    def _key(self, client: str | None) -> str:
        """The key under which a connection is counted; "" where there is no limit."""
        if client is None or self.most_per_address is None:
            return ""
        try:
            address: Address = ipaddress.ip_address(client.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in self._proxies) or (address.is_loopback and not self._loopback_too):
            return ""
        if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
            return str(ipaddress.ip_network((address, NETWORK), strict=False))
        return str(address)
