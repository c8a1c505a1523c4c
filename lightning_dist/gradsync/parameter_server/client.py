"""What a rank asks of the servers of all ranks: rows, and to take gradients of rows."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import PeerLostError
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.server import ROLES, receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_bytes


@dataclass(frozen=True)
class ServedTable:
    """A table as its users know it.

    Attributes:
        number: By which servers know it.
        table: Its shape and type.
        placement: Who has which rows.
        own: What this rank has.
    """

    number: int
    table: Table
    placement: Placement
    own: Shard


class RowClient:
    """Connections to the servers of the other ranks; used by one thread at a time.

    Args:
        addresses: (address, port) of each rank's server; this rank's own is not used.
        rank: This rank.
        secret: What the servers want to be proved.
        timeout_s: Deadline of each operation, in seconds.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], *, rank: int, secret: bytes, timeout_s: float) -> None:
        self._rank = rank
        self._connections: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for server, address in enumerate(addresses):
                if server != rank:
                    connection = socket.create_connection(address, timeout=timeout_s)
                    self._connections[server] = connection
                    wire.prove(connection, secret, ROLES, is_server=False)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            on_failure.pop_all()

    def pull(self, served: ServedTable, rows: Tensor, *, version: int) -> Tensor:
        """[n, ...]: the values of some rows, as step ``version`` has left them.

        Args:
            served: Of which table.
            rows: [n] of int64, each once.
            version: The number of steps made.

        Raises:
            PeerLostError: A server has ended, or given up.
        """
        servers, positions = served.placement.server_of(rows), served.placement.position_of(rows)
        wanted = {server: servers == server for server in [*self._connections, self._rank]}
        for server, connection in self._connections.items():
            mine = positions[wanted[server]]
            if mine.numel():
                asked = {"op": "pull", "table": served.number, "rows": mine.numel(), "version": version}
                wire.send(connection, asked)
                send_bytes(connection, mine)
        values = torch.empty((rows.numel(), *served.table.row_shape), dtype=served.table.dtype)
        own = wanted[self._rank]
        if own.any():
            values[own] = served.own.look_up(positions[own], version)
        for server, connection in self._connections.items():
            count = int(wanted[server].sum())
            if count:
                answer = wire.receive(connection)
                if "error" in answer:
                    raise PeerLostError(f"the parameter server of rank {server} says: {answer['error']}")
                received = receive_bytes(connection, count * served.table.row_bytes)
                values[wanted[server]] = received.view(served.table.dtype).view(count, *served.table.row_shape)
        return values

    def push(self, served: ServedTable, rows: Rows) -> None:
        """Give each server this rank's gradients of its rows for the present step; to some these may be none."""
        servers, positions = served.placement.server_of(rows.indices), served.placement.position_of(rows.indices)
        for server in [*self._connections, self._rank]:
            chosen = servers == server
            # Rows are ascending, and so are their positions on a server: stripes keep the order.
            part = Rows(positions[chosen], rows.values[chosen])
            if server == self._rank:
                served.own.push(self._rank, part)
                continue
            asked = {"op": "push", "table": served.number, "rows": part.count, "rank": self._rank}
            wire.send(self._connections[server], asked)
            send_bytes(self._connections[server], to_bytes(part, served.table))

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
