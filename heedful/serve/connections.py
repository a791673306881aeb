"""`Connections`: limits of the number of open connections, in total and for each client address."""

from __future__ import annotations

import ipaddress
from collections import Counter

from heedful.serve.settings import ServeSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NETWORK_BITS = 64  # prefix length of the IPv6 network of a client, which usually has all addresses of this network


class Connections:
    """Counts open connections, and refuses connections beyond the limits, so that no client takes all of them.

    Args:
        settings: Settings of the server, with the limits.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.max_open = settings.limits.max_connections
        self.max_per_address = settings.connections_per_address  # None: unlimited
        # clients on this machine, such as a proxy, are limited only if the user sets the limit
        self._limits_loopback = settings.limits.max_connections_per_address is not None
        self._proxies = tuple(ipaddress.ip_network(proxy) for proxy in settings.trusted_proxies)
        self.open = 0  # connections that are open now
        self._open_by_key: Counter[str] = Counter()  # open connections of each client, by `_key`

    def accept(self, client: str | None) -> str:
        """Count a connection, unless it is refused.

        Args:
            client: IP address of the client; None for a socket without addresses.

        Returns:
            The reason why the connection is refused, or "" if the connection is accepted and counted.
        """
        if self.open >= self.max_open:
            return f"{self.max_open} connections are open (limits.max_connections); try again later"
        key = self._key(client)
        if key and self.max_per_address is not None and self._open_by_key[key] >= self.max_per_address:
            return (
                f"{self._open_by_key[key]} connections from this address are open "
                "(limits.max_connections_per_address); close some, or start the server with --behind-proxy if this is "
                "a proxy"
            )
        self.open += 1
        if key:
            self._open_by_key[key] += 1
        return ""

    def close(self, client: str | None) -> None:
        """Stop counting a connection that was accepted and has ended.

        Args:
            client: IP address of the client, as it was passed to `accept`.
        """
        self.open -= 1
        if key := self._key(client):
            self._open_by_key[key] -= 1
            if not self._open_by_key[key]:  # a long-running server would otherwise collect the keys of all clients
                del self._open_by_key[key]

    def _key(self, client: str | None) -> str:
        """Return the address or network by which a client's connections are counted.

        Returns "" if the number of connections is not limited for this client: a socket without addresses, a trusted
        proxy, or a client on this machine unless the user has set the limit.
        """
        if client is None or self.max_per_address is None:
            return ""
        try:
            address: Address = ipaddress.ip_address(client.partition("%")[0])  # without the zone of "fe80::1%eth0"
        except ValueError:  # not an IP address, such as the name of a socket
            return ""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # a server that listens on IPv6 gets IPv4 clients as ::ffff:10.0.0.7
        if any(address in network for network in self._proxies) or (address.is_loopback and not self._limits_loopback):
            return ""
        if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
            return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
        return str(address)
