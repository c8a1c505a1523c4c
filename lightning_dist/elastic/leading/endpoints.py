"""Where a leader may be: the endpoints of ``--rendezvous``, in the order in which they lead."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.errors import ConfigError, LaunchError

_EXAMPLE = "write a:29400, or a:29400,b:29400 for one that stands by"


@dataclass(frozen=True)
class Endpoint:
    """A host and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> tuple[Endpoint, ...]:
    """Read ``a:29400,b:29400``; IPv6 addresses stand in brackets.

    Raises:
        ConfigError: It is no such list, or names an endpoint twice.
    """
    endpoints = tuple(_parse_one(part.strip(), text) for part in text.split(","))
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ConfigError(f"rendezvous={text!r} names {endpoint} twice; {_EXAMPLE}")
    return endpoints


def own_index(endpoints: Sequence[Endpoint], *, host: str, address: str) -> int | None:
    """Which of the endpoints is this host's; ``None``: none, so that it never leads.

    Args:
        endpoints: All of them.
        host: Name of this host.
        address: Under which others reach it.
    """
    for index, endpoint in enumerate(endpoints):
        if endpoint.host in (host, address) or address in _addresses(endpoint.host):
            return index
    return None


def listen(endpoint: Endpoint, address: str) -> socket.socket:
    """A listening socket on an address of this host, and on no other; port 0 takes a free one.

    Raises:
        LaunchError: The port is taken, or the address is not this host's.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, endpoint.port), family=family, backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {endpoint} (address {address}): {error.strerror or error}; another launch may still run "
            "there; end it, or write another port, the same on all hosts"
        ) from error


def _parse_one(part: str, text: str) -> Endpoint:
    host, colon, port = part.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"rendezvous={text!r}: {part!r} is no host:port; write an IPv6 address as [address]:port")
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"rendezvous={text!r}: {part!r} is no host:port with a port from 1 to 65535; {_EXAMPLE}")
    return Endpoint(host, int(port))


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # a host that is not up yet may have no name yet; its own name is always known to itself
        return set()
