"""Rows handed over through shared memory: nobody overwrites what another still reads; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.hop_links import SLOTS, MemoryLink, Rows, slot_bytes_for, window_bytes
from lightning_dist.comm.segments import Segments
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.errors import CollectiveError
from lightning_dist.events import EventStream
from tests.unit.comm.test_shared_memory import opened

COLUMNS, LANES = 16, 2
SLOT_BYTES = slot_bytes_for(2 * COLUMNS * 4, 2)
NONE: tuple[int, ...] = ()


def link_of(memory: HostMemory, lane: int = 0) -> MemoryLink:
    collectives = Collectives(
        events=EventStream(rank=memory.index), timeout_s=10.0, rank=memory.index, host_of_rank=["a", "a"]
    )
    group = RankGroup((0, 1), memory.index, None, "scatter_top_host", "host")
    return MemoryLink(memory, lane=lane, num_rows=2, slot_bytes=SLOT_BYTES, collectives=collectives, group=group)


@contextmanager
def linked() -> Iterator[list[MemoryLink]]:
    with opened(2, windows=[window_bytes(SLOT_BYTES, LANES)] * 2) as memories:
        yield [link_of(memory) for memory in memories]


def chunk(value: float, tag: int = 7, columns: int = COLUMNS) -> Segments:
    """A row for each of two destinations."""
    return Segments((0, 1), torch.tensor([[value], [value + 100]]).expand(2, columns), {}, tag)


def exchange(link: MemoryLink, segments: Segments, gives: Rows, takes: Rows) -> dict[int, list[float]]:
    with link.exchanged(segments, gives, takes, operation="reduce_scatter") as received:
        return {member: rows.flatten().unique().tolist() for member, rows in received.items()}


@pytest.mark.parametrize("both_give", [True, False], ids=["both give", "one gives"])
def test_what_is_being_read_is_not_overwritten(both_give: bool) -> None:
    """One member reads its first rows for long: the other gets as far as there are slots, and no further."""
    back = (0,) if both_give else NONE
    ahead, beyond, count = threading.Event(), threading.Event(), SLOTS + 2
    with linked() as (giver, taker), ThreadPoolExecutor(1) as thread:

        def give() -> None:
            for number in range(count):
                if number == (1 if both_give else SLOTS):  # where it gives too, its next exchange waits for the other
                    ahead.set()
                exchange(giver, chunk(number), {1: (1,)}, {1: back})
            beyond.set()

        giving = thread.submit(give)
        with taker.exchanged(chunk(50), {0: back}, {0: (1,)}, operation="reduce_scatter") as received:
            assert ahead.wait(10)
            assert not beyond.wait(0.2)
            assert received[0].flatten().unique().tolist() == [100]
        for number in range(1, count):
            assert exchange(taker, chunk(50 + number), {0: back}, {0: (1,)}) == {0: [100 + number]}
        giving.result(10)


def test_empty_rows_are_no_exchange() -> None:
    with linked() as (first, _):
        assert exchange(first, chunk(1, columns=0), {1: (1,)}, {1: (0,)}) == {1: []}


def test_lanes_do_not_meet() -> None:
    with opened(2, windows=[window_bytes(SLOT_BYTES, LANES)] * 2) as memories, ThreadPoolExecutor(1) as thread:
        links = [[link_of(memory, lane) for lane in range(LANES)] for memory in memories]

        def other() -> list[dict[int, list[float]]]:
            return [exchange(links[1][lane], chunk(10 + lane), {0: (0,)}, {0: (1,)}) for lane in (1, 0)]

        theirs = thread.submit(other)
        assert exchange(links[0][1], chunk(1), {1: (1,)}, {1: (0,)}) == {1: [11]}
        assert exchange(links[0][0], chunk(2), {1: (1,)}, {1: (0,)}) == {1: [10]}
        assert theirs.result(10) == [{0: [101]}, {0: [102]}]


def test_members_in_different_operations_are_told_so() -> None:
    with linked() as links, ThreadPoolExecutor(2) as threads:
        ways: list[tuple[MemoryLink, int, Rows, Rows]] = [
            (links[0], 7, {1: (1,)}, {1: (0,)}),
            (links[1], 8, {0: (0,)}, {0: (1,)}),
        ]
        asked = [threads.submit(exchange, link, chunk(1, tag), gives, takes) for link, tag, gives, takes in ways]
        for future, (peer, own) in zip(asked, [(11, 10), (10, 11)], strict=True):
            with pytest.raises(CollectiveError, match=rf"rank {peer} \(host a\) is at operation 0 .* rank {own}"):
                future.result(10)
