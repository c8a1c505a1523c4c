"""What goes over a connection to a keeper: the messages of :mod:`lightning_dist.wire`, then bytes; and who is there.

A request is one JSON object, the answer another; ``{"error": ...}`` if it failed. The bytes of a file that is written
follow the request in parts, each with its length before it, up to an empty one (``write``), or at once (``fill``, whose
request says how many they are); or a rank of the same host has filled memory itself, and hands over its descriptor
(``put``). Those of a file that is read follow the answer, which says how many they are.

Over a Unix socket the kernel says whose process is at the other end. Over TCP both sides prove that they know the
keeper's secret, which is told over the Unix socket only. What follows is neither hidden nor signed, as between ranks;
checkpoints have checksums.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable, Iterator

from lightning_dist import wire
from lightning_dist.errors import StorageError

FORMAT = 2
"""1 knew neither ``fill`` nor ``put``."""
SECRET_BYTES = 32
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # process, user, group
PART_BYTES = 1 << 20
_HANDED = b"f"
_SMALL_BYTES = 64 << 10
_ROLES = wire.Roles(server=b"keeper", client=b"client")


class NoKeeperError(StorageError):
    """Nobody is there, or it is somebody else."""


def send_parts(connection: socket.socket, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
    """Send bytes of unknown number; small buffers go together, since each part costs both sides alike."""
    together = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
        if len(view) < _SMALL_BYTES:
            together += view
            if len(together) < PART_BYTES - _SMALL_BYTES:
                continue
            view = memoryview(b"")
        if together:
            _send_part(connection, together)
            together = bytearray()
        for start in range(0, len(view), PART_BYTES):
            _send_part(connection, view[start : start + PART_BYTES])
    if together:
        _send_part(connection, together)
    connection.sendall(_LENGTH.pack(0))


def _send_part(connection: socket.socket, part: bytearray | memoryview) -> None:
    connection.sendall(_LENGTH.pack(len(part)))
    connection.sendall(part)


def receive_parts(connection: socket.socket) -> Iterator[memoryview]:
    """The parts that :func:`send_parts` sends; each is overwritten by the next."""
    scratch = memoryview(bytearray(PART_BYTES))
    while size := _LENGTH.unpack(wire.receive_exactly(connection, _LENGTH.size))[0]:
        if size > PART_BYTES:
            raise ConnectionError(f"a part of {size} bytes was announced, at most {PART_BYTES} are allowed")
        part = scratch[:size]
        wire.receive_into(connection, part)
        yield part


def is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which nothing is awaited, or it is lost."""
    looking = select.poll()
    looking.register(connection, select.POLLIN)
    return bool(looking.poll(0))


def skip(connection: socket.socket, size_bytes: int) -> None:
    """Receive bytes that nobody wants."""
    scratch = memoryview(bytearray(min(PART_BYTES, size_bytes)))
    while size_bytes:
        count = min(size_bytes, len(scratch))
        wire.receive_into(connection, scratch[:count])
        size_bytes -= count


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """Over a Unix socket: let the other process have the same file open."""
    socket.send_fds(connection, [_HANDED], [descriptor])


def receive_descriptor(connection: socket.socket) -> int:
    """What :func:`send_descriptor` sends; the caller closes it.

    Raises:
        ConnectionError: Something else has come.
    """
    said, descriptors, _, _ = socket.recv_fds(connection, len(_HANDED), 1, socket.MSG_CMSG_CLOEXEC)
    if said != _HANDED or not descriptors:
        for each in descriptors:
            os.close(each)
        raise ConnectionError("a file was to be handed over, and none came")
    return descriptors[0]


def address_of(name: str) -> bytes:
    """The Unix address of a keeper: without a file, and alike only for processes that share a network namespace."""
    return f"\0{_prefix(os.getuid())}{name}".encode()


def names_in(sockets: str, user: int) -> list[str]:
    """The names of a user's keepers.

    Args:
        sockets: What ``/proc/net/unix`` says: a line for each socket, its address last.
        user: Whose.
    """
    start = f"@{_prefix(user)}"  # as the kernel prints the zero byte
    addresses = [words[-1] for line in sockets.splitlines() if (words := line.split())]
    return sorted({address.removeprefix(start) for address in addresses if address.startswith(start)})


def peer_user(connection: socket.socket) -> int:
    """Of the process at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(data)[1])


def prove(connection: socket.socket, secret: bytes, *, is_server: bool) -> None:
    """Both sides call it first, over TCP.

    Raises:
        NoKeeperError: The other side does not know the secret.
    """
    try:
        wire.prove(connection, secret, _ROLES, is_server=is_server)
    except wire.WrongSecretError as error:
        raise NoKeeperError("the other side does not know the keeper's secret") from error


def _prefix(user: int) -> str:
    return f"hierdist-keeper-{user}-"
