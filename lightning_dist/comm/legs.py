"""The legs of a hierarchical all-reduce: each takes a chunk one level up or down.

An inner leg sums a tensor over its group and leaves each of the first ``width`` members with one part (reduce), and
later brings the parts back to all members (gather). The top leg sums each part over its owners. A leg is a few steps,
each run by the lane of its name; a step of one chunk runs while other steps of its neighbours do.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dist.comm.codecs import CastCodec
from lightning_dist.comm.collectives import Collectives, Pending, RankGroup
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.errors import CollectiveTimeoutError


@dataclass
class Chunk:
    """A piece of a tensor on its way through the legs.

    Attributes:
        data: [n], contiguous; a view of the tensor, which receives the result in place.
        sequence: Number of the chunk, counted alike on all ranks.
        maximum: Whether the values are combined by maximum instead of sum (bool as uint8).
        scale: Factor for the finished sum, or ``None``.
        scale_first: Whether ``scale`` is applied before the values leave the host (fp16, whose sum could overflow).
        attributes: What else events should say: bucket, chunk.
        held: What this rank holds after each inner leg; ``None`` where it owns no part.
    """

    data: torch.Tensor
    sequence: int
    maximum: bool = False
    scale: float | None = None
    scale_first: bool = False
    attributes: dict[str, int] = field(default_factory=dict)
    held: list[torch.Tensor | None] = field(default_factory=list)
    pending: Pending | None = None
    encoded: torch.Tensor | None = None

    @property
    def top(self) -> torch.Tensor | None:
        """What this rank holds at the present level."""
        return self.held[-1] if self.held else self.data

    def combine(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` = ``left`` + ``right``, or their maximum."""
        if self.maximum:
            torch.maximum(left, right, out=out)
        else:
            torch.add(left, right, out=out)


ChunkStep = Callable[[Chunk], None]


@dataclass(frozen=True)
class NamedStep:
    """A step and the lane it belongs to."""

    lane: str
    run: ChunkStep


class Leg(Protocol):
    """One level: steps on the way up, and on the way down. A top leg has no way down."""

    @property
    def up(self) -> Sequence[NamedStep]:
        """Steps that reduce, in order."""

    @property
    def down(self) -> Sequence[NamedStep]:
        """Steps that bring the result back, in order."""

    @property
    def description(self) -> str:
        """What it does, by what means; a few words for people."""

    def abort(self, reason: str) -> None:
        """Free whoever waits in this leg, here and at the peers."""

    def close(self) -> None:
        """Release what the leg holds. Safe to call twice."""


