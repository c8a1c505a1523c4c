"""The in-host leg on CPU, through memory that the host's ranks share."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import torch

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.legs import Chunk, NamedStep, part_bounds, part_start, sum_in_order
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.errors import CollectiveTimeoutError


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
        size_bytes = source.numel() * source.element_size()
        group = self._reduce_group
        with self._collectives.operation(
            "reduce_scatter", group, leg="reduce", size_bytes=size_bytes, **chunk.attributes
        ):
            part = self._reduce_into_window(chunk, source)
            chunk.rise(part, part_start(source.numel(), self._width, self._index))

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
        slots = [self._slot(member, source, sequence)[low:high] for member in range(memory.size)]
        slots[self._index] = source[low:high]
        scale = chunk.scale if self._is_last_sum or chunk.scale_first else None
        sum_in_order(slots, part, maximum=chunk.maximum, scale=scale)
        return part

    def _gather(self, chunk: Chunk) -> None:
        part = chunk.sink()
        target = chunk.top
        assert target is not None
        size_bytes = target.numel() * target.element_size()
        group = self._gather_group
        with self._collectives.operation("all_gather", group, leg="gather", size_bytes=size_bytes, **chunk.attributes):
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
