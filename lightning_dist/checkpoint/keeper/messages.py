"""What goes over a connection to a keeper: JSON with its length before it, then bytes; and who is there.

A request is one JSON object, the answer another; ``{"error": ...}`` if it failed. The bytes of a file that is written
follow the request in parts, each with its length before it, up to an empty one; those of a file that is read follow the
answer, which says how many they are.

Over a Unix socket the kernel says whose process is at the other end. Over TCP both sides prove that they know the
keeper's secret: each sends a random number, and answers the other's with a keyed hash of both. The secret itself is
told over the Unix socket only. What follows is neither hidden nor signed, as between ranks; checkpoints have checksums.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_dist.errors import StorageError

FORMAT = 1
SECRET_BYTES = 32
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # process, user, group
_MAX_HEADER_BYTES = 1 << 20
PART_BYTES = 1 << 20


class NoKeeperError(StorageError):
    """Nobody is there, or it is somebody else."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a JSON object."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive a JSON object.

    Raises:
        ConnectionError: The other side closed the connection, or sent something else.
    """
    size = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))[0]
    if size > _MAX_HEADER_BYTES:
        raise ConnectionError(f"a message of {size} bytes was announced, at most {_MAX_HEADER_BYTES} are allowed")
    try:
        message = json.loads(receive_exactly(connection, size))
    except ValueError as error:
        raise ConnectionError(f"what was sent is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError(f"what was sent is no JSON object, but of {type(message).__name__}")
    return message


def send_parts(connection: socket.socket, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
    """Send bytes of unknown number."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            connection.sendall(_LENGTH.pack(len(part)))
            connection.sendall(part)
    connection.sendall(_LENGTH.pack(0))


def receive_parts(connection: socket.socket) -> Iterator[memoryview]:
    """The parts that :func:`send_parts` sends; each is overwritten by the next."""
    scratch = memoryview(bytearray(PART_BYTES))
    while size := _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))[0]:
        if size > PART_BYTES:
            raise ConnectionError(f"a part of {size} bytes was announced, at most {PART_BYTES} are allowed")
        part = scratch[:size]
        receive_into(connection, part)
        yield part


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``."""
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        done += count


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return bytes(data)


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
    mine = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(mine)
    theirs = receive_exactly(connection, SECRET_BYTES)
    nonces = theirs + mine if is_server else mine + theirs  # the client's first
    roles = (b"keeper", b"client") if is_server else (b"client", b"keeper")
    own, expected = (hmac.new(secret, role + nonces, hashlib.sha256).digest() for role in roles)
    if is_server:  # who calls shows first that it may
        _expect(connection, expected)
        connection.sendall(own)
    else:
        connection.sendall(own)
        _expect(connection, expected)


def _prefix(user: int) -> str:
    return f"hierdist-keeper-{user}-"


def _expect(connection: socket.socket, expected: bytes) -> None:
    if not hmac.compare_digest(receive_exactly(connection, len(expected)), expected):
        raise NoKeeperError("the other side does not know the keeper's secret")
