"""Bytes handed round a host; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.host_relay import SLOTS, MemoryRelay, exchanged, relayed, window_bytes
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.errors import CollectiveError
from lightning_dist.events import EventStream
from tests.unit.comm.test_shared_memory import opened

SLOT_BYTES = 64
_T = TypeVar("_T")


def relay_of(memory: HostMemory, slot_bytes: int = SLOT_BYTES) -> MemoryRelay:
    hosts = ["a"] * memory.size
    collectives = Collectives(
        events=EventStream(rank=memory.index), timeout_s=10.0, rank=memory.index, host_of_rank=hosts
    )
    group = RankGroup(tuple(range(memory.size)), memory.index, None, "reading", "host")
    return MemoryRelay(memory, slot_bytes=slot_bytes, collectives=collectives, group=group)


@contextmanager
def relays(size: int, slot_bytes: int = SLOT_BYTES) -> Iterator[list[MemoryRelay]]:
    with opened(size, windows=[window_bytes(slot_bytes)] * size) as memories:
        yield [relay_of(memory, slot_bytes) for memory in memories]


def on_all(members: list[MemoryRelay], call: Callable[[MemoryRelay], _T]) -> list[_T]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(call, members))


@pytest.mark.parametrize("size_bytes", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, 10 * SLOT_BYTES, 10 * SLOT_BYTES + 5])
def test_bytes_of_any_length_reach_all(size_bytes: int) -> None:
    data = bytes(number % 251 for number in range(size_bytes))
    with relays(3) as members:
        assert on_all(members, lambda relay: relayed(relay, 1, data if relay.index == 1 else b"no")) == [data] * 3


def test_nothing_reaches_all_too() -> None:
    with relays(2) as members:
        assert on_all(members, lambda relay: relayed(relay, 0, None)) == [None, None]


def test_all_learn_what_each_says() -> None:
    said = [bytes([member]) * (50 * member) for member in range(4)]
    with relays(4) as members:

        def say_twice(relay: MemoryRelay) -> tuple[list[bytes], list[bytes]]:
            first = exchanged(relay, said[relay.index])
            return first, exchanged(relay, said[-1 - relay.index])

        assert on_all(members, say_twice) == [(said, said[::-1])] * 4


def test_a_slot_is_filled_again_once_all_have_taken_it() -> None:
    """One of two others reads its first item for long."""
    claimed: list[int] = []
    is_over = threading.Event()
    with relays(3) as members, ThreadPoolExecutor(2) as threads:
        giver, prompt, slow = members

        def give() -> None:
            for number in range(SLOTS + 2):
                giver.claim()[:1] = bytes([number])
                claimed.append(number)
                giver.give(1)
            giver.settle()
            is_over.set()

        def take(relay: MemoryRelay, count: int) -> list[int]:
            found = []
            for _ in range(count):
                with relay.taken(0) as data:
                    assert data is not None
                    found.append(data[0])
            return found

        giving, taking = threads.submit(give), threads.submit(take, prompt, SLOTS + 2)
        with slow.taken(0) as data:
            assert data is not None
            assert not is_over.wait(0.2)
            assert claimed == list(range(SLOTS))
            assert bytes(data) == b"\0"
        assert take(slow, SLOTS + 1) == list(range(1, SLOTS + 2))
        assert taking.result(10) == list(range(SLOTS + 2))
        giving.result(10)


def test_who_gives_up_says_why() -> None:
    with relays(2) as members:
        members[0].close("OSError: no more")
        with pytest.raises(CollectiveError, match=r"take on group 'reading' failed: .*OSError: no more"):
            relayed(members[1], 0, None)
