"""Which rank of a host reads what, so that no byte is read twice: a plan that each of them makes alike. Pure.

Ranges are known by their numbers in a list that all have. A range that one rank alone needs is read by that rank. What
several need, and what is too small to be worth a request of its own, is read by one of those that need it, for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_dist.checkpoint.manifest import ByteRange
from lightning_dist.checkpoint.requests import neighbours

LARGE_BYTES = 1 << 20
"""What one rank alone needs is not relayed from this size on, and no request for all is made smaller than this."""

_REQUESTS_A_MEMBER = 4  # at least, if they are large enough: so that loads can be balanced


@dataclass(frozen=True)
class HostRead:
    """A request whose bytes go to all of a host.

    Attributes:
        reader: Who makes it, by position in the host.
        ranges: Numbers of the ranges that it covers, in the order of the file.
        file: Which.
        start: First byte.
        size_bytes: Of the request.
    """

    reader: int
    ranges: tuple[int, ...]
    file: str
    start: int
    size_bytes: int


@dataclass(frozen=True)
class Part:
    """Bytes of a request that one slot takes.

    Attributes:
        read: The request.
        offset: First byte, in the request.
        size_bytes: How many.
    """

    read: HostRead
    offset: int
    size_bytes: int

    @property
    def is_last(self) -> bool:
        """Whether the request ends with it."""
        return self.offset + self.size_bytes == self.read.size_bytes


@dataclass(frozen=True)
class HostReads:
    """Who reads what.

    Attributes:
        alone: By member: numbers of the ranges that it reads for itself, ascending.
        shared: By member: what it reads for all, in the order of files.
    """

    alone: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[HostRead, ...], ...]

    def parts(self, slot_bytes: int) -> Iterator[Part]:
        """What is relayed, in the order in which all members go through it: readers by turns.

        Args:
            slot_bytes: Largest part.
        """
        queues = [[part for read in reads for part in _parts_of(read, slot_bytes)] for reads in self.shared]
        for turn in range(max(map(len, queues), default=0)):
            yield from (queue[turn] for queue in queues if turn < len(queue))


def plan_host_reads(ranges: Sequence[ByteRange], wanted: Sequence[Collection[int]], *, request_bytes: int) -> HostReads:
    """Deal what the ranks of a host need among them, by bytes.

    Args:
        ranges: By file and first byte.
        wanted: By member: numbers of the ranges that it needs.
        request_bytes: Largest request for all, unless one range is larger.
    """
    takers: dict[int, list[int]] = {}
    for member, numbers in enumerate(wanted):
        for number in numbers:
            takers.setdefault(number, []).append(member)
    alone: list[list[int]] = [[] for _ in wanted]
    common: list[int] = []
    for number in sorted(takers):
        if len(takers[number]) == 1 and ranges[number].size >= LARGE_BYTES:
            alone[takers[number][0]].append(number)
        else:
            common.append(number)
    size_bytes = sum(ranges[number].size for number in common)
    request_bytes = min(request_bytes, max(LARGE_BYTES, size_bytes // (_REQUESTS_A_MEMBER * len(wanted))))
    requests: list[tuple[list[int], list[int]]] = []  # members that need some of it, ranges
    for batch in neighbours(common, lambda number: ranges[number], request_bytes=request_bytes):
        members = sorted({member for number in batch for member in takers[number]})
        if len(members) == 1:
            alone[members[0]] += batch
        else:
            requests.append((members, batch))
    loads = [sum(ranges[number].size for number in numbers) for numbers in alone]
    shared: list[list[HostRead]] = [[] for _ in wanted]
    for members, batch in sorted(requests, key=lambda request: -_size_bytes(ranges, request[1])):
        reader = min(members, key=lambda member: loads[member])
        first, size = ranges[batch[0]], _size_bytes(ranges, batch)
        shared[reader].append(HostRead(reader, tuple(batch), first.file, first.start, size))
        loads[reader] += size
    return HostReads(
        tuple(tuple(sorted(numbers)) for numbers in alone),
        tuple(tuple(sorted(reads, key=lambda read: read.ranges)) for reads in shared),
    )


def _size_bytes(ranges: Sequence[ByteRange], batch: Sequence[int]) -> int:
    first, last = ranges[batch[0]], ranges[batch[-1]]
    return last.start + last.size - first.start


def _parts_of(read: HostRead, slot_bytes: int) -> Iterator[Part]:
    for offset in range(0, max(1, read.size_bytes), slot_bytes):
        yield Part(read, offset, min(slot_bytes, read.size_bytes - offset))
