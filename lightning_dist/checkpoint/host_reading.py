"""Reading once per host: a rank reads what is its share of :mod:`host_reads`, and gives it to the others of its host.

What is read lies in the relay's slots until all have copied what they need of it, so memory is bounded by these. A rank
that fails goes on giving, without content: the others learn it at once, stop reading too, and nobody waits in vain.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from lightning_dist.checkpoint.host_reads import HostRead, HostReads, Part, plan_host_reads
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.checkpoint.stored import Stored, check, deliver, read_range
from lightning_dist.comm.host_relay import SLOTS, HostRelay, exchanged
from lightning_dist.errors import CheckpointError

_AHEAD = SLOTS - 1  # of a rank's own parts that are being read


class HostReading:
    """One load by the ranks of a host, which make it alike.

    Args:
        relay: The ranks.
        folder: Of the checkpoint.
        ranges: All that it holds, by file and first byte.
        needs: What this rank needs: number of a range -> what it is for.
        planner: Takes it.
    """

    def __init__(
        self,
        relay: HostRelay,
        folder: Folder,
        ranges: Sequence[Stored],
        needs: Mapping[int, Sequence[ReadItem]],
        planner: LoadPlanner,
    ) -> None:
        self._relay = relay
        self._folder = folder
        self._ranges = ranges
        self._needs = needs
        self._planner = planner
        self._collected: dict[HostRead, bytearray] = {}

    def agree(self, manifest: Manifest) -> HostReads:
        """Tell the others what this rank needs, and deal the reads.

        Raises:
            CheckpointError: Ranks read different checkpoints; on all alike.
        """
        said = exchanged(self._relay, _digest(manifest) + _as_bits(self._needs, len(self._ranges)))
        digest = len(_digest(manifest))
        if len({each[:digest] for each in said}) > 1:
            raise CheckpointError(
                f"{self._folder.url}: ranks of one host read different checkpoints; was it overwritten meanwhile?"
            )
        wanted = [_from_bits(each[digest:]) for each in said]
        places = [stored.place for stored in self._ranges]
        return plan_host_reads(places, wanted, request_bytes=self._relay.slot_bytes)

    def run(self, reads: HostReads) -> bool:
        """Read this rank's share for all, and take what others read; ``False`` if another rank of the host failed."""
        return relay_parts(self._relay, reads.parts(self._relay.slot_bytes), fill=self._fill, take=self._take)

    def _fill(self, part: Part, target: memoryview) -> None:
        read = part.read
        read_range(self._folder, read.file, read.start + part.offset, target)
        if len(target) == read.size_bytes:  # else each rank checks, once it has all parts
            for stored, data in self._split(read, target):
                check(self._folder, stored, data)

    def _take(self, part: Part, data: memoryview) -> None:
        read = part.read
        if not any(number in self._needs for number in read.ranges):
            return
        if len(data) == read.size_bytes:
            self._deliver(read, data)
            return
        collected = self._collected.setdefault(read, bytearray(read.size_bytes))
        collected[part.offset : part.offset + part.size_bytes] = data
        if part.is_last:
            whole = memoryview(self._collected.pop(read))
            for stored, own in self._split(read, whole):
                check(self._folder, stored, own)
            self._deliver(read, whole)

    def _deliver(self, read: HostRead, data: memoryview) -> None:
        for number, (stored, own) in zip(read.ranges, self._split(read, data), strict=True):
            deliver(stored, own, self._needs.get(number, ()), self._planner)

    def _split(self, read: HostRead, data: memoryview) -> Iterable[tuple[Stored, memoryview]]:
        for number in read.ranges:
            place = self._ranges[number].place
            first = place.start - read.start
            yield self._ranges[number], data[first : first + place.size]


def relay_parts(
    relay: HostRelay,
    parts: Iterable[Part],
    *,
    fill: Callable[[Part, memoryview], None],
    take: Callable[[Part, memoryview], None],
) -> bool:
    """Go through the parts, which are the same on all members in the same order; every member calls it.

    Args:
        relay: The members.
        parts: Of reads whose readers are members.
        fill: Reads one of this member's parts; in a thread, a few ahead.
        take: Gets each part, this member's too; in the calling thread.

    Returns:
        ``False`` if another member has failed.

    Raises:
        Exception: What ``fill`` or ``take`` raised first on this member, once all parts are gone through.
        CollectiveError: A member is lost.
    """
    parts = list(parts)
    own = iter([part for part in parts if part.read.reader == relay.index])
    filling: deque[tuple[memoryview, Future[None]]] = deque()
    failures: list[Exception] = []
    is_void = False

    def attempt(action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # raised at the end: the others wait for what this member gives
            failures.append(error)
        return not failures

    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="hierdist-read") as pool:

        def fill_next() -> None:
            part = next(own, None)
            if part is not None:
                slot = relay.claim()[: part.size_bytes]
                is_idle = is_void or bool(failures)
                filling.append((slot, pool.submit(fill if not is_idle else _nothing, part, slot)))

        for _ in range(_AHEAD):
            fill_next()
        for part in parts:
            if part.read.reader == relay.index:
                slot, reading = filling.popleft()
                is_filled = attempt(reading.result) and not is_void
                relay.give(part.size_bytes if is_filled else None)
                if is_filled:
                    attempt(lambda part=part, slot=slot: take(part, slot))  # type: ignore[misc]
                fill_next()
                continue
            with relay.taken(part.read.reader) as data:
                if data is None:
                    is_void = True
                elif not is_void and not failures:
                    attempt(lambda part=part, data=data: take(part, data))  # type: ignore[misc]
    relay.settle()
    if failures:
        raise failures[0]
    return not is_void


def _nothing(part: Part, target: memoryview) -> None:
    """Instead of reading what nobody will use."""


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(manifest.save_id.encode()).digest()


def _as_bits(numbers: Iterable[int], count: int) -> bytes:
    bits = np.zeros(count, dtype=np.uint8)
    bits[list(numbers)] = 1
    return np.packbits(bits).tobytes()


def _from_bits(data: bytes) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8))).tolist()
    return found
