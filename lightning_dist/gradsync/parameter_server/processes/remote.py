"""A rank's shard whose rows are in a server process: steps and whole tables go there, and to its copy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dist import wire
from lightning_dist.errors import CollectiveError, PeerLostError
from lightning_dist.gradsync.parameter_server.client import Address, connected
from lightning_dist.gradsync.parameter_server.processes import entries as in_messages
from lightning_dist.gradsync.parameter_server.processes.answers import fetched, said_of_stepper
from lightning_dist.gradsync.parameter_server.processes.kept import STATE, VALUES, Stepper
from lightning_dist.gradsync.parameter_server.server import receive_bytes, send_bytes
from lightning_dist.gradsync.parameter_server.shard import Alarm, Shard
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_bytes

Operation = Callable[[str], contextlib.AbstractContextManager[None]]
_T = TypeVar("_T")
_AGAIN_S = 0.05


class Line:
    """A connection to a server process that may be started again: then what was asked last is asked once more.

    The process listens where it did, so that who connects waits there until it serves again. Where it does not come
    back its socket is closed, and connecting fails at once.

    Args:
        name: Of the process, for people.
        address: Where it listens.
        secret: What it wants to be proved.
        timeout_s: Deadline of each request, in seconds, with all its repetitions.
        alarm: Given the seconds waited, says why to give up, or ``None``.
    """

    def __init__(self, name: str, address: Address, *, secret: bytes, timeout_s: float, alarm: Alarm) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._connection: socket.socket | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def ask(self, request: Callable[[socket.socket], _T]) -> _T:
        """Make a request, from its first byte to the last of its answer; again on a new connection if that breaks.

        Raises:
            PeerLostError: The process is gone for good, or says that it cannot.
        """
        start_s = time.monotonic()
        deadline_s = start_s + self._timeout_s
        with self._lock:
            while True:
                if self._closed.is_set():
                    raise PeerLostError(f"the connection to {self._name} was closed")
                try:
                    if self._connection is None:
                        left_s = max(deadline_s - time.monotonic(), _AGAIN_S)
                        self._connection = connected(self._address, self._secret, left_s)
                        self._connection.settimeout(self._timeout_s)
                    return request(self._connection)
                except ConnectionRefusedError as error:
                    raise PeerLostError(f"{self._name} is gone") from error
                except wire.WrongSecretError as error:
                    raise PeerLostError(f"{self._name} and this rank do not have the same secret") from error
                except OSError as error:
                    self._drop()
                    waited_s = time.monotonic() - start_s
                    if waited_s >= self._timeout_s:
                        raise PeerLostError(f"{self._name} did not answer in {self._timeout_s:g} s: {error}") from error
                    if (alarm := self._alarm(waited_s)) is not None:
                        raise PeerLostError(f"{self._name} does not answer: {alarm}") from error
                    self._closed.wait(_AGAIN_S)
                except CollectiveError:
                    self._drop()
                    raise

    def close(self) -> None:
        """Safe to call twice; who waits for an answer is freed."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class RemoteShard(Shard):
    """Rows of a table in a server process, and in a second one where there are copies; its owner steps them there.

    Gradients meet here, as in any :class:`Shard`; a step is over once each process that has the rows says that it has
    made it. So whichever of them is lost, the other has all steps.

    Args:
        values: [k, ...], of this rank, until they are there.
        table: What they are a part of.
        number: Of the table.
        num_ranks: That push.
        timeout_s: Deadline of each wait, in seconds.
        alarm: Given the seconds waited, says why to give up, or ``None``.
        operation: Opens the seam around what waits for a process, given its name.
    """

    def __init__(
        self,
        values: Tensor,
        *,
        table: Table,
        number: int,
        num_ranks: int,
        timeout_s: float,
        alarm: Alarm,
        operation: Operation = lambda name: contextlib.nullcontext(),
    ) -> None:
        super().__init__(values, num_ranks=num_ranks, timeout_s=timeout_s, alarm=alarm)
        self._table = table
        self._number = number
        self._operation = operation
        self._lines: Sequence[Line] = ()
        self._told = 0

    @property
    def own(self) -> Table:
        """What this rank's rows are like."""
        return Table((len(self.values), *self._table.row_shape), self._table.dtype)

    def open(self, lines: Sequence[Line]) -> None:
        """Send the values there; here they are forgotten.

        Args:
            lines: To the processes that have the rows, first the one that is asked.
        """
        self._lines = lines
        self.write({VALUES: self.values}, None)
        self.values = without_memory(self.values)

    def publish(self, version: int) -> None:
        """See :meth:`Shard.publish`; what was not stepped stays as it is."""
        super().publish(version)
        if self._lines and version > self._told:
            self._send({"op": "step", "table": self._number, "version": version})
            self._told = version

    def step(self, version: int, gradient: Rows, stepper: Stepper) -> None:
        """Have the step made that leads to a version."""
        asked = {"op": "step", "table": self._number, "version": version, "rows": gradient.count}
        self._send({**asked, **said_of_stepper(stepper)}, to_bytes(gradient, self._table))
        self._told = max(self._told, version)
        super().publish(version)

    def look_up(self, positions: Tensor, version: int | None) -> Tensor:
        """See :meth:`Shard.look_up`."""
        count = positions.numel()

        def request(connection: socket.socket) -> Tensor:
            wire.send(connection, {"op": "pull", "parts": [[self._number, count]], "version": version})
            send_bytes(connection, positions.to(self._table.index_dtype))
            _checked(wire.receive(connection))
            received = receive_bytes(connection, count * self._table.row_bytes)
            return received.view(self._table.dtype).view(count, *self._table.row_shape)

        return self._lines[0].ask(request)

    def prepare(self, stepper: Stepper) -> None:
        """Have an optimizer there from the beginning, whose state may not be empty then."""
        self._send({"op": "prepare", "table": self._number, **said_of_stepper(stepper)})

    @property
    def is_elsewhere(self) -> bool:
        """See :attr:`Shard.is_elsewhere`."""
        return bool(self._lines)

    def read(self) -> Tensor:
        """See :meth:`Shard.read`."""
        values = self._fetch(VALUES)[VALUES]
        assert isinstance(values, Tensor), "rows are a tensor"
        return values

    def read_state(self) -> dict[str, Any]:
        """What the optimizer keeps for the rows, by name."""
        return {name.removeprefix(STATE): value for name, value in self._fetch(STATE).items()}

    def write(self, entries: Mapping[str, Any], stepper: Stepper | None) -> None:
        """Put entries in the place of those that are there."""
        asked = {"op": "write", "table": self._number, "entries": in_messages.described(entries)}
        header = {**asked, **said_of_stepper(stepper)}

        def request(connection: socket.socket) -> None:
            wire.send(connection, header)
            in_messages.send(connection, entries)
            _checked(wire.receive(connection))

        with self._operation("sending rows to their server"):
            self._ask_all(request)

    def write_values(self, values: Tensor) -> None:
        """Have rows of these values."""
        self.write({VALUES: values.detach()}, None)

    def write_state(self, state: Mapping[str, Any], stepper: Stepper) -> None:
        """Have the optimizer go on from a state."""
        self.write({STATE + name: value for name, value in state.items()}, stepper)

    def end(self, reason: str) -> None:
        """Nobody waits here any more."""
        super().end(reason)
        for line in self._lines:
            line.close()

    def _fetch(self, prefix: str) -> Mapping[str, Any]:
        with self._operation("reading rows from their server"):
            found = self._lines[0].ask(lambda connection: fetched(connection, self._number, self.own, prefix=prefix))
        return found.entries

    def _send(self, header: Mapping[str, Any], data: Tensor | None = None) -> None:
        """To all that have the rows; each says when it is done."""

        def say(connection: socket.socket) -> None:
            wire.send(connection, header)
            if data is not None:
                send_bytes(connection, data)
            _checked(wire.receive(connection))

        with self._operation("step of rows"):
            self._ask_all(say)

    def _ask_all(self, request: Callable[[socket.socket], None]) -> None:
        """At the same time, of all that have the rows."""
        failures: list[Exception] = []

        def ask(line: Line) -> None:
            try:
                line.ask(request)
            except Exception as error:  # raised below, in the thread that waits
                failures.append(error)

        others = [threading.Thread(target=ask, args=(line,), name="hierdist-rows-copy") for line in self._lines[1:]]
        for thread in others:
            thread.start()
        ask(self._lines[0])
        for thread in others:
            thread.join()
        if failures:
            raise failures[0]


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type that holds one value only, which is no number."""
    value = torch.nan if tensor.is_floating_point() else 0
    return tensor.new_full((1,) * tensor.ndim, value).expand(tensor.shape)


def _checked(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        raise PeerLostError(f"a parameter server says: {answer['error']}")
