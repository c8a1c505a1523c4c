"""A server of rows among strangers: what they send, hold open or repeat does no harm to who knows the secret."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_dist import wire
from lightning_dist.gradsync.parameter_server import server as servers
from lightning_dist.gradsync.parameter_server.server import ROLES, RowServer, listening

SECRET = b"s" * 32
DEADLINE_S = 10.0


def echo(connection: socket.socket, asked: dict[str, Any]) -> None:
    wire.send(connection, {"asked": asked["what"]})


@contextlib.contextmanager
def serving(hello_s: float = DEADLINE_S) -> Iterator[RowServer]:
    server = RowServer(listening("127.0.0.1"), secret=SECRET, answers=lambda: echo, hello_s=hello_s)
    try:
        yield server
    finally:
        server.close()


def connected(server: RowServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)


def check_served(server: RowServer) -> None:
    with connected(server) as connection:
        wire.prove(connection, SECRET, ROLES, is_server=False)
        wire.send(connection, {"what": "rows"})
        assert wire.receive(connection) == {"asked": "rows"}


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side lets go, within the connection's timeout; what it may send before is thrown away."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 8, b"\x00" * 64, b"\xff" * 4096], ids=["web", "0", "ff"])
def test_garbage_ends_its_connection_and_no_other(sent: bytes) -> None:
    with serving() as server, connected(server) as stranger:
        stranger.sendall(sent)
        assert is_ended(stranger)
        check_served(server)


def test_an_answer_that_was_right_once_is_wrong_the_next_time() -> None:
    with serving() as server:
        proof = wire.Proof(SECRET, ROLES, is_server=False)
        with connected(server) as first:
            first.sendall(proof.nonce)
            recorded = proof.answer(wire.receive_exactly(first, wire.NONCE_BYTES))
            first.sendall(recorded)
            assert wire.receive_exactly(first, wire.ANSWER_BYTES)
        with connected(server) as again:
            again.sendall(proof.nonce + recorded)
            wire.receive_exactly(again, wire.NONCE_BYTES)
            assert again.recv(1) == b"", "no answer of the server's"
        check_served(server)


def test_the_servers_own_words_are_no_answer() -> None:
    """Who knows nothing sends back what the server says, over a second connection, to have it answer itself."""
    with serving() as server, connected(server) as one, connected(server) as two:
        nonce = wire.receive_exactly(one, wire.NONCE_BYTES)
        two.sendall(nonce)
        one.sendall(wire.receive_exactly(two, wire.NONCE_BYTES) + bytes(wire.ANSWER_BYTES))
        assert is_ended(one)
        two.sendall(bytes(wire.ANSWER_BYTES))
        assert is_ended(two)


def test_a_message_of_any_size_is_refused_before_memory_is_taken() -> None:
    with serving() as server, connected(server) as rank:
        wire.prove(rank, SECRET, ROLES, is_server=False)
        rank.sendall(struct.pack("<I", (1 << 32) - 1))
        assert is_ended(rank)
        check_served(server)


def test_what_is_no_json_object_ends_its_connection() -> None:
    with serving() as server:
        for data in (b"[1, 2]", b"{", b"\x80\x04K\x01.", b'{"op": "nothing"}', b"[" * 100_000):
            with connected(server) as rank:
                wire.prove(rank, SECRET, ROLES, is_server=False)
                rank.sendall(struct.pack("<I", len(data)) + data)
                assert is_ended(rank)
        check_served(server)


def test_a_half_open_connection_is_let_go_however_slowly_it_sends() -> None:
    with serving(hello_s=0.2) as server, connected(server) as silent, connected(server) as slow:
        slow.sendall(b"x")
        assert is_ended(slow)
        assert is_ended(silent)
        check_served(server)


def test_the_deadline_is_for_all_that_a_stranger_sends() -> None:
    """Each piece comes in time, and the whole does not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(DEADLINE_S)
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    theirs.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                wire.prove(ours, SECRET, ROLES, is_server=True, within_s=0.3)
        finally:
            ended.set()
            thread.join()


def test_a_port_scan_leaves_nothing_and_the_oldest_stranger_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_STRANGERS", 4)
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(50):
            connected(server).close()
        waiting = [stack.enter_context(connected(server)) for _ in range(5)]
        assert is_ended(waiting[0])
        check_served(server)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hierdist-rows")]


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])  # refused
def test_nobody_listens_on_all_interfaces(address: str) -> None:
    with pytest.raises(ValueError, match="all interfaces"):
        listening(address)
