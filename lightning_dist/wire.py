"""What our processes say to each other: JSON with its length before it, and the proof that both know a secret.

The building blocks (:func:`pack`, :func:`size_of`, :func:`unpack`, :class:`Proof`) are values in, values out, for any
kind of connection; the functions below them use them on a blocking socket, whose timeout is the caller's business.

Both sides prove that they know a secret without sending it: each sends a random number, and answers the other's with a
keyed hash of both numbers and of its own role, so that no answer can be sent back as one's own. What follows is neither
hidden nor signed, as between ranks: it keeps strangers out, not who can change packets on the network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.errors import HierDistError

HEADER_BYTES = 4
NONCE_BYTES = 32
ANSWER_BYTES = 32
DENIAL = bytes(ANSWER_BYTES)
MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class WrongSecretError(HierDistError, ConnectionError):
    """The other side does not know the secret."""


@dataclass(frozen=True)
class Roles:
    """Who speaks to whom; part of what is proved, so that an answer serves in one place only."""

    server: bytes
    client: bytes


@dataclass(frozen=True)
class Proof:
    """One side's part in the proof of a secret.

    Who was called waits for the caller's answer before it gives its own: who knows nothing learns nothing.
    :data:`DENIAL` in place of an answer says that the caller's was wrong.
    """

    secret: bytes = field(repr=False)
    roles: Roles
    is_server: bool
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def answer(self, theirs: bytes) -> bytes:
        """What this side sends once it has the other's number."""
        return self._hash(self.roles.server if self.is_server else self.roles.client, theirs)

    def check(self, theirs: bytes, answer: bytes) -> None:
        """Judge the other side's answer.

        Raises:
            WrongSecretError: It is not the right one.
        """
        expected = self._hash(self.roles.client if self.is_server else self.roles.server, theirs)
        if not hmac.compare_digest(answer, expected):
            raise WrongSecretError("the other side does not know the secret")

    def _hash(self, role: bytes, theirs: bytes) -> bytes:
        nonces = theirs + self.nonce if self.is_server else self.nonce + theirs  # the client's first
        return hmac.new(self.secret, role + nonces, hashlib.sha256).digest()


def pack(message: Mapping[str, Any]) -> bytes:
    """A JSON object with its length before it.

    Raises:
        ValueError: It is larger than :data:`MAX_MESSAGE_BYTES`.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    return _LENGTH.pack(len(data)) + data


def size_of(header: bytes, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Bytes that follow a header.

    Raises:
        ConnectionError: More than are allowed.
    """
    size = int(_LENGTH.unpack(header)[0])
    if size > limit_bytes:
        raise ConnectionError(f"a message of {size} bytes was announced, at most {limit_bytes} are allowed")
    return size


def unpack(data: bytes) -> dict[str, Any]:
    """The JSON object in a message, without its header.

    Raises:
        ConnectionError: It is something else.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"what was sent is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError(f"what was sent is no JSON object, but of {type(message).__name__}")
    return message


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a JSON object."""
    connection.sendall(pack(message))


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive a JSON object.

    Raises:
        ConnectionError: The other side closed the connection, or sent something else.
    """
    return unpack(receive_exactly(connection, size_of(receive_exactly(connection, HEADER_BYTES))))


def receive_into(connection: socket.socket, target: memoryview, *, by_s: float | None = None) -> None:
    """Fill ``target``.

    Args:
        connection: Its timeout is for each piece that arrives.
        target: As many bytes as are awaited.
        by_s: The moment by which all is to be there, by ``time.monotonic``; the timeout is what is left then.

    Raises:
        TimeoutError: It did not come in time.
        ConnectionError: The other side closed the connection.
    """
    done = 0
    while done < len(target):
        if by_s is not None:
            left_s = by_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other side is too slow")
            connection.settimeout(left_s)
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        done += count


def receive_exactly(connection: socket.socket, size: int, *, by_s: float | None = None) -> bytes:
    """So many bytes; ``by_s`` as for :func:`receive_into`."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), by_s=by_s)
    return bytes(data)


def prove(
    connection: socket.socket, secret: bytes, roles: Roles, *, is_server: bool, within_s: float | None = None
) -> None:
    """Prove the secret to each other; both sides call it first.

    Args:
        connection: Whose timeout holds for each piece that arrives.
        secret: What is proved.
        roles: Who speaks to whom.
        is_server: Whether this side was called.
        within_s: Deadline of it all, in seconds, however slowly the other side sends; the timeout is changed then.

    Raises:
        WrongSecretError: The other side does not know it.
        TimeoutError: It took too long.
    """
    by_s = None if within_s is None else time.monotonic() + within_s
    proof = Proof(secret, roles, is_server)
    connection.sendall(proof.nonce)
    theirs = receive_exactly(connection, NONCE_BYTES, by_s=by_s)
    if not is_server:
        connection.sendall(proof.answer(theirs))
    proof.check(theirs, receive_exactly(connection, ANSWER_BYTES, by_s=by_s))
    if is_server:
        connection.sendall(proof.answer(theirs))
