"""A model spread over ranks, and what its shards travel over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.build.run import RunContext, side_stream
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import make_group
from lightning_dist.comm.hierarchical import HierarchicalAllReduce, open_all_reduce_across
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.errors import CombinationError, PlacementError
from lightning_dist.gradsync.sparse import has_sparse_gradients
from lightning_dist.parallel.sharded import Sharded
from lightning_dist.parallel.zero import ShardLinks, open_mesh, shard


def open_shard_links(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> ShardLinks:
    """Lanes and groups for sharded parameters; every rank calls it.

    Raises:
        PlacementError: The mode needs as many ranks on each host, and they differ.
    """
    cluster, world_size = run.cluster, run.cluster.world_size
    hosts = [cluster.ranks_of_host(host) for host in cluster.hosts]
    by_host = parallel.mode == "hsdp" or parallel.secondary_shard == "host"
    if by_host and len(set(cluster.ranks_per_host)) > 1:
        asked = "parallel=hsdp" if parallel.mode == "hsdp" else "parallel.secondary_shard=host"
        raise PlacementError(
            f"{asked} needs as many ranks on each host; {', '.join(cluster.hosts)} have "
            f"{', '.join(map(str, cluster.ranks_per_host))}. Write parallel=zero3 with parallel.secondary_shard=off"
        )
    with run.collectives.opening("opening the shards' groups", run.world):
        groups = _ShardGroups(run, sync)
        replicas = tuple(zip(*hosts, strict=True)) if by_host else ()
        parts: Sequence[Sequence[int]] = hosts if parallel.mode == "hsdp" else [range(world_size)]
        secondary = parallel.secondary_shard == "host" and cluster.num_hosts > 1
        return ShardLinks(
            mesh=open_mesh([groups.make(parts, "shards")], device_type=run.device.type),
            scatter=groups.scatter(parts, "shards"),
            secondary=open_mesh(
                [groups.make(replicas, "hosts"), groups.make(hosts, "host")], device_type=run.device.type, ranks=hosts
            )
            if secondary
            else None,
            secondary_scatter=groups.scatter(hosts, "secondary") if secondary else None,
            across=groups.all_reduce(replicas) if parallel.mode == "hsdp" and cluster.num_hosts > 1 else None,
            world=groups.make([range(world_size)], "whole"),
            collectives=run.collectives,
            vote=Agreement(run.collectives.blocking_host(), world_size),
            operation=run.operation,
            groups=groups.made,
        )


class _ShardGroups:
    """Makes groups and lanes over parts of the world, in the same order on every rank, and keeps what it made."""

    def __init__(self, run: RunContext, sync: SyncConfig) -> None:
        self.made: list[RankGroup] = []
        self._run = run
        self._sync = sync
        flat = sync.algorithm == "flat"
        self._cluster = run.cluster.flattened() if flat else run.cluster
        self._codec = codec_of(sync.wire_dtype) if run.cluster.num_hosts > 1 else None

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
            rank=run.rank,
            store=run.own_store(purpose),
            timeout_s=self._sync.timeout_s,
            chunk_bytes=self._sync.chunk_bytes,
            parts=parts,
            codec=self._codec,
        )

    def all_reduce(self, parts: Sequence[Sequence[int]]) -> HierarchicalAllReduce:
        """Sums over parts that have one rank on each host."""
        run, sync = self._run, self._sync
        return open_all_reduce_across(
            parts, config=sync, collectives=run.collectives, device=run.device, rank=run.rank, store=run.store
        )


def shard_model(
    module: torch.nn.Module, links: ShardLinks, *, run: RunContext, parallel: ParallelConfig, by_child: bool
) -> Sharded:
    """Shard a module; every rank calls it.

    Args:
        module: Whole, or on the meta device.
        links: What shards travel over.
        run: For the seam and the device.
        parallel: Mode and options.
        by_child: See :func:`~lightning_dist.parallel.zero.shard`.

    Raises:
        CombinationError: The module has gradients that cannot be sharded.
    """
    if has_sparse_gradients(module):
        raise CombinationError(
            f"nn.Embedding(sparse=True) does not go with parallel.mode={parallel.mode}, whose gradients are dense: "
            "write sparse=False, or parallel=ddp, which sends only the rows that were used"
        )
    seed = [torch.initial_seed() % (1 << 62)]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the seed"):
            dist.broadcast_object_list(seed, 0)
    with side_stream(run.device), run.collectives.opening("sharding the model", run.world):
        return shard(module, parallel, links, device=run.device, seed=seed[0], by_child=by_child)


def describe_shards(run: RunContext, sharded: Sharded, links: ShardLinks) -> str:
    """How the model is spread, in a few lines."""
    shards = links.scatter.members
    replicas = run.cluster.world_size // len(shards)
    copies = f", {replicas} replicas" if replicas > 1 else ""
    return f"hierdist: {run.cluster.world_size} ranks; {len(shards)} shards{copies}\n{sharded.description}"
