"""Groups and lanes over parts of the world, made in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.build.feedback import feedback_of
from lightning_dist.build.run import RunContext
from lightning_dist.comm.codecs import chunk_bytes_of, codec_of
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import make_group
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.opening import open_all_reduce_across
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.config import ParallelConfig, SyncConfig


def mode_of(parallel: ParallelConfig) -> str:
    """What becomes of the model, in a word that differs where gradients are made of other parts of it."""
    return f"{parallel.mode}, {parallel.stages} stages, {parallel.tensor.size} a layer"


class GroupMaker:
    """Makes groups and lanes over parts of the world, in the same order on every rank, and keeps what it made.

    Args:
        run: For the cluster and the seam.
        sync: How values travel.
        mode: See :func:`mode_of`.
    """

    def __init__(self, run: RunContext, sync: SyncConfig, *, mode: str) -> None:
        self.made: list[RankGroup] = []
        self._run = run
        self._sync = sync
        flat = sync.algorithm == "flat"
        self._cluster = run.cluster.flattened() if flat else run.cluster
        self._feedback = feedback_of(run, sync, mode=mode)
        self._codec = codec_of(sync) if run.cluster.num_hosts > 1 or sync.everywhere else None

    def make(self, parts: Sequence[Sequence[int]], label: str) -> RankGroup:
        """This rank's group among ``parts``."""
        run, own = self._run, None
        for part in parts:
            tier = run.cluster.tier_of(part).value
            group = make_group(part, rank=run.rank, label=label, tier=tier, timeout_s=self._sync.timeout_s)
            own = group if group is not None else own
        assert own is not None, "every rank is in a part"
        self.made.append(own)
        return own

    def scatter(self, parts: Sequence[Sequence[int]], purpose: str) -> HierarchicalScatter:
        """Lanes over the parts."""
        run = self._run
        return HierarchicalScatter(
            self._cluster,
            collectives=run.collectives,
            device=run.device,
            store=run.own_store(purpose),
            timeout_s=self._sync.timeout_s,
            chunk_bytes=self._sync.chunk_bytes,
            encoded_chunk_bytes=chunk_bytes_of(self._sync, messages=len(parts[0])),
            parts=parts,
            codec=self._codec,
            everywhere=self._sync.everywhere,
            shares_memory=self._sync.shared_memory == "auto",
            feedback=self._feedback,
        )

    def all_reduce(self, parts: Sequence[Sequence[int]]) -> HierarchicalAllReduce:
        """Sums over parts that have one rank on each host."""
        run, sync = self._run, self._sync
        return open_all_reduce_across(
            parts,
            config=sync,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.store,
            feedback=self._feedback,
        )