def part_bounds(length: int, width: int) -> list[tuple[int, int]]:
    """Cut ``length`` elements into ``width`` runs, the first ones of equal size, the last ones shorter or empty."""
    size = -(-length // width)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in range(width)]


def _parts(tensor: torch.Tensor, width: int) -> list[torch.Tensor]:
    return [tensor[low:high] for low, high in part_bounds(tensor.numel(), width)]


class SharedMemoryLeg:
    """An in-host leg on CPU: every rank copies its chunk into its window, owners sum, everybody copies the result out.

    Three channels of signals order the accesses to a slot: ``FILLED`` (a member has copied its chunk in; to owners),
    ``SUMMED`` (an owner has finished its part; to all) and ``TAKEN`` (a member has copied the part out, so the owner
    may fill its slot again; to owners). A member that owns nothing may fill its slot again once it has the result, for
    then every owner has read it.

    Args:
        memory: The host's shared memory, with windows of ``slots`` x ``slot_bytes``.
        width: The first ``width`` members own a part.
        slot_bytes: Largest chunk, in bytes.
        slots: Chunks that may be on their way at a time.
        collectives: The seam, for events and fault points.
        group: Who takes part; its process group is not used.
        is_last_sum: Whether nothing is summed after this leg, so that it scales.
    """

    FILLED, SUMMED, TAKEN = range(3)
    CHANNELS = 3

    def __init__(
        self,
        memory: HostMemory,
        *,
        width: int,
        slot_bytes: int,
        slots: int,
        collectives: Collectives,
        group: RankGroup,
        is_last_sum: bool,
    ) -> None:
        self._memory = memory
        self._width = width
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._collectives = collectives
        self._reduce_group = dataclasses.replace(group, label="reduce")
        self._gather_group = dataclasses.replace(group, label="gather")
        self._is_last_sum = is_last_sum
        self._index = memory.index
        self._others = [member for member in range(memory.size) if member != memory.index]
        self._free_slots = threading.Semaphore(slots)
        self._is_owner = memory.index < width

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep("reduce", self._reduce),)

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep("gather", self._gather),)

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        return f"in each host through shared memory, {self._width} part(s)"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`."""
        self._memory.abort(reason)
        self._free_slots.release()

    def close(self) -> None:
        """See :class:`Leg`."""
        self._memory.close()

    def _reduce(self, chunk: Chunk) -> None:
        source = chunk.top
        assert source is not None, "every member of a leg holds what the level below left it"
        with self._collectives.operation("reduce_scatter", self._reduce_group, leg="reduce", **chunk.attributes):
            chunk.held.append(self._reduce_into_window(chunk, source))

    def _reduce_into_window(self, chunk: Chunk, source: torch.Tensor) -> torch.Tensor | None:
        memory, sequence, fingerprint = self._memory, chunk.sequence, _fingerprint(chunk, source)
        if not self._free_slots.acquire(timeout=memory.timeout_s):
            raise CollectiveTimeoutError(f"no chunk left shared memory within {memory.timeout_s:g} s (sync.timeout_s)")
        if self._is_owner and sequence >= self._slots:
            for member in self._others:
                memory.wait(member, self.TAKEN, sequence - self._slots, 0)
        bounds = part_bounds(source.numel(), self._width)
        slot = self._slot(self._index, source, sequence)
        for owner, (low, high) in enumerate(bounds):
            if owner != self._index:
                slot[low:high].copy_(source[low:high])
        for owner in range(self._width):
            if owner != self._index:
                memory.signal(owner, self.FILLED, sequence, fingerprint)
        if not self._is_owner:
            return None
        for member in self._others:
            memory.wait(member, self.FILLED, sequence, fingerprint)
        low, high = bounds[self._index]
        part = slot[low:high]
        self._sum(
            chunk,
            [
                source[low:high] if member == self._index else self._slot(member, source, sequence)[low:high]
                for member in range(memory.size)
            ],
            part,
        )
        return part

    def _sum(self, chunk: Chunk, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Sum in the order of members; half types in fp32, rounded once."""
        half = out.dtype in (torch.float16, torch.bfloat16) and not chunk.maximum
        total = torch.empty_like(out, dtype=torch.float32) if half else out
        if len(terms) == 1:
            total.copy_(terms[0])
        else:
            first, second = (t.float() for t in terms[:2]) if half else terms[:2]
            chunk.combine(first, second, total)
            for term in terms[2:]:
                chunk.combine(total, term.float() if half else term, total)
        if chunk.scale is not None and (self._is_last_sum or chunk.scale_first):
            total.mul_(chunk.scale)
        if half:
            out.copy_(total)

    def _gather(self, chunk: Chunk) -> None:
        part = chunk.held.pop()
        target = chunk.top
        assert target is not None
        with self._collectives.operation("all_gather", self._gather_group, leg="gather", **chunk.attributes):
            self._gather_from_windows(chunk, part, target)
        self._free_slots.release()

    def _gather_from_windows(self, chunk: Chunk, part: torch.Tensor | None, target: torch.Tensor) -> None:
        memory, sequence, fingerprint = self._memory, chunk.sequence, _fingerprint(chunk, target)
        bounds = part_bounds(target.numel(), self._width)
        if self._is_owner:
            for member in self._others:
                memory.signal(member, self.SUMMED, sequence, fingerprint)
            low, high = bounds[self._index]
            assert part is not None
            target[low:high].copy_(part)
        for owner, (low, high) in enumerate(bounds):
            if owner != self._index:
                memory.wait(owner, self.SUMMED, sequence, fingerprint)
                target[low:high].copy_(self._slot(owner, target, sequence)[low:high])
                memory.signal(owner, self.TAKEN, sequence, 0, may_be_gone=True)

    def _slot(self, member: int, like: torch.Tensor, sequence: int) -> torch.Tensor:
        """[n]: the slot of a member's window in which chunk ``sequence`` lies, typed as ``like``."""
        start = (sequence % self._slots) * self._slot_bytes
        return self._memory.windows[member][start : start + like.numel() * like.element_size()].view(like.dtype)


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}


def _fingerprint(chunk: Chunk, tensor: torch.Tensor) -> int:
    """Size in bytes in the low half, type and operation above: ranks that differ in it are in different operations."""
    kind = _DTYPE_CODES.get(tensor.dtype, 0) << 1 | int(chunk.maximum)
    return kind << 32 | tensor.numel() * tensor.element_size()


class ProcessGroupLeg:
    """An inner leg over a process group: Gloo where ranks do not share memory, NCCL on CUDA, and all legs between
    hosts.

    On NCCL equal parts go through its own reduce-scatter and all-gather; else parts travel point to point, which on
    Gloo moves the fewest bytes (its reduce-scatter moves as many as an all-reduce) and serves any number of owners.

    Args:
        collectives: The seam.
        reduce_group: Group of the lane that reduces; ``None`` if this rank is alone in its group.
        gather_group: Group of the lane that gathers.
        width: The first ``width`` members own a part.
        label: Prefix of its lanes' names, e.g. ``"switch_"``.
        is_last_sum: Whether nothing is summed after this leg, so that it scales.
        is_first: Whether this is the innermost leg, which scales what must be scaled first.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        reduce_group: RankGroup | None,
        gather_group: RankGroup | None,
        width: int,
        label: str,
        is_last_sum: bool,
        is_first: bool,
    ) -> None:
        self._collectives = collectives
        self._reduce_group = reduce_group
        self._gather_group = gather_group
        self._width = width
        self._label = label
        self._is_last_sum = is_last_sum
        self._is_first = is_first

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep(f"{self._label}reduce", self._reduce),)

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep(f"{self._label}gather", self._gather),)

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        where = "across the hosts of a switch" if self._label else "in each host"
        return f"{where} by the backend, {self._width} part(s)"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`. The backend's own deadline frees its waits."""

    def close(self) -> None:
        """See :class:`Leg`. The groups belong to who made them."""

    def _reduce(self, chunk: Chunk) -> None:
        source, group = chunk.top, self._reduce_group
        if source is None:
            chunk.held.append(None)
            return
        if chunk.scale is not None and chunk.scale_first and self._is_first:
            source.mul_(chunk.scale)
        if group is None:
            part: torch.Tensor | None = source
        elif self._is_native(source, group):
            part = _parts(source, self._width)[group.index]
            self._collectives.start_reduce_scatter(part, source, group).wait(leg="reduce", **chunk.attributes)
        else:
            part = self._reduce_by_exchange(chunk, source, group)
        if part is not None and chunk.scale is not None and self._is_last_sum and not chunk.scale_first:
            part.mul_(chunk.scale)
        chunk.held.append(part)

    def _reduce_by_exchange(self, chunk: Chunk, source: torch.Tensor, group: RankGroup) -> torch.Tensor | None:
        parts = _parts(source, self._width)
        own = parts[group.index] if group.index < self._width else None
        received: dict[int, torch.Tensor] = {}
        if own is not None:
            received = {i: torch.empty_like(own) for i in range(group.size) if i != group.index}
        sends = [(owner, part) for owner, part in enumerate(parts) if owner != group.index]
        pending = self._collectives.start_exchange(sends, list(received.items()), group, "reduce_scatter")
        pending.wait(leg="reduce", **chunk.attributes)
        if own is None:
            return None
        terms = [own if i == group.index else received[i] for i in range(group.size)]
        half = own.dtype in (torch.float16, torch.bfloat16) and not chunk.maximum
        total = terms[0].float() if half else terms[0].clone()
        for term in terms[1:]:
            chunk.combine(total, term.float() if half else term, total)
        own.copy_(total)
        return own

    def _gather(self, chunk: Chunk) -> None:
        part = chunk.held.pop()
        target, group = chunk.top, self._gather_group
        if target is None or group is None:
            return
        if self._is_native(target, group):
            assert part is not None
            self._collectives.start_all_gather(target, part, group).wait(leg="gather", **chunk.attributes)
            return
        parts = _parts(target, self._width)
        receives = [(owner, piece) for owner, piece in enumerate(parts) if owner != group.index]
        sends = [] if part is None else [(i, part) for i in range(group.size) if i != group.index]
        self._collectives.start_exchange(sends, receives, group, "all_gather").wait(leg="gather", **chunk.attributes)

    def _is_native(self, tensor: torch.Tensor, group: RankGroup) -> bool:
        in_order = group.ranks == tuple(sorted(group.ranks))
        even = group.size == self._width and tensor.numel() % self._width == 0
        return even and in_order and not self._collectives.blocks_host


