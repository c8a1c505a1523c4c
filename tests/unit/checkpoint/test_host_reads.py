"""Who of a host reads what: each byte once, dealt by bytes, in an order that all have."""

from __future__ import annotations

import random

import pytest

from lightning_dist.checkpoint.host_reads import LARGE_BYTES, HostReads, plan_host_reads
from lightning_dist.checkpoint.manifest import ByteRange
from lightning_dist.checkpoint.requests import GAP_BYTES, neighbours

MIB = 1 << 20


def files_of(sizes: dict[str, list[int]]) -> list[ByteRange]:
    """Ranges without gaps."""
    ranges = []
    for file in sorted(sizes):
        start = 0
        for size in sizes[file]:
            ranges.append(ByteRange(file, start, size, 0))
            start += size
    return ranges


def bytes_read(reads: HostReads, ranges: list[ByteRange]) -> list[int]:
    """By member."""
    return [
        sum(ranges[number].size for number in alone) + sum(read.size_bytes for read in shared)
        for alone, shared in zip(reads.alone, reads.shared, strict=True)
    ]


@pytest.mark.parametrize("members", [2, 3, 8])
def test_what_all_need_is_read_once_in_equal_shares(members: int) -> None:
    rng = random.Random(members)
    ranges = files_of({f"rank{file}": [rng.randrange(1, 16 * MIB) for _ in range(20)] for file in range(4)})
    reads = plan_host_reads(ranges, [range(len(ranges))] * members, request_bytes=16 * MIB)
    assert reads.alone == ((),) * members
    numbers = [number for shared in reads.shared for read in shared for number in read.ranges]
    assert sorted(numbers) == list(range(len(ranges)))
    loads = bytes_read(reads, ranges)
    assert sum(loads) == sum(place.size for place in ranges)
    assert max(loads) - min(loads) <= 16 * MIB


def test_a_small_checkpoint_is_dealt_too() -> None:
    """It fits one slot, and still each of two ranks reads about half."""
    ranges = files_of({"rank0": [MIB // 4] * 32})
    loads = bytes_read(plan_host_reads(ranges, [range(32)] * 2, request_bytes=16 * MIB), ranges)
    assert loads == [4 * MIB, 4 * MIB]


def test_what_one_rank_alone_needs_counts_and_is_its_own() -> None:
    ranges = files_of({"rank0": [8 * MIB] * 4, "rank1": [2 * MIB] * 8})
    reads = plan_host_reads(ranges, [range(12), range(4, 12)], request_bytes=2 * MIB)
    assert reads.alone == ((0, 1, 2, 3), ())
    assert reads.shared[0] == ()  # it has enough of its own
    assert [read.ranges for read in reads.shared[1]] == [(number,) for number in range(4, 12)]


def test_small_ranges_of_one_go_with_their_neighbours() -> None:
    """The shards of an optimizer between the steps that all need: no byte is read twice, none is asked for alone."""
    ranges = files_of({"rank0": [40_000, 4] * 50})
    everything, steps = range(100), range(1, 100, 2)
    reads = plan_host_reads(ranges, [everything, steps], request_bytes=16 * MIB)
    assert reads.alone == ((), ())
    assert sum(bytes_read(reads, ranges)) == 50 * 40_004


def test_who_needs_nothing_reads_nothing() -> None:
    ranges = files_of({"rank0": [MIB, MIB]})
    reads = plan_host_reads(ranges, [(0, 1), (), (0, 1)], request_bytes=MIB)
    assert [len(shared) for shared in reads.shared] == [1, 0, 1]
    assert plan_host_reads(ranges, [(), ()], request_bytes=MIB) == HostReads(((), ()), ((), ()))


@pytest.mark.parametrize("seed", range(20))
def test_any_needs_are_met_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [0, 1, 100, GAP_BYTES, LARGE_BYTES - 1, LARGE_BYTES, 5 * MIB, 40 * MIB]
    ranges = files_of({f"rank{file}": rng.choices(sizes, k=15) for file in range(3)})
    members = rng.randint(2, 5)
    wanted = [sorted(rng.sample(range(len(ranges)), rng.randint(0, len(ranges)))) for _ in range(members)]
    reads = plan_host_reads(ranges, wanted, request_bytes=16 * MIB)
    relayed = [number for shared in reads.shared for read in shared for number in read.ranges]
    assert len(set(relayed)) == len(relayed)
    for member, numbers in enumerate(wanted):
        assert set(numbers) <= {*relayed, *reads.alone[member]}
        assert set(reads.alone[member]) <= set(numbers)
    for alone in reads.alone:
        assert not set(alone) & set(relayed)
    assert sum(len(alone) for alone in reads.alone) + len(relayed) == len({n for numbers in wanted for n in numbers})
    for member, shared in enumerate(reads.shared):
        for read in shared:
            assert read.reader == member
            assert read.size_bytes <= 16 * MIB or len(read.ranges) == 1
            assert set(read.ranges) & set(wanted[member]), "who reads needs some of it"


def test_parts_fill_slots_and_readers_take_turns() -> None:
    ranges = files_of({"rank0": [10], "rank1": [25], "rank2": [0]})
    reads = plan_host_reads(ranges, [(0, 1, 2)] * 3, request_bytes=10)
    parts = list(reads.parts(10))
    assert [(part.read.file, part.offset, part.size_bytes, part.is_last) for part in parts] == [
        ("rank1", 0, 10, False),
        ("rank0", 0, 10, True),
        ("rank2", 0, 0, True),
        ("rank1", 10, 10, False),
        ("rank1", 20, 5, True),
    ]


def test_neighbours_are_read_by_one_request() -> None:
    places = [ByteRange("a", 0, 10, 0), ByteRange("a", 64, 10, 0), ByteRange("a", 75 + GAP_BYTES, 1, 0)]
    places += [ByteRange("b", 0, 1, 0), ByteRange("b", 64, 1000, 0), ByteRange("b", 1064, 1, 0)]
    found = neighbours(range(6), lambda number: places[number], request_bytes=500)
    assert list(found) == [[0, 1], [2], [3], [4], [5]]
