"""A connection whose two sides have proved that they know the secret, and that tell each other that they live.

Note: what the end of a connection says. The kernel ends the connections of a process that dies, so an end without a
word means a dead process (:class:`ClosedError`). Who ends a connection on purpose says so first (:class:`PartedError`),
and resets it where that cannot be said. A reset therefore says nothing of the other process, nor does silence: it may
be stopped, cut off or dead (:class:`LostError`). Silence is counted in intervals rather than read from the clock, so
that a pause of one's own, in which nothing could be heard, counts as one interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist import wire
from lightning_dist.elastic.leading.endpoints import Endpoint

ROLES = wire.Roles(server=b"elastic leader", client=b"elastic member")
_UNSENT_BYTES = 16 << 20  # of one that does not read what it is sent


@dataclass(frozen=True)
class Pace:
    """How often one says that one lives, and how long another may be silent.

    Attributes:
        ping_s: Between two signs of life, in seconds.
        deadline_s: Silence for so long is a loss, in seconds; a multiple of ``ping_s``.
    """

    ping_s: float = 1.0
    deadline_s: float = 5.0

    @property
    def intervals(self) -> int:
        """So many in a row without a word are a loss."""
        return max(1, round(self.deadline_s / self.ping_s))


class ClosedError(ConnectionError):
    """The other process is gone."""


class PartedError(ConnectionError):
    """The other side has ended the connection on purpose.

    Attributes:
        is_end: Its part in the run is over: it has no ranks, and leads no more.
    """

    def __init__(self, reason: str, *, is_end: bool) -> None:
        super().__init__(reason)
        self.is_end = is_end


class LostError(ConnectionError):
    """Nothing was heard within the deadline, or the network ended the connection; the other process may live.

    Attributes:
        is_reset: The other host answered that it knows of no such connection.
        silent_s: How long nothing was heard, in seconds; 0: it did not come to that.
    """

    def __init__(self, reason: str, *, is_reset: bool = False, silent_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_reset = is_reset
        self.silent_s = silent_s


class Channel:
    """See the module; made by :func:`dial` and :func:`answer`. All calls are made in the loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
        self._reader = reader
        self._writer = writer
        self._pace = pace
        self._next: asyncio.Task[dict[str, Any]] | None = None
        self._pings = asyncio.ensure_future(self._ping())

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a message on its way; what cannot be sent any more is dropped, as the next receipt says why."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _UNSENT_BYTES:
            _reset(self._writer)
            return
        self._writer.write(wire.pack(message))

    async def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            ClosedError: The other process is gone.
            PartedError: It has ended the connection.
            LostError: Nothing was heard within the deadline, or the network ended the connection.
            ConnectionError: What was sent is no message.
        """
        silent = 0
        while silent < self._pace.intervals:
            if self._next is None:
                self._next = asyncio.ensure_future(self._read())
            done, _ = await asyncio.wait({self._next}, timeout=self._pace.ping_s)
            if not done:
                silent += 1
                continue
            task, self._next, silent = self._next, None, 0
            message = task.result()
            if message.get("kind") == "parting":
                raise PartedError(str(message.get("reason")), is_end=message.get("is_end") is True)
            if message.get("kind") != "ping":
                return message
        silent_s = self._pace.deadline_s
        raise LostError(f"nothing was heard for {silent_s:g} s", silent_s=silent_s)

    async def close(self, reason: str, *, is_end: bool = False) -> None:
        """End the connection and say why; what was sent before arrives first, if the other side reads. Safe twice.

        Args:
            reason: For people.
            is_end: This process has no part in the run any more.
        """
        self.send({"kind": "parting", "reason": reason, "is_end": is_end})
        tasks = [task for task in (self._pings, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._next = None
        await _hang_up(self._writer, self._pace.ping_s)

    async def _read(self) -> dict[str, Any]:
        try:
            header = await self._reader.readexactly(wire.HEADER_BYTES)
            return wire.unpack(await self._reader.readexactly(wire.size_of(header)))
        except asyncio.IncompleteReadError as error:
            raise ClosedError("its process is gone") from error
        except OSError as error:
            if error.errno is None:  # our own: it sent something else
                raise
            is_reset = isinstance(error, ConnectionResetError)
            raise LostError(f"the network ended the connection: {error.strerror}", is_reset=is_reset) from error

    async def _ping(self) -> None:
        while not self._writer.is_closing():
            self.send({"kind": "ping"})
            await asyncio.sleep(self._pace.ping_s)


async def dial(endpoint: Endpoint, secret: bytes, pace: Pace, *, timeout_s: float) -> Channel:
    """Call an endpoint.

    Raises:
        OSError: Nobody answers.
        WrongSecretError: Somebody who does not know the secret does.
    """
    try:
        return await asyncio.wait_for(_dial(endpoint, secret, pace), timeout_s)
    except asyncio.TimeoutError as error:  # which is an OSError from Python 3.11 on only
        raise TimeoutError(f"no answer within {timeout_s:g} s") from error


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, pace: Pace, *, timeout_s: float
) -> Channel:
    """Take a call.

    Raises:
        OSError: The caller does not know the secret, says something else, or nothing in time.
    """
    try:
        await asyncio.wait_for(_prove(reader, writer, secret, is_server=True), timeout_s)
    except BaseException as error:
        await _hang_up(writer, timeout_s)
        if isinstance(error, asyncio.TimeoutError):
            raise TimeoutError(f"the caller said nothing for {timeout_s:g} s") from error
        raise
    return Channel(reader, writer, pace)


async def _dial(endpoint: Endpoint, secret: bytes, pace: Pace) -> Channel:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        await _prove(reader, writer, secret, is_server=False)
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(reader, writer, pace)


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_server: bool) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    proof = wire.Proof(secret, ROLES, is_server)
    try:
        writer.write(proof.nonce)
        theirs = await reader.readexactly(wire.NONCE_BYTES)
        if not is_server:
            writer.write(proof.answer(theirs))
        try:
            proof.check(theirs, await reader.readexactly(wire.ANSWER_BYTES))
        except wire.WrongSecretError:
            if is_server:
                writer.write(wire.DENIAL)
            raise
        if is_server:
            writer.write(proof.answer(theirs))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the other side hung up") from error


async def _hang_up(writer: asyncio.StreamWriter, timeout_s: float) -> None:
    """Close once all is sent, or reset."""
    try:
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), timeout_s)
    except (OSError, asyncio.TimeoutError):
        _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Not to be taken for a death; see the Note."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
