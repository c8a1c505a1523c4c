"""What a rank may ask of a server's shards: rows, what has changed in rows that it has, and to take gradients.

A message is about all tables that it concerns: a JSON header, whose ``parts`` are pairs of a table's number and a
number of rows, then the bytes of each part. Rows are numbered by position on the server, in the table's index type.

- ``pull``: positions of each part. The answer: the values of each. With ``keep`` they may be of an earlier step than
  asked for, and are remembered.
- ``refresh``: nothing. The answer: for each part remembered, which of its rows have changed, counted from its first,
  and their values; then they are forgotten.
- ``push``: positions and gradients of each part, no answer.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import CollectiveError
from lightning_dist.gradsync.parameter_server.server import receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Table, from_bytes


@dataclass(frozen=True)
class _Kept:
    """What a rank has pulled and will ask for again: of which table, which rows, as it has them."""

    number: int
    positions: Tensor
    version: int


class RowRequests:
    """Answers one rank's connection.

    Args:
        shards: By number of the table.
        tables: What each is a part of.
    """

    def __init__(self, shards: Sequence[Shard], tables: Sequence[Table]) -> None:
        self._shards = tuple(shards)
        self._tables = tuple(tables)
        self._kept: list[_Kept] = []
        self._operations: dict[str, Callable[[socket.socket, dict[str, Any]], None]] = {
            "pull": self._pull,
            "refresh": self._refresh,
            "push": self._push,
        }

    def answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """Read what follows a header, and answer.

        Raises:
            ValueError: It is no request; the connection is of no use then.
            KeyError: The same.
            CollectiveError: A shard gave up, of which the rank is told.
        """
        operation = self._operations.get(str(asked["op"]))
        if operation is None:
            raise ValueError(f"{asked['op']!r} is no operation")
        operation(connection, asked)

    def _pull(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        version = None if asked["version"] is None else int(asked["version"])
        wanted = []
        for number, count in self._parts(asked):
            table = self._tables[number]
            encoded = receive_bytes(connection, count * table.index_bytes)
            wanted.append((number, self._checked(number, encoded.view(table.index_dtype).to(torch.int64))))
        with _telling(connection):
            if asked.get("keep") and version is not None:
                found = self._look_up_early(wanted, version)
            else:
                found = [self._shards[number].look_up(positions, version) for number, positions in wanted]
        wire.send(connection, {"rows": [len(rows) for rows in found]})
        for rows in found:
            send_bytes(connection, rows)

    def _look_up_early(self, wanted: list[tuple[int, Tensor]], version: int) -> list[Tensor]:
        early = [self._shards[number].look_up_early(positions, version) for number, positions in wanted]
        self._kept = [
            _Kept(number, positions, seen) for (number, positions), (seen, _) in zip(wanted, early, strict=True)
        ]
        return [rows for _, rows in early]

    def _refresh(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        version = int(asked["version"])
        kept, self._kept = self._kept, []
        with _telling(connection):
            found = [self._shards[e.number].changed(e.positions, e.version, version) for e in kept]
        wire.send(connection, {"rows": [len(places) for places, _ in found]})
        for each, (places, rows) in zip(kept, found, strict=True):
            send_bytes(connection, places.to(self._tables[each.number].index_dtype))
            send_bytes(connection, rows)

    def _push(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        parts, options = self._parts(asked), asked["options"]
        gradients = []
        for number, count in parts:
            table = self._tables[number]
            encoded = receive_bytes(connection, count * (table.index_bytes + table.row_bytes))
            gradients.append(from_bytes(encoded, table))
            self._checked(number, gradients[-1].indices)
        for (number, _), rows, given in zip(parts, gradients, options, strict=True):
            self._shards[number].push(int(asked["rank"]), int(asked["step"]), rows, dict(given))

    def _checked(self, number: int, positions: Tensor) -> Tensor:
        held = len(self._shards[number].values)
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < held:
            raise ValueError(f"positions outside of {held} rows")
        return positions

    def _parts(self, asked: dict[str, Any]) -> list[tuple[int, int]]:
        """(table, rows) of each part, none of which is larger than its table: nobody can ask for all memory."""
        parts = [(int(number), int(count)) for number, count in asked["parts"]]
        numbers = [number for number, _ in parts]
        if len(set(numbers)) != len(numbers) or not all(0 <= number < len(self._tables) for number in numbers):
            raise ValueError(f"tables {numbers} of {len(self._tables)}")
        for number, count in parts:
            if not 0 <= count <= self._tables[number].num_rows:
                raise ValueError(f"{count} rows of a table that has {self._tables[number].num_rows}")
        return parts


@contextlib.contextmanager
def _telling(connection: socket.socket) -> Iterator[None]:
    """Tell the rank why its request cannot be answered."""
    try:
        yield
    except CollectiveError as error:
        wire.send(connection, {"error": str(error)})
        raise
