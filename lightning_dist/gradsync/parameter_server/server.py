"""The server of a rank: answers look-ups of its rows and takes gradients for them, from ranks that know the secret.

It lives in the rank's process, on the interface by which the other hosts reach this one, and has a thread for each rank
that is connected. Look-ups wait for nobody but the step that they ask for, so ranks may look up at any time and in any
number. Messages are JSON headers (:mod:`lightning_dist.wire`) followed by the bytes of rows.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import CollectiveError
from lightning_dist.gradsync.parameter_server.shard import Shard
from lightning_dist.gradsync.sparse.rows import Table, from_bytes

ROLES = wire.Roles(server=b"hierdist parameter server", client=b"hierdist parameter client")
_INT64_BYTES = 8


class RowServer:
    """Serves shards, one a table, until it is closed.

    Args:
        address: Of the interface.
        secret: What a rank must know.
        shards: By number of the table.
        tables: What each is a part of.
        timeout_s: Deadline for a stranger to prove that it is none, in seconds.
    """

    def __init__(
        self, address: str, *, secret: bytes, shards: Sequence[Shard], tables: Sequence[Table], timeout_s: float
    ) -> None:
        self._secret = secret
        self._shards = tuple(shards)
        self._tables = tuple(tables)
        self._timeout_s = timeout_s
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._closed = False
        self._lock = threading.Lock()
        self._start(self._accept, "hierdist-rows-accept")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self, timeout_s: float = 5.0) -> None:
        """End connections and threads. Safe to call twice."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, []
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # frees the thread in accept
        self._listener.close()
        for shard in self._shards:
            shard.end("it was closed")
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = []

    def _start(self, run: Any, name: str, *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.append(connection)
                self._start(self._serve, "hierdist-rows-serve", connection)

    def _serve(self, connection: socket.socket) -> None:
        """One rank, until it closes; what is wrong with it ends its connection, and it learns of that."""
        with connection, contextlib.suppress(OSError, CollectiveError, ValueError, KeyError, IndexError, TypeError):
            connection.settimeout(self._timeout_s)
            wire.prove(connection, self._secret, ROLES, is_server=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)  # who is connected may say nothing for hours
            while True:
                self._answer(connection, wire.receive(connection))

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        number, count = int(asked["table"]), int(asked["rows"])
        shard, table = self._shards[number], self._tables[number]
        if not 0 <= count <= table.num_rows:
            raise ValueError(f"{count} rows of a table that has {table.num_rows}")
        if asked["op"] == "pull":
            positions = receive_bytes(connection, count * _INT64_BYTES).view(torch.int64)
            try:
                rows = shard.look_up(positions, int(asked["version"]))
            except CollectiveError as error:
                wire.send(connection, {"error": str(error)})
                raise
            wire.send(connection, {"rows": count})
            send_bytes(connection, rows)
        elif asked["op"] == "push":
            encoded = receive_bytes(connection, count * (table.index_bytes + table.row_bytes))
            shard.push(int(asked["rank"]), from_bytes(encoded, table))
        else:
            raise ValueError(f"{asked['op']!r} is no operation")


def send_bytes(connection: socket.socket, tensor: Tensor) -> None:
    """The memory of a CPU tensor."""
    if tensor.numel():
        connection.sendall(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]  # numpy's stubs say less than it does


def receive_bytes(connection: socket.socket, size_bytes: int) -> Tensor:
    """[size_bytes] of uint8."""
    received = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes:
        wire.receive_into(connection, memoryview(received.numpy()))  # type: ignore[arg-type]  # as above
    return received
