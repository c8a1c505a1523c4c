"""Bytes that a rank of a host gives to the others of it, item by item, through slots of a fixed size.

All members go through the items of all givers in one order, which they know: at each, the giver gives and all others
take. An item has at most the size of a slot, so memory is bounded however many there are.

Note: why nobody waits for ever.
    A giver fills the slots of a few items ahead, and may claim a slot again when all have taken what lay there. It
    claims for its item ``n + SLOTS`` after it has given item ``n + 1`` at the earliest. So it waits for members to pass
    an item that comes before the one it is at, and they get there without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.comm.host_memory import holds_on_all_ranks, open_memory_of
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.topology import Cluster, Tier

SLOTS = 3
"""Of a giver: one is being taken, two are being filled."""

_HEADER_BYTES = 64  # what the item's size takes in a slot; keeps the bytes behind it aligned
_VOID = -1
_FILLED, _TAKEN = 0, 1  # channels: on each, signals between two members go in the order of items


class HostRelay(Protocol):
    """The ranks of a host that hand each other bytes; used by one thread.

    Attributes:
        index: This rank's position among them.
        size: How many they are.
        slot_bytes: Largest item.
    """

    index: int
    size: int
    slot_bytes: int

    def claim(self) -> memoryview:
        """The slot of this member's next item that has none, to be filled; waits until it is free."""

    def give(self, size_bytes: int | None) -> None:
        """Give all others what has been filled into the oldest claimed slot.

        Args:
            size_bytes: How much of it; ``None`` gives an item without content.
        """

    def taken(self, giver: int) -> AbstractContextManager[memoryview | None]:
        """The next item of a giver, to be read in the body; ``None`` if it has no content."""

    def settle(self) -> None:
        """Wait until all others have taken all that this member gave."""

    def close(self, reason: str | None = None) -> None:
        """Let go of it; safe to call twice.

        Args:
            reason: Why this member gives up, for those who wait for it; ``None`` after :meth:`settle`.
        """


class MemoryRelay:
    """Members that share memory: what is given is read where it lies.

    Args:
        memory: Its windows have :func:`window_bytes`, and there are two channels.
        slot_bytes: Largest item.
        collectives: The seam, for events and fault points.
        group: The members, and the process group to release at the end, if one was made.
    """

    def __init__(self, memory: HostMemory, *, slot_bytes: int, collectives: Collectives, group: RankGroup) -> None:
        self.index = memory.index
        self.size = memory.size
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._collectives = collectives
        self._group = group
        self._others = [member for member in range(self.size) if member != self.index]
        self._claimed = 0
        self._settled = 0
        self._passed = [0] * self.size  # items given by each, this member too

    def claim(self) -> memoryview:
        """See :class:`HostRelay`."""
        self._settle_up_to(self._claimed + 1 - SLOTS)
        self._claimed += 1
        return self._slot(self.index, self._claimed - 1)[1]

    def give(self, size_bytes: int | None) -> None:
        """See :class:`HostRelay`."""
        number = self._passed[self.index]
        assert number < self._claimed, "a slot was claimed"
        with self._collectives.operation("give", self._group, size_bytes=size_bytes or 0):
            self._slot(self.index, number)[0].fill_(_VOID if size_bytes is None else size_bytes)
            self._passed[self.index] += 1
            for member in self._others:
                self._memory.signal(member, _FILLED, number, 0)

    @contextmanager
    def taken(self, giver: int) -> Iterator[memoryview | None]:
        """See :class:`HostRelay`."""
        number = self._passed[giver]
        with self._collectives.operation("take", self._group):
            self._memory.wait(giver, _FILLED, number, 0)
        header, data = self._slot(giver, number)
        size_bytes = int(header)
        self._passed[giver] += 1
        try:
            yield None if size_bytes == _VOID else data[:size_bytes]
        finally:
            self._memory.signal(giver, _TAKEN, number, 0, may_be_gone=True)

    def settle(self) -> None:
        """See :class:`HostRelay`."""
        self._settle_up_to(self._passed[self.index])

    def close(self, reason: str | None = None) -> None:
        """See :class:`HostRelay`."""
        if reason is not None:
            self._memory.abort(reason)
        self._memory.close()
        _release(self._group)

    def _settle_up_to(self, number: int) -> None:
        if self._settled >= number:
            return
        with self._collectives.operation("settle", self._group):
            for item in range(self._settled, number):
                for member in self._others:
                    self._memory.wait(member, _TAKEN, item, 0)
        self._settled = number

    def _slot(self, member: int, number: int) -> tuple[torch.Tensor, memoryview]:
        """Size of an item, and room for it."""
        start = (number % SLOTS) * (_HEADER_BYTES + self.slot_bytes)
        window = self._memory.windows[member]
        data = start + _HEADER_BYTES
        return window[start : start + 8].view(torch.int64), window[data : data + self.slot_bytes].numpy().data


