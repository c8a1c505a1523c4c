"""A connection whose two directions fail apart, and what its end says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from lightning_dist import wire
from lightning_dist.elastic.leading.channel import Channel, ClosedError, LostError, Pace, PartedError
from lightning_dist.elastic.leading.ending import end_tasks
from lightning_dist.elastic.leading.stream import EndOfStreamError, Stream

PACE = Pace(0.05, 0.25)
DEADLINE_S = 30.0


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
        right, _ = listener.accept()
    right.settimeout(DEADLINE_S)
    with left, right:
        yield left, right


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_what_the_other_side_said_last_is_heard_though_writing_has_failed() -> None:
    async def test() -> None:
        with connected() as (left, right):
            right.sendall(b"last words")
            right.close()
            stream = Stream(left)
            while stream._is_writing:  # the kernel resets what comes after the end
                stream.write(b"x")
                await asyncio.sleep(0.001)
            assert await stream.read_exactly(10) == b"last words"
            with pytest.raises(EndOfStreamError):
                await stream.read_exactly(1)
            await stream.close(1.0)
            await stream.close(1.0)

    run(test)


def test_what_is_sent_arrives_before_the_end_however_much_it_is() -> None:
    async def test() -> None:
        with connected() as (left, right):
            stream = Stream(left)
            stream.write(bytes(1 << 22))
            reading = asyncio.to_thread(read_all, right)
            _, count = await asyncio.gather(stream.close(DEADLINE_S), reading)
            assert count == 1 << 22

    run(test)


def test_what_cannot_be_sent_ends_in_a_reset_which_is_no_death() -> None:
    async def test() -> None:
        with connected() as (left, right):
            stream = Stream(left)
            stream.write(bytes(1 << 26))  # more than the kernel takes of one that does not read
            await stream.close(0.05)
            with pytest.raises(ConnectionResetError):
                read_all(right)

    run(test)


def test_who_is_cancelled_while_it_closes_closes_all_the_same() -> None:
    async def test() -> None:
        with connected() as (left, right):
            channel = Channel(Stream(left), Pace(DEADLINE_S, DEADLINE_S))
            channel._stream.write(bytes(1 << 26))  # more than the kernel takes of one that does not read
            closing = asyncio.ensure_future(channel.close("over"))
            for _ in range(20):
                await asyncio.sleep(0)
                closing.cancel()
            await end_tasks([closing])
            assert left.fileno() == -1
            with pytest.raises(ConnectionResetError):
                read_all(right)

    run(test)


def test_a_read_that_is_cancelled_loses_nothing() -> None:
    async def test() -> None:
        with connected() as (left, right):
            stream = Stream(left)
            right.sendall(b"ab")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.read_exactly(4), 0.05)
            right.sendall(b"cd")
            assert await stream.read_exactly(4) == b"abcd"
            await stream.close(1.0)

    run(test)


@pytest.mark.parametrize(
    ("sent", "closes", "error", "text"),
    [
        (b"", True, ClosedError, "its process is gone"),
        (wire.pack({"kind": "parting", "reason": "enough", "is_end": True}), True, PartedError, "enough"),
        (b"", False, LostError, "nothing was heard for 0.25 s"),
        (wire.pack({"kind": "ping"}), False, LostError, "nothing was heard for 0.25 s"),
        (b"\xff\xff\xff\xff", False, ConnectionError, "was announced"),
    ],
    ids=["dead", "parted", "silent", "silent after a ping", "noise"],
)
def test_why_a_connection_ends(sent: bytes, closes: bool, error: type[ConnectionError], text: str) -> None:
    async def test() -> None:
        with connected() as (left, right):
            channel = Channel(Stream(left), PACE)
            right.sendall(sent)
            if closes:
                right.shutdown(socket.SHUT_WR)
            with pytest.raises(error, match=text):
                await channel.receive()
            await channel.close("over")
            await channel.close("twice")

    run(test)


def test_two_that_ping_each_other_hear_each_other_for_longer_than_the_deadline() -> None:
    async def test() -> None:
        with connected() as (left, right):
            one, other = Channel(Stream(left), PACE), Channel(Stream(right), PACE)
            hearing = [asyncio.ensure_future(channel.receive()) for channel in (one, other)]
            done, _ = await asyncio.wait(hearing, timeout=3 * PACE.deadline_s)
            assert not done
            one.send({"kind": "told"})
            assert await hearing[1] == {"kind": "told"}
            await asyncio.gather(one.close("over"), other.close("over"))
            await asyncio.gather(*hearing, return_exceptions=True)

    run(test)


def read_all(connection: socket.socket) -> int:
    count = 0
    while data := connection.recv(1 << 16):
        count += len(data)
    return count
