"""How many bytes a second the way to another host's agent carries, in each direction."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from lightning_dist import wire
from lightning_dist.elastic.health.request import Peer
from lightning_dist.elastic.leading.channel import ROLES
from lightning_dist.elastic.leading.load import load


@dataclass(frozen=True)
class Carried:
    """Bytes a second.

    Attributes:
        there_bytes_per_s: To the other host.
        back_bytes_per_s: From it.
    """

    there_bytes_per_s: float
    back_bytes_per_s: float


def carried(peer: Peer, secret: bytes, *, size_bytes: int, timeout_s: float) -> Carried:
    """Measure it; see :mod:`lightning_dist.elastic.leading.load`.

    Args:
        peer: An agent's endpoint.
        secret: That the agents share.
        size_bytes: Sent in each direction.
        timeout_s: Each direction takes no longer.

    Raises:
        TimeoutError: It took longer.
        OSError: There is no agent that knows the secret, or none that answers loads.
    """
    with socket.create_connection((peer.address, peer.port), timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.prove(connection, secret, ROLES, is_server=False)
        begin_s = time.monotonic()
        for part in load(size_bytes):
            _send(connection, part, begin_s + timeout_s)
        _send(connection, {"kind": "load", "wanted_bytes": size_bytes}, begin_s + timeout_s)
        _next(connection, "loaded", begin_s + timeout_s)
        there_s = time.monotonic()
        missing_bytes = size_bytes
        while missing_bytes > 0:
            missing_bytes -= len(str(_next(connection, "load", there_s + timeout_s)["filler"]))
        back_s = time.monotonic()
    return Carried(size_bytes / (there_s - begin_s), size_bytes / (back_s - there_s))


def _send(connection: socket.socket, message: dict[str, object], deadline_s: float) -> None:
    connection.settimeout(_left(deadline_s))
    wire.send(connection, message)


def _next(connection: socket.socket, kind: str, deadline_s: float) -> dict[str, object]:
    """The next message that is no sign of life."""
    while True:
        connection.settimeout(_left(deadline_s))
        message = wire.receive(connection)
        if message.get("kind") == kind:
            return message
        if message.get("kind") != "ping":
            raise ConnectionError(f"it says {message.get('kind')!r}")


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return left_s