class GroupRelay:
    """Members that do not share memory: each item is broadcast in a process group.

    Args:
        collectives: The seam; its waits must block the host.
        group: The members.
        slot_bytes: Largest item.
    """

    def __init__(self, collectives: Collectives, group: RankGroup, *, slot_bytes: int) -> None:
        self.index = group.index
        self.size = group.size
        self.slot_bytes = slot_bytes
        self._collectives = collectives
        self._group = group
        self._slots: list[torch.Tensor] = []  # of what is given
        self._room = torch.empty(0, dtype=torch.uint8)  # for what is taken
        self._claimed = 0
        self._given = 0

    def claim(self) -> memoryview:
        """See :class:`HostRelay`."""
        if len(self._slots) < SLOTS:
            self._slots.append(torch.empty(self.slot_bytes, dtype=torch.uint8))
        self._claimed += 1
        return self._slots[(self._claimed - 1) % SLOTS].numpy().data

    def give(self, size_bytes: int | None) -> None:
        """See :class:`HostRelay`. When this returns, all have it."""
        assert self._given < self._claimed, "a slot was claimed"
        slot = self._slots[self._given % SLOTS]
        self._given += 1
        self._broadcast(torch.tensor([_VOID if size_bytes is None else size_bytes]), self.index)
        if size_bytes:
            self._broadcast(slot[:size_bytes], self.index)

    @contextmanager
    def taken(self, giver: int) -> Iterator[memoryview | None]:
        """See :class:`HostRelay`."""
        header = torch.zeros(1, dtype=torch.int64)
        self._broadcast(header, giver)
        size_bytes = int(header)
        if self._room.numel() < size_bytes:
            self._room = torch.empty(size_bytes, dtype=torch.uint8)
        if size_bytes > 0:
            self._broadcast(self._room[:size_bytes], giver)
        yield None if size_bytes == _VOID else self._room[:size_bytes].numpy().data

    def settle(self) -> None:
        """See :class:`HostRelay`. Nothing is left to wait for."""

    def close(self, reason: str | None = None) -> None:
        """See :class:`HostRelay`."""
        _release(self._group)

    def _broadcast(self, tensor: torch.Tensor, giver: int) -> None:
        self._collectives.broadcast(tensor, self._group, source=self._group.ranks[giver])


def open_host_relay(
    cluster: Cluster,
    *,
    collectives: Collectives,
    store: dist.Store,
    timeout_s: float,
    slot_bytes: int,
    shares_memory: bool,
    label: str,
) -> HostRelay | None:
    """The relay of this rank's host; every rank of the world calls it.

    Args:
        cluster: Who sits where.
        collectives: The seam; its waits must block the host.
        store: Shared by all ranks, its keys used by nobody else.
        timeout_s: Deadline of each wait, in seconds.
        slot_bytes: Largest item; a multiple of 64.
        shares_memory: Whether ranks of a host are to find out if they share memory.
        label: What it is for; names events and errors.

    Returns:
        ``None`` for a rank that is alone on its host.
    """
    if max(cluster.ranks_per_host) == 1:
        return None
    rank = collectives.rank
    members = cluster.ranks_of_host(cluster.host_of(rank))
    is_alone = len(members) == 1
    memory: HostMemory | None = None
    group: RankGroup | None = None
    all_share = False
    if shares_memory:
        if not is_alone:
            memory = open_memory_of(
                members,
                collectives=collectives,
                store=dist.PrefixStore(f"host/{members[0]}/", store),
                window_bytes=window_bytes(slot_bytes),
                channels=2,
                timeout_s=timeout_s,
            )
        agreed = dist.PrefixStore("agreed/", store)
        all_share = holds_on_all_ranks(memory is not None or is_alone, collectives=collectives, store=agreed)
    if not all_share:
        for host in cluster.hosts:
            others = cluster.ranks_of_host(host)
            if len(others) > 1:
                made = make_group(
                    others, rank=rank, label=label, tier=Tier.HOST.value, timeout_s=timeout_s, backend="gloo"
                )
                group = made or group
    if is_alone:
        return None
    if memory is None:
        assert group is not None, "every rank that is not alone is in the group of its host"
        return GroupRelay(collectives, group, slot_bytes=slot_bytes)
    own = group or RankGroup(members, members.index(rank), None, label, Tier.HOST.value)
    return MemoryRelay(memory, slot_bytes=slot_bytes, collectives=collectives, group=own)


def window_bytes(slot_bytes: int) -> int:
    """Size of each member's window."""
    return SLOTS * (_HEADER_BYTES + slot_bytes)


def relayed(relay: HostRelay, giver: int, data: bytes | None) -> bytes | None:
    """Bytes of any length that one member gives to all; every member calls it.

    Args:
        relay: The members.
        giver: Which of them.
        data: On the giver: what it gives, or ``None``; of no account on the others.
    """
    if relay.index == giver:
        if data is None:
            relay.claim()
            relay.give(None)
            return None
        for start in range(0, len(data) + 1, relay.slot_bytes):  # a part that does not fill its slot is the last
            own = data[start : start + relay.slot_bytes]
            relay.claim()[: len(own)] = own
            relay.give(len(own))
        return data
    parts: list[bytes] = []
    while True:
        with relay.taken(giver) as part:
            if part is None:
                return None
            parts.append(bytes(part))
        if len(parts[-1]) < relay.slot_bytes:
            return b"".join(parts)


def exchanged(relay: HostRelay, data: bytes) -> list[bytes]:
    """What each member says, by member; every member calls it."""
    said = [relayed(relay, member, data) for member in range(relay.size)]
    return [each for each in said if each is not None]


def _release(group: RankGroup) -> None:
    if group.process_group is not None:
        destroy([group])