class AllReduceLeg:
    """The top leg: the backend's all-reduce of each part among its owners.

    Args:
        collectives: The seam.
        group: The owners of this rank's part; ``None`` if it owns none.
        max_in_flight: All-reduces that may be under way at a time.
        is_only: Whether there is no inner leg, so that this leg scales also what must be scaled first.
    """

    def __init__(self, *, collectives: Collectives, group: RankGroup | None, max_in_flight: int, is_only: bool) -> None:
        self._collectives = collectives
        self._group = group
        self._is_only = is_only
        self._in_flight = threading.Semaphore(max_in_flight)

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`. The second step only waits, so that the next chunk is under way meanwhile."""
        return (NamedStep("cross", self._start), NamedStep("finish", self._finish))

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return ()

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        size = self._group.size if self._group else "the owning"
        return f"all-reduce among {size} ranks"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`."""
        self._in_flight.release()

    def close(self) -> None:
        """See :class:`Leg`."""

    def _start(self, chunk: Chunk) -> None:
        part = chunk.top
        if part is None or self._group is None:
            return
        if self._is_only and chunk.scale is not None and chunk.scale_first:
            part.mul_(chunk.scale)
        if self._collectives.blocks_host and not self._in_flight.acquire(timeout=self._collectives.timeout_s):
            with self._collectives.translated("all_reduce", self._group):
                raise CollectiveTimeoutError(
                    f"none of those under way ended within {self._collectives.timeout_s:g} s (sync.timeout_s)"
                )
        op = dist.ReduceOp.MAX if chunk.maximum else dist.ReduceOp.SUM
        chunk.pending = self._collectives.start_all_reduce(part, self._group, op)

    def _finish(self, chunk: Chunk) -> None:
        if chunk.pending is None:
            return
        chunk.pending.wait(leg="cross", **chunk.attributes)
        chunk.pending = None
        if self._collectives.blocks_host:
            self._in_flight.release()
        part = chunk.top
        if part is not None and chunk.scale is not None and not chunk.scale_first:
            part.mul_(chunk.scale)


class EncodedLeg:
    """The top leg with a codec: parts cross encoded, are summed decoded in fp32, and cross back encoded.

    Each owner first receives its sub-part from all others and sums it (exact but for the encoding of what it received),
    rounds the sum once, then sends it to all others. Every owner, the summing one too, takes the rounded sum, so that
    the result is the same on all ranks to the bit. The two halves are steps of two lanes with a group each.

    Args:
        collectives: The seam.
        scatter_group: The owners of this rank's part, for the first half; ``None`` if it owns none.
        gather_group: The same ranks, for the second half.
        codec: How values are encoded.
        is_only: Whether there is no inner leg, so that this leg scales also what must be scaled first.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        scatter_group: RankGroup | None,
        gather_group: RankGroup | None,
        codec: CastCodec,
        is_only: bool,
    ) -> None:
        self._collectives = collectives
        self._scatter_group = scatter_group
        self._gather_group = gather_group
        self._codec = codec
        self._is_only = is_only

    @property
    def up(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return (NamedStep("cross", self._scatter), NamedStep("cross_gather", self._gather))

    @property
    def down(self) -> Sequence[NamedStep]:
        """See :class:`Leg`."""
        return ()

    @property
    def description(self) -> str:
        """See :class:`Leg`."""
        size = self._scatter_group.size if self._scatter_group else "the owning"
        return f"all-reduce among {size} ranks as {self._codec.name}"

    def abort(self, reason: str) -> None:
        """See :class:`Leg`. The backend's own deadline frees its waits."""

    def close(self) -> None:
        """See :class:`Leg`."""

    def _scatter(self, chunk: Chunk) -> None:
        part, group = chunk.top, self._scatter_group
        if part is None or group is None:
            return
        pieces = _parts(part, group.size)
        own = pieces[group.index]
        encoded = torch.empty(part.numel(), dtype=self._wire(part), device=part.device)
        if self._wire(part) == part.dtype:
            encoded.copy_(part)
        else:
            self._codec.encode(part, encoded)
        received = {i: torch.empty(own.numel(), dtype=encoded.dtype, device=own.device) for i in _others(group)}
        sends = [(i, piece) for i, piece in enumerate(_parts(encoded, group.size)) if i != group.index]
        pending = self._collectives.start_exchange(sends, list(received.items()), group, "reduce_scatter")
        pending.wait(leg="cross", **chunk.attributes)
        total = own.float() if own.dtype.is_floating_point else own.clone()
        for values in received.values():
            chunk.combine(total, values.to(total.dtype), total)
        if chunk.scale is not None and (self._is_only or not chunk.scale_first):
            total.mul_(chunk.scale)
        _parts(encoded, group.size)[group.index].copy_(total)
        chunk.encoded = encoded

    def _gather(self, chunk: Chunk) -> None:
        part, group, encoded = chunk.top, self._gather_group, chunk.encoded
        if part is None or group is None or encoded is None:
            return
        pieces = _parts(encoded, group.size)
        sends = [(i, pieces[group.index]) for i in _others(group)]
        receives = [(i, pieces[i]) for i in _others(group)]
        pending = self._collectives.start_exchange(sends, receives, group, "all_gather")
        pending.wait(leg="cross", **chunk.attributes)
        part.copy_(encoded)
        chunk.encoded = None

    def _wire(self, part: torch.Tensor) -> torch.dtype:
        return self._codec.wire_dtype if self._codec.applies_to(part.dtype) else part.dtype


def _others(group: RankGroup) -> list[int]:
    return [i for i in range(group.size) if i != group.index]
