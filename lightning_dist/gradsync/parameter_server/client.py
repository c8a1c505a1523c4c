"""What a rank asks of the servers of all ranks: rows, and to take gradients of rows."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import PeerLostError
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.server import ROLES, receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.parameter_server.stepping import Options
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_bytes

Address = tuple[str, int]


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


@dataclass(frozen=True)
class Wanted:
    """Some rows of a table.

    Attributes:
        served: Of which table.
        rows: [n] of int64, each once, ascending.
    """

    served: ServedTable
    rows: Tensor

    def on(self, server: int) -> tuple[Tensor, Tensor]:
        """(which of them are on a server, their positions there)."""
        chosen = (self.served.placement.server_of(self.rows) == server).nonzero()[:, 0]
        return chosen, self.served.placement.position_of(self.rows[chosen])

    def empty(self) -> Tensor:
        """[n, ...]: memory for their values."""
        return torch.empty((self.rows.numel(), *self.served.table.row_shape), dtype=self.served.table.dtype)


@dataclass(frozen=True)
class Ahead:
    """Rows that were pulled before they are needed; those of this rank are not among them.

    Attributes:
        wanted: Of each table.
        values: [n, ...] of each.
        version: What was asked for; ``None``: they are of no version.
        is_early: Whether they may be of an earlier one.
        chosen: Server -> which of each table's rows it has.
    """

    wanted: Sequence[Wanted]
    values: Sequence[Tensor]
    version: int | None
    is_early: bool
    chosen: Mapping[int, Sequence[Tensor]]


class RowClient:
    """Connections to the servers of the other ranks: one for what is answered, one for what is not.

    One thread at a time asks and one at a time pushes; the two do not wait for each other.

    Args:
        pulls: (address, port) of who answers for each rank's rows; this rank's own is not used.
        rank: This rank.
        secret: What the servers want to be proved.
        timeout_s: Deadline of each operation, in seconds.
        pushes: Who takes gradients for each rank's rows; the same, if not given.
    """

    def __init__(
        self,
        pulls: Sequence[Address],
        *,
        rank: int,
        secret: bytes,
        timeout_s: float,
        pushes: Sequence[Address] | None = None,
    ) -> None:
        self._rank = rank
        self._asking: dict[int, socket.socket] = {}
        self._pushing: dict[int, socket.socket] = {}
        self._one_asks = threading.Lock()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for connections, addresses in ((self._asking, pulls), (self._pushing, pushes or pulls)):
                for server, address in enumerate(addresses):
                    if server != rank:
                        connections[server] = _connected(address, secret, timeout_s)
            on_failure.pop_all()

    def pull(self, wanted: Sequence[Wanted], *, version: int | None) -> list[Tensor]:
        """[n, ...] of each table: the values of some rows, as step ``version`` has left them; ``None``: as they are.

        One message goes to each server that has any of them.

        Raises:
            PeerLostError: A server has ended, or given up.
        """
        return self.settled(self._pull(wanted, version), version=version)

    def pull_ahead(self, wanted: Sequence[Wanted], *, version: int | None, is_early: bool) -> Ahead:
        """What other servers have of some rows; what changes in them until they are needed, :meth:`settled` adds.

        Args:
            wanted: Of each table.
            version: See :meth:`pull`.
            is_early: Whether the answer may be of any step before.
        """
        return self._pull(wanted, version, keep=version is not None, is_early=is_early)

    def settled(self, ahead: Ahead, *, version: int | None) -> list[Tensor]:
        """[n, ...] of each table: rows that were pulled before, as a later step has left them, and this rank's own."""
        if ahead.is_early or version != ahead.version:
            assert version is not None, "rows without a version stay without"
            self._refresh(ahead, version)
        for each, values in zip(ahead.wanted, ahead.values, strict=True):
            chosen, positions = each.on(self._rank)
            if chosen.numel():
                values[chosen] = each.served.own.look_up(positions, version)
        return list(ahead.values)

    def push(self, gradients: Sequence[tuple[ServedTable, Rows, Options]], *, step: int) -> None:
        """Give each server this rank's gradients of its rows for a step; to some these may be none.

        Args:
            gradients: Of each table, with the options of what steps it.
            step: The number of those that this rank has pushed before.
        """
        parts = [(Wanted(served, rows.indices), rows) for served, rows, _ in gradients]
        for server in [*self._pushing, self._rank]:
            # Rows are ascending, and so are their positions on a server: stripes keep the order.
            here = []
            for wanted, rows in parts:
                chosen, positions = wanted.on(server)
                here.append(Rows(positions, rows.values[chosen]))
            if server == self._rank:
                for (served, _, options), rows in zip(gradients, here, strict=True):
                    served.own.push(self._rank, step, rows, options)
                continue
            connection = self._pushing[server]
            counts = [(served.number, rows.count) for (served, *_), rows in zip(gradients, here, strict=True)]
            given = [options for *_, options in gradients]
            wire.send(connection, {"op": "push", "parts": counts, "rank": self._rank, "step": step, "options": given})
            for (served, *_), rows in zip(gradients, here, strict=True):
                send_bytes(connection, to_bytes(rows, served.table))

    def close(self) -> None:
        """Close the connections; who waits on one is freed. Safe to call twice."""
        for connections in (self._asking, self._pushing):
            for connection in connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            connections.clear()

    def _pull(
        self, wanted: Sequence[Wanted], version: int | None, *, keep: bool = False, is_early: bool = False
    ) -> Ahead:
        found = [each.empty() for each in wanted]
        chosen: dict[int, list[Tensor]] = {}
        with self._one_asks:
            for server, connection in self._asking.items():
                places = [each.on(server) for each in wanted]
                if not any(some.numel() for some, _ in places):
                    continue
                chosen[server] = [some for some, _ in places]
                parts = [(each.served.number, some.numel()) for each, (some, _) in zip(wanted, places, strict=True)]
                wire.send(connection, {"op": "pull", "parts": parts, "version": version, "keep": keep})
                for each, (_, positions) in zip(wanted, places, strict=True):
                    send_bytes(connection, positions.to(each.served.table.index_dtype))
            for server, places_on in chosen.items():
                self._answer_of(server)
                for each, values, some in zip(wanted, found, places_on, strict=True):
                    values[some] = _rows_from(self._asking[server], each.served.table, some.numel())
        return Ahead(wanted, found, version, is_early, chosen)

    def _refresh(self, ahead: Ahead, version: int) -> None:
        with self._one_asks:
            for server in ahead.chosen:
                wire.send(self._asking[server], {"op": "refresh", "version": version})
            for server, chosen in ahead.chosen.items():
                counts = self._answer_of(server)
                connection = self._asking[server]
                for each, values, some, count in zip(ahead.wanted, ahead.values, chosen, counts, strict=True):
                    table = each.served.table
                    encoded = receive_bytes(connection, count * table.index_bytes)
                    places = encoded.view(table.index_dtype).to(torch.int64)
                    values[some[places]] = _rows_from(connection, table, count)

    def _answer_of(self, server: int) -> list[int]:
        """How many rows of each part follow."""
        answer = wire.receive(self._asking[server])
        if "error" in answer:
            raise PeerLostError(f"the parameter server of rank {server} says: {answer['error']}")
        return [int(count) for count in answer["rows"]]


def _connected(address: Address, secret: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=timeout_s)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connection.close)
        wire.prove(connection, secret, ROLES, is_server=False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_failure.pop_all()
    return connection


def _rows_from(connection: socket.socket, table: Table, count: int) -> Tensor:
    received = receive_bytes(connection, count * table.row_bytes)
    return received.view(table.dtype).view(count, *table.row_shape)
