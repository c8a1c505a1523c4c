"""What a rank asks of the servers of all ranks: rows, and to take gradients of rows."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import PeerLostError
from lightning_dist.gradsync.parameter_server.placement import Placement
from lightning_dist.gradsync.parameter_server.server import ROLES, receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Alarm, Shard
from lightning_dist.gradsync.parameter_server.stepping import Options
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_bytes

Address = tuple[str, int]
_AGAIN_S = 0.05  # between two tries to come to a server that has broken a connection


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
        pushes: Who takes gradients for each rank's rows; the same, if not given. If others do, those who answer may be
            started again: a look-up whose connection breaks is made once more.
        alarm: Given the seconds waited for such a server, says why to give up, or ``None``.
        names: Of who answers for each rank's rows, for people.
    """

    def __init__(
        self,
        pulls: Sequence[Address],
        *,
        rank: int,
        secret: bytes,
        timeout_s: float,
        pushes: Sequence[Address] | None = None,
        alarm: Alarm = lambda waited_s: None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._rank = rank
        self._asked = _others(pulls, rank)
        self._may_return = pushes is not None
        self._secret = secret
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._names = names or [f"the parameter server of rank {each}" for each in range(len(pulls))]
        self._asking: dict[int, socket.socket] = {}
        self._pushing: dict[int, socket.socket] = {}
        self._one_asks = threading.Lock()
        self._closed = threading.Event()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for connections, places in ((self._asking, self._asked), (self._pushing, _others(pushes or pulls, rank))):
                for server, address in places.items():
                    connections[server] = connected(address, secret, timeout_s)
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
        self._closed.set()
        for connections in (self._asking, self._pushing):
            _close_all(connections)

    def _pull(
        self, wanted: Sequence[Wanted], version: int | None, *, keep: bool = False, is_early: bool = False
    ) -> Ahead:
        with self._one_asks:
            return self._until_answered(lambda: self._pull_once(wanted, version, keep=keep, is_early=is_early))

    def _pull_once(self, wanted: Sequence[Wanted], version: int | None, *, keep: bool, is_early: bool) -> Ahead:
        found = [each.empty() for each in wanted]
        chosen: dict[int, list[Tensor]] = {}
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
            try:
                self._refresh_once(ahead, version)
            except OSError:
                if not self._may_return:
                    raise
                _close_all(self._asking)  # and who serves now does not know what was pulled
                found = self._until_answered(lambda: self._pull_once(ahead.wanted, version, keep=False, is_early=False))
                for values, fresh in zip(ahead.values, found.values, strict=True):
                    values.copy_(fresh)

    def _refresh_once(self, ahead: Ahead, version: int) -> None:
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

    def _until_answered(self, ask: Callable[[], Ahead]) -> Ahead:
        """Ask, and once more on new connections where a server that may return has broken one."""
        start_s = time.monotonic()
        while True:
            try:
                self._connect_missing()
                return ask()
            except OSError as error:
                waited_s = time.monotonic() - start_s
                if not self._may_return or self._closed.is_set():
                    raise
                if waited_s >= self._timeout_s:
                    raise PeerLostError(f"a server of rows did not answer in {self._timeout_s:g} s: {error}") from error
                if (alarm := self._alarm(waited_s)) is not None:
                    raise PeerLostError(f"a server of rows does not answer: {alarm}") from error
                _close_all(self._asking)  # answers to what was asked before may be under way on any of them
                self._closed.wait(_AGAIN_S)

    def _connect_missing(self) -> None:
        if not self._may_return:
            return
        for server in self._asked.keys() - self._asking.keys():
            try:
                self._asking[server] = connected(self._asked[server], self._secret, self._timeout_s)
            except (ConnectionRefusedError, wire.WrongSecretError) as error:
                raise PeerLostError(f"{self._names[server]} is gone: {error}") from error

    def _answer_of(self, server: int) -> list[int]:
        """How many rows of each part follow."""
        answer = wire.receive(self._asking[server])
        if "error" in answer:
            raise PeerLostError(f"{self._names[server]} says: {answer['error']}")
        return [int(count) for count in answer["rows"]]


def connected(address: Address, secret: bytes, timeout_s: float) -> socket.socket:
    """A connection over which both sides have proved the secret; its timeout is the one given.

    Raises:
        OSError: Nobody is there, does not answer in time, or knows another secret.
    """
    connection = socket.create_connection(address, timeout=timeout_s)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connection.close)
        wire.prove(connection, secret, ROLES, is_server=False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_failure.pop_all()
    return connection


def _others(addresses: Sequence[Address], rank: int) -> dict[int, Address]:
    return {server: address for server, address in enumerate(addresses) if server != rank}


def _close_all(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    connections.clear()


def _rows_from(connection: socket.socket, table: Table, count: int) -> Tensor:
    received = receive_bytes(connection, count * table.row_bytes)
    return received.view(table.dtype).view(count, *table.row_shape)
