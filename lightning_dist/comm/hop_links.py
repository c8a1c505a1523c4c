"""How the members of a leg hand each other rows: over their process group, or through memory that they share.

Note: the order of accesses to shared memory.
    Each member has a window with two slots, used in turn. In an exchange it copies what it gives into a slot, where
    each destination's row has its place, tells who takes from it (``FILLED``), waits for those it takes from, and reads
    in their slots. It may fill a slot again when all have read it. Of a member that also gives, the next ``FILLED``
    says so, since it is sent after what it took before has been read. A member that only takes says so itself.
    So between two members each direction of one channel carries signals of one kind, in the order of exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.segments import Segments
from lightning_dist.comm.shared_memory import HostMemory

Rows = Mapping[int, tuple[int, ...]]
"""Destinations of rows by the member that gets, or gives, them."""

SLOTS = 2  # of a lane in each window
_SLOT_ALIGNMENT = 64
_LARGEST_ELEMENT_BYTES = 16  # complex128


class HopLink(Protocol):
    """How the members of a group hand each other rows; used by one lane only."""

    def exchanged(
        self, segments: Segments, gives: Rows, takes: Rows, *, operation: str
    ) -> AbstractContextManager[Mapping[int, torch.Tensor]]:
        """Give rows and get some; every member calls it for each chunk, in one order.

        Args:
            segments: What this member holds.
            gives: What each member gets; no destinations for who gets nothing.
            takes: What each member gives; it says the same of this member.
            operation: What it is a part of, for events and errors, e.g. ``"reduce_scatter"``.

        Returns:
            A context in which the rows can be read: member -> [len(destinations), columns].
        """


class GroupLink:
    """Point-to-point transfers inside a process group.

    Args:
        collectives: The seam.
        group: The members.
    """

    def __init__(self, collectives: Collectives, group: RankGroup) -> None:
        self._collectives = collectives
        self._group = group

    @contextmanager
    def exchanged(
        self, segments: Segments, gives: Rows, takes: Rows, *, operation: str
    ) -> Iterator[Mapping[int, torch.Tensor]]:
        """See :class:`HopLink`."""
        rows = segments.rows
        received = {m: rows.new_empty(len(taken), rows.shape[1]) for m, taken in takes.items()}
        sends = [(m, _raw(segments.of(given).contiguous())) for m, given in gives.items()]
        receives = [(m, _raw(taken)) for m, taken in received.items()]
        pending = self._collectives.start_exchange(sends, receives, self._group, operation, segments.tag)
        pending.wait(**segments.attributes)
        yield received


class MemoryLink:
    """Memory that the members share.

    Args:
        memory: Its windows have :func:`window_bytes` for each lane.
        lane: Number of the lane among those that use the memory: its channel, and its place in the windows.
        num_rows: Number of destinations there are.
        slot_bytes: See :func:`slot_bytes_for`.
        collectives: The seam, for events and fault points.
        group: The members; its process group is not used.
    """

    def __init__(
        self,
        memory: HostMemory,
        *,
        lane: int,
        num_rows: int,
        slot_bytes: int,
        collectives: Collectives,
        group: RankGroup,
    ) -> None:
        self._memory = memory
        self._channel = lane
        self._num_rows = num_rows
        self._slot_bytes = slot_bytes
        self._collectives = collectives
        self._group = group
        self._destinations = tuple(range(num_rows))
        self._sequence = 0

    @contextmanager
    def exchanged(
        self, segments: Segments, gives: Rows, takes: Rows, *, operation: str
    ) -> Iterator[Mapping[int, torch.Tensor]]:
        """See :class:`HopLink`."""
        rows = segments.rows
        givers = [m for m, taken in takes.items() if taken and rows.shape[1]]
        takers = [m for m, given in gives.items() if given and rows.shape[1]]
        size_bytes = sum(len(given) for given in gives.values()) * rows.shape[1] * rows.element_size()
        with self._collectives.operation(operation, self._group, size_bytes=size_bytes, **segments.attributes):
            memory, channel, sequence, fingerprint = self._memory, self._channel, self._sequence, _fingerprint(segments)
            for member in takers:
                if member not in givers and sequence >= SLOTS:
                    memory.wait(member, channel, sequence - SLOTS, 0)
            self._fill(segments, gives)
            for member in takers:
                memory.signal(member, channel, sequence, fingerprint)
            for member in givers:
                memory.wait(member, channel, sequence, fingerprint)
            yield {m: self._slot(m, segments).of(taken) for m, taken in takes.items()}
            for member in givers:
                if member not in takers:
                    memory.signal(member, channel, sequence, 0, may_be_gone=True)
            if givers or takers:
                self._sequence += 1

    def _fill(self, segments: Segments, gives: Rows) -> None:
        given = sorted({destination for destinations in gives.values() for destination in destinations})
        slot = self._slot(self._memory.index, segments).rows
        for destination, row in zip(given, segments.of(given), strict=True):
            slot[destination].copy_(row)

    def _slot(self, member: int, like: Segments) -> Segments:
        """The slot of a member's window that is in turn, typed as a chunk's rows."""
        rows = like.rows
        start = (self._channel * SLOTS + self._sequence % SLOTS) * self._slot_bytes
        end = start + self._num_rows * rows.shape[1] * rows.element_size()
        values = self._memory.windows[member][start:end].view(rows.dtype)
        return Segments(self._destinations, values.view(self._num_rows, rows.shape[1]), {})


def slot_bytes_for(chunk_bytes: int, num_rows: int) -> int:
    """Size of a slot that takes a chunk, which has at least one element a row."""
    largest = max(chunk_bytes, num_rows * _LARGEST_ELEMENT_BYTES)
    return -(-largest // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


def window_bytes(slot_bytes: int, lanes: int) -> int:
    """Size of each member's window for some lanes."""
    return lanes * SLOTS * slot_bytes


def _fingerprint(segments: Segments) -> int:
    """Bytes of a row in the low half, the tag above: members that differ in it are in different operations."""
    return segments.tag << 32 | segments.rows.shape[1] * segments.rows.element_size()


def _raw(rows: torch.Tensor) -> torch.Tensor:
    """Of a type that every backend sends."""
    return rows.view(torch.uint8) if rows.dtype is torch.bool else rows
