"""A connection whose two sides have proved that they know the secret, and that tell each other that they live.

Note: what the end of a connection says. The kernel ends the connections of a process that dies, so an end without a
word means a dead process (:class:`ClosedError`). Who ends a connection on purpose says so first (:class:`PartedError`),
and resets it where that cannot be said. A reset therefore says nothing of the other process, nor does silence: it may
be stopped, cut off or dead (:class:`LostError`). Silence is counted in intervals rather than read from the clock, so
that a pause of one's own, in which nothing could be heard, counts as one interval.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist import wire
from lightning_dist.elastic.leading.endpoints import Endpoint
from lightning_dist.elastic.leading.stream import EndOfStreamError, Stream, connect

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

    def __init__(self, stream: Stream, pace: Pace) -> None:
        self._stream = stream
        self._pace = pace
        self._next: asyncio.Task[dict[str, Any]] | None = None
        self._pings = asyncio.ensure_future(self._ping())

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a message on its way; what cannot be sent any more is dropped, as the next receipt says why."""
        if self._stream.unsent_bytes > _UNSENT_BYTES:
            self._stream.give_up()
        self._stream.write(wire.pack(message))

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
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._next = None
            await self._stream.close(self._pace.ping_s)

    async def _read(self) -> dict[str, Any]:
        try:
            header = await self._stream.read_exactly(wire.HEADER_BYTES)
            return wire.unpack(await self._stream.read_exactly(wire.size_of(header)))
        except EndOfStreamError as error:
            raise ClosedError("its process is gone") from error
        except OSError as error:
            if error.errno is None:  # our own: it sent something else
                raise
            is_reset = isinstance(error, ConnectionResetError | BrokenPipeError)
            raise LostError(f"the network ended the connection: {error.strerror}", is_reset=is_reset) from error

    async def _ping(self) -> None:
        while True:
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


async def answer(connection: socket.socket, secret: bytes, pace: Pace, *, timeout_s: float) -> Channel:
    """Take a call.

    Raises:
        OSError: The caller does not know the secret, says something else, or nothing in time.
    """
    stream = Stream(connection)
    try:
        await asyncio.wait_for(_prove(stream, secret, is_server=True), timeout_s)
    except asyncio.TimeoutError as error:
        await stream.close(pace.ping_s)
        raise TimeoutError(f"the caller said nothing for {timeout_s:g} s") from error
    except BaseException:
        await stream.close(pace.ping_s)
        raise
    return Channel(stream, pace)


async def _dial(endpoint: Endpoint, secret: bytes, pace: Pace) -> Channel:
    stream = await connect(endpoint)
    try:
        await _prove(stream, secret, is_server=False)
    except BaseException:
        await stream.close(pace.ping_s)
        raise
    return Channel(stream, pace)


async def _prove(stream: Stream, secret: bytes, *, is_server: bool) -> None:
    proof = wire.Proof(secret, ROLES, is_server)
    stream.write(proof.nonce)
    theirs = await stream.read_exactly(wire.NONCE_BYTES)
    if not is_server:
        stream.write(proof.answer(theirs))
    try:
        proof.check(theirs, await stream.read_exactly(wire.ANSWER_BYTES))
    except wire.WrongSecretError:
        if is_server:
            stream.write(wire.DENIAL)
        raise
    if is_server:
        stream.write(proof.answer(theirs))
