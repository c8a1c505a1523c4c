"""What a server process is asked: look-ups by all ranks, and by the rank whose rows they are, steps and whole tables.

A message of the owner is answered once what it asks is done, and may be sent again: a step that is there is not made
twice. So a rank that has lost the connection, or the process itself, says its last message once more and goes on.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dist import wire
from lightning_dist.errors import PeerLostError
from lightning_dist.gradsync.parameter_server.processes import entries
from lightning_dist.gradsync.parameter_server.processes.kept import Contents, KeptTable, Stepper
from lightning_dist.gradsync.parameter_server.requests import RowRequests
from lightning_dist.gradsync.parameter_server.server import receive_bytes
from lightning_dist.gradsync.sparse.rows import Rows, Table, from_bytes

_LONGEST_NAME = 64


class Answers:
    """For one connection.

    Args:
        tables: One rank's share of each table.
        whole: What each is a part of.
        timeout_s: How long the other side may take for a piece of a table, in seconds.
    """

    def __init__(self, tables: Sequence[KeptTable], whole: Sequence[Table], *, timeout_s: float) -> None:
        self._tables = tuple(tables)
        self._whole = tuple(whole)
        self._timeout_s = timeout_s
        self._is_owner = False
        self._look_ups = RowRequests([each.shard for each in tables], whole)
        self._own = {"step": self._step, "prepare": self._prepare, "read": self._read, "write": self._write}

    def __call__(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """See :data:`~lightning_dist.gradsync.parameter_server.server.Answer`."""
        own = self._own.get(str(asked.get("op")))
        if own is None:
            if asked.get("op") == "push":
                raise ValueError("gradients go to the ranks, which take the mean")
            self._look_ups.answer(connection, asked)
            return
        number = int(asked["table"])
        if not 0 <= number < len(self._tables):
            raise ValueError(f"table {number} of {len(self._tables)}")
        self._is_owner = self._is_owner or asked["op"] != "read"
        connection.settimeout(self._timeout_s)
        own(connection, number, asked)
        connection.settimeout(None)

    def end(self) -> None:
        """The connection is over. If it was the owner's, no step follows that somebody may wait for."""
        if self._is_owner:
            for table in self._tables:
                table.shard.end("the rank whose rows it holds is gone")

    def _step(self, connection: socket.socket, number: int, asked: Mapping[str, Any]) -> None:
        table, kept = self._whole[number], self._tables[number]
        rows = None
        if asked.get("rows") is not None:
            count = int(asked["rows"])
            if not 0 <= count <= kept.own.num_rows:
                raise ValueError(f"{count} rows of {kept.own.num_rows}")
            rows = from_bytes(receive_bytes(connection, count * (table.index_bytes + table.row_bytes)), table)
            _check_ascending(rows, kept.own.num_rows)
        try:
            version = kept.step(int(asked["version"]), rows, _stepper_of(asked))
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # of torch's optimizer
            kept.shard.end(f"a step failed: {error}")
            wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
            raise
        wire.send(connection, {"version": version})

    def _prepare(self, connection: socket.socket, number: int, asked: Mapping[str, Any]) -> None:
        stepper = _stepper_of(asked)
        if stepper is None:
            raise ValueError("no optimizer is named")
        try:
            self._tables[number].prepare(stepper)
        except (RuntimeError, ValueError, TypeError) as error:
            wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
            raise
        wire.send(connection, {})

    def _read(self, connection: socket.socket, number: int, asked: Mapping[str, Any]) -> None:
        prefix = str(asked["prefix"])
        with self._tables[number].reading() as contents:
            found = {name: value for name, value in contents.entries.items() if name.startswith(prefix)}
            wire.send(connection, {**_said_of(contents), "entries": entries.described(found)})
            entries.send(connection, found)

    def _write(self, connection: socket.socket, number: int, asked: Mapping[str, Any]) -> None:
        own = self._tables[number].own
        given = entries.receive(connection, asked["entries"], rows=own.num_rows, row_bytes=own.row_bytes)
        try:
            self._tables[number].write(given, _stepper_of(asked))
        except (RuntimeError, ValueError, TypeError) as error:  # of torch's optimizer
            wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
            raise
        wire.send(connection, {})


def fetched(connection: socket.socket, number: int, own: Table, *, prefix: str = "") -> Contents:
    """Read a table of another copy.

    Args:
        connection: To the process that has it.
        number: Of the table.
        own: What the share is like.
        prefix: What the names of the entries begin with.

    Raises:
        PeerLostError: The process says that it cannot.
        OSError: The connection is lost.
    """
    wire.send(connection, {"op": "read", "table": number, "prefix": prefix})
    said = wire.receive(connection)
    if "error" in said:
        raise PeerLostError(str(said["error"]))
    found = entries.receive(connection, said["entries"], rows=own.num_rows, row_bytes=own.row_bytes)
    return Contents(int(said["version"]), found, _stepper_of(said))


def said_of_stepper(stepper: Stepper | None) -> dict[str, Any]:
    """What a header says of it."""
    return {} if stepper is None else {"optimizer": stepper.name, "options": dict(stepper.options)}


def _said_of(contents: Contents) -> dict[str, Any]:
    return {"version": contents.version, **said_of_stepper(contents.stepper)}


def _stepper_of(asked: Mapping[str, Any]) -> Stepper | None:
    name = asked.get("optimizer")
    if name is None:
        return None
    return Stepper(str(name)[:_LONGEST_NAME], dict(asked["options"]))


def _check_ascending(rows: Rows, num_rows: int) -> None:
    """A sparse gradient is made of them without further checks."""
    places = rows.indices
    if places.numel() and (
        int(places[0]) < 0 or int(places[-1]) >= num_rows or not bool(torch.all(places[1:] > places[:-1]))
    ):
        raise ValueError(f"rows that are not ascending, or outside of {num_rows}")
