"""Legs over process groups: Gloo between hosts and where ranks do not share memory, NCCL on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.legs import Chunk, NamedStep, part_start, parts_of, sum_in_order
from lightning_dist.errors import CollectiveTimeoutError


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
            chunk.rise(None, 0)
            return
        if chunk.scale is not None and chunk.scale_first and self._is_first:
            source.mul_(chunk.scale)
        if group is None:
            part: torch.Tensor | None = source
        elif not chunk.maximum and self._is_native(source, group):  # the backend's own is a sum
            part = parts_of(source, self._width)[group.index]
            self._collectives.start_reduce_scatter(part, source, group).wait(leg="reduce", **chunk.attributes)
        else:
            part = self._reduce_by_exchange(chunk, source, group)
        if part is not None and chunk.scale is not None and self._is_last_sum and not chunk.scale_first:
            part.mul_(chunk.scale)
        chunk.rise(part, part_start(source.numel(), self._width, group.index) if group is not None else 0)

    def _reduce_by_exchange(self, chunk: Chunk, source: torch.Tensor, group: RankGroup) -> torch.Tensor | None:
        parts = parts_of(source, self._width)
        own = parts[group.index] if group.index < self._width else None
        received: dict[int, torch.Tensor] = {}
        if own is not None:
            received = {i: torch.empty_like(own) for i in range(group.size) if i != group.index}
        sends = [(owner, part) for owner, part in enumerate(parts) if owner != group.index]
        pending = self._collectives.start_exchange(sends, list(received.items()), group, "reduce_scatter")
        pending.wait(leg="reduce", **chunk.attributes)
        if own is None:
            return None
        total = torch.empty_like(own)
        terms = [own if i == group.index else received[i] for i in range(group.size)]
        sum_in_order(terms, total, maximum=chunk.maximum)
        own.copy_(total)
        return own

    def _gather(self, chunk: Chunk) -> None:
        part = chunk.sink()
        target, group = chunk.top, self._gather_group
        if target is None or group is None:
            return
        if self._is_native(target, group):
            assert part is not None
            self._collectives.start_all_gather(target, part, group).wait(leg="gather", **chunk.attributes)
            return
        parts = parts_of(target, self._width)
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
