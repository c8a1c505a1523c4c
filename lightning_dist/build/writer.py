"""Writing what is copied: planned anew, or, into memory, by the plan of the save before as long as the layout stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_dist.build.copied_shares import Copied
from lightning_dist.build.replicas import Mirror, Replicas
from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.repeated import Repeatable, Repeater
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.comm import watchful
from lightning_dist.comm.collectives import RankGroup

SPREAD = "checkpoint spread"  # names of events
WRITTEN = "checkpoint written"  # bytes, as they are


class Writer:
    """Writes what is copied, in the thread of a save; every rank calls it alike.

    Args:
        run: For the seam and the events.
        group: All ranks; nobody else uses it meanwhile.
        chunk_bytes: See :class:`~lightning_dist.config.CheckpointConfig`.
        intact: Raises if what is copied is not what it is to be.
    """

    def __init__(self, run: RunContext, group: RankGroup, *, chunk_bytes: int, intact: Callable[[], None]) -> None:
        self._run = run
        self._group = group
        self._chunk_bytes = chunk_bytes
        self._intact = intact
        self._planned: tuple[Repeater, tuple[tuple[Any, ...], ...]] | None = None  # the newest for memory only

    def write(
        self,
        target: Folder,
        copied: Copied,
        record: Mapping[str, Any],
        remember: Callable[[Repeatable], None] | None = None,
    ) -> Manifest | None:
        """Write a checkpoint, planned anew; the manifest, on the coordinator."""
        run = self._run
        return sharded.save(
            dict(copied.state),
            target,
            rank=run.rank,
            host=run.cluster.host_of(run.rank),
            group=self._group.process_group,
            record=record,
            chunk_bytes=self._chunk_bytes,
            written=self._count,
            intact=self._intact,
            remember=remember,
        )

    def keep(self, replicas: Replicas, mirror: Mirror, copied: Copied, record: Mapping[str, Any]) -> bool:
        """Write into memory, and commit it there; whether it is on all buddies, too.

        Raises:
            CheckpointError: It could not be; the same on all ranks.
        """
        if self._planned is not None:
            repeater, layout = self._planned
            is_spread = repeater.save(
                copied.state,
                replicas.kept_save(mirror),
                record=record,
                is_same=layout == copied.layout and repeater.is_for(copied.objects),
                intact=self._intact,
                written=self._count,
            )
            if is_spread is not None:
                return is_spread
        planned: list[Repeatable] = []
        self.write(mirror.folder, copied, record, planned.append)
        group = self._group.process_group if self._run.cluster.world_size > 1 else None
        self._planned = Repeater(planned[0], rank=self._run.rank, group=group), copied.layout
        return self.spread(replicas, mirror)

    def spread(self, replicas: Replicas, mirror: Mirror) -> bool:
        """Send what was written to buddies; older ones go, unless the loss of a host would leave nothing of this one.

        Returns:
            Whether it is on all of them.
        """
        run = self._run
        with run.events.measure(SPREAD, lane="checkpoint"):
            is_spread = torch.tensor(int(replicas.spread(mirror)))
        group = self._group.process_group
        assert group is not None, "ranks do not meet in shared memory for it"
        watchful.all_reduce(is_spread, torch.distributed.ReduceOp.MIN, group, run.collectives)
        if is_spread:
            replicas.forget_others(mirror)
        return bool(is_spread)

    def _count(self, size_bytes: int) -> None:
        self._run.events.count(WRITTEN, size_bytes, lane="checkpoint")
