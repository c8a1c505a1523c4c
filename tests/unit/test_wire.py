"""Framed messages and the proof of a secret, over a pair of sockets."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from lightning_dist import wire

ROLES = wire.Roles(server=b"server", client=b"client")
SECRET = b"a secret of some length"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        yield left, right


def test_what_is_sent_is_received(pair: tuple[socket.socket, socket.socket]) -> None:
    message = {"kind": "told", "text": "gr\u00fc\u00df", "numbers": [1, 2.5, None]}
    wire.send(pair[0], message)
    wire.send(pair[0], {})
    assert wire.receive(pair[1]) == message
    assert wire.receive(pair[1]) == {}


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (struct.pack("<I", wire.MAX_MESSAGE_BYTES + 1), "at most 1048576 are allowed"),
        (struct.pack("<I", 4) + b"\xff\xfe\x00\x01", "is no JSON"),
        (struct.pack("<I", 2) + b"[]", "no JSON object, but of list"),
        (struct.pack("<I", 100_000) + b"[" * 100_000, "is no JSON"),
        (struct.pack("<I", 10) + b"{}", "closed the connection"),
    ],
    ids=["too long", "bytes", "a list", "nested", "torn"],
)
def test_anything_else_is_refused(pair: tuple[socket.socket, socket.socket], sent: bytes, complaint: str) -> None:
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=complaint):
        wire.receive(pair[1])


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        wire.pack({"text": "x" * wire.MAX_MESSAGE_BYTES})


def test_both_sides_prove_the_same_secret(pair: tuple[socket.socket, socket.socket]) -> None:
    assert proved(pair, SECRET, SECRET) == []


@pytest.mark.parametrize(("server", "client"), [(SECRET, b"another one of some length"), (b"", SECRET)])
def test_neither_side_takes_another_secret(
    pair: tuple[socket.socket, socket.socket], server: bytes, client: bytes
) -> None:
    found = proved(pair, server, client)
    assert any(isinstance(error, wire.WrongSecretError) for error in found)
    assert len(found) == 2


def test_an_answer_cannot_be_sent_back_as_ones_own() -> None:
    server = wire.Proof(SECRET, ROLES, is_server=True)
    reflected = wire.Proof(SECRET, ROLES, is_server=True, nonce=server.nonce)
    with pytest.raises(wire.WrongSecretError):
        server.check(server.nonce, reflected.answer(server.nonce))
    with pytest.raises(wire.WrongSecretError):
        server.check(server.nonce, wire.DENIAL)


def test_a_secret_is_not_printed() -> None:
    assert "secret" not in repr(wire.Proof(b"secret", ROLES, is_server=True)).replace("secret=", "")


def proved(pair: tuple[socket.socket, socket.socket], server: bytes, client: bytes) -> list[Exception]:
    """What each side complains of."""
    found: list[Exception] = []

    def prove(connection: socket.socket, secret: bytes, *, is_server: bool) -> None:
        try:
            wire.prove(connection, secret, ROLES, is_server=is_server)
        except ConnectionError as error:
            found.append(error)
            connection.close()

    thread = threading.Thread(target=prove, args=(pair[0], server), kwargs={"is_server": True})
    thread.start()
    prove(pair[1], client, is_server=False)
    thread.join()
    return found
