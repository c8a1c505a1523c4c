"""What ranks ask of a server of rows, checked against the tables before memory is taken for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from lightning_dist import wire
from lightning_dist.errors import CollectiveError
from lightning_dist.gradsync.parameter_server.server import receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Table, from_bytes

_INT64_BYTES = 8


class RowRequests:
    """The requests of one connection.

    Args:
        shards: By number of the table.
        tables: What each is a part of.
    """

    def __init__(self, shards: Sequence[Shard], tables: Sequence[Table]) -> None:
        self._shards = tuple(shards)
        self._tables = tuple(tables)

    def answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """See :data:`~lightning_dist.gradsync.parameter_server.server.Answer`."""
        number, count = int(asked["table"]), int(asked["rows"])
        if number < 0:
            raise ValueError(f"table {number}")
        shard, table = self._shards[number], self._tables[number]
        if not 0 <= count <= table.num_rows:
            raise ValueError(f"{count} rows of a table that has {table.num_rows}")
        if asked["op"] == "pull":
            positions = receive_bytes(connection, count * _INT64_BYTES).view(torch.int64)
            _check(positions, len(shard.values))
            try:
                rows = shard.look_up(positions, int(asked["version"]))
            except CollectiveError as error:
                wire.send(connection, {"error": str(error)})
                raise
            wire.send(connection, {"rows": count})
            send_bytes(connection, rows)
        elif asked["op"] == "push":
            encoded = receive_bytes(connection, count * (table.index_bytes + table.row_bytes))
            rows_pushed = from_bytes(encoded, table)
            _check(rows_pushed.indices, len(shard.values))
            shard.push(int(asked["rank"]), rows_pushed)
        else:
            raise ValueError(f"{asked['op']!r} is no operation")


def _check(positions: torch.Tensor, count: int) -> None:
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < count:
        raise ValueError(f"positions outside of {count} rows")
