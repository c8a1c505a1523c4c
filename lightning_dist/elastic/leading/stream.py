"""A socket in an event loop, whose two directions fail apart.

Note: why not asyncio's streams. When their writing fails, since the other process has ended, they forget what it had
sent before, its last words and the end of the connection among them; and those tell a death from a loss. Here writing
that fails is over, and reading goes on to what the kernel has of the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from lightning_dist.elastic.leading.endpoints import Endpoint

_CHUNK_BYTES = 1 << 16


class EndOfStreamError(ConnectionError):
    """The other side has ended the connection."""


class Stream:
    """See the module. All calls are made in the loop's thread.

    Args:
        connection: Connected; it is closed by :meth:`close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self._has_unsent = asyncio.Event()
        self._is_writing = True
        self._writing: asyncio.Task[None] = asyncio.ensure_future(self._write())

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent."""
        return len(self._unsent)

    def write(self, data: bytes) -> None:
        """Send it as soon as the other side takes it; dropped once writing has failed."""
        if self._is_writing:
            self._unsent += data
            self._has_unsent.set()

    def give_up(self) -> None:
        """Write no more, and drop what waits: the other side does not read."""
        self._is_writing = False
        self._writing.cancel()

    async def read_exactly(self, size: int) -> bytes:
        """So many bytes; what was received stays for the next call, if this one is cancelled.

        Raises:
            EndOfStreamError: The other side has ended the connection.
            OSError: The network has.
        """
        while len(self._received) < size:
            data = await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK_BYTES)
            if not data:
                raise EndOfStreamError("the other side hung up")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    async def close(self, timeout_s: float) -> None:
        """Close once all is sent; nobody reads any more. Safe twice.

        What cannot be sent within so many seconds is not taken for a death by the other side, either: it gets a reset,
        not an end.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        try:
            while self._unsent and self._is_writing and loop.time() < end_s:
                await asyncio.sleep(timeout_s / 100)
        finally:  # whoever closes may be cancelled meanwhile, and again: the socket is closed all the same
            is_sent = not self._unsent and self._is_writing
            self.give_up()
            try:
                await asyncio.gather(self._writing, return_exceptions=True)
            finally:
                self._close_socket(is_sent=is_sent)

    def _close_socket(self, *, is_sent: bool) -> None:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_writer(descriptor)  # the number may be another's next
        loop.remove_reader(descriptor)
        with contextlib.suppress(OSError):
            if is_sent:
                self._socket.shutdown(socket.SHUT_WR)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent.clear()
                while self._unsent:
                    chunk = bytes(self._unsent[:_CHUNK_BYTES])
                    await loop.sock_sendall(self._socket, chunk)
                    del self._unsent[: len(chunk)]
        except OSError:  # the next reading says why
            self._is_writing = False


async def connect(endpoint: Endpoint) -> Stream:
    """Call an endpoint.

    Raises:
        OSError: Nobody answers there.
    """
    error: OSError | None = None
    for family, address in await _resolve(endpoint):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
        except OSError as failure:
            error = failure
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return Stream(connection)
    raise error or OSError(f"{endpoint} has no address")


async def _resolve(endpoint: Endpoint) -> list[tuple[int, tuple[str, int]]]:
    try:  # an address takes no thread
        flags = socket.AI_NUMERICHOST
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return [(info[0], (str(info[4][0]), int(info[4][1]))) for info in found]
