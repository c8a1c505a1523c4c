"""A model spread over ranks, and what its shards travel over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.build.feedback import low_rank_feedback_of
from lightning_dist.build.groups import GroupMaker, mode_of
from lightning_dist.build.run import RunContext, describe_ranks, side_stream
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.codecs import gathers_of
from lightning_dist.comm.opening import open_all_reduce
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.errors import PlacementError
from lightning_dist.gradsync.powersgd import RowProducts
from lightning_dist.parallel.row_gradients import TablesBeside
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.sharded import Sharded
from lightning_dist.parallel.tensor import TensorLinks, TensorParallel
from lightning_dist.parallel.zero import open_mesh, shard
from lightning_dist.topology import Cluster
from lightning_dist.topology.layout import Axes, Layout


def open_shard_links(
    run: RunContext, parallel: ParallelConfig, sync: SyncConfig, tensor: TensorLinks | None = None
) -> ShardLinks:
    """Lanes and groups for sharded parameters; every rank calls it.

    Args:
        run: For the cluster and the seam.
        parallel: Mode and options.
        sync: How values travel.
        tensor: Of layers that are split; shards are then spread over the ranks that hold the same parts.

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
        groups = GroupMaker(run, sync, mode=mode_of(parallel))
        rows = _open_rows(run, parallel, sync)
        replicas: Sequence[Sequence[int]] = tuple(zip(*hosts, strict=True)) if by_host else ()
        parts: Sequence[Sequence[int]] = hosts if parallel.mode == "hsdp" else [range(world_size)]
        secondary = parallel.secondary_shard == "host" and cluster.num_hosts > 1
        if tensor is None:
            mesh = open_mesh([groups.make(parts, "shards")], device_type=run.device.type)
        else:
            parts = [sorted(part) for part in tensor.layout.groups("dp_shard")]
            replicas = tensor.layout.groups("dp_replicate")
            mesh = tensor.placed.mesh["dp_shard"]
        return ShardLinks(
            layout=_layout_of(cluster, parallel) if tensor is None else tensor.layout,
            axes=frozenset({"dp_shard"}),
            mesh=mesh,
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
            brings_values=tensor is None,
            gathers=gathers_of(sync) if cluster.num_hosts > 1 or sync.everywhere else None,
            rows=rows,
            in_host=groups.scatter(hosts, "in_host") if rows is not None else None,
        )


def _open_rows(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> RowProducts | None:
    """Of ``sync=powersgd`` on several hosts."""
    feedback = low_rank_feedback_of(run, sync, mode=mode_of(parallel))
    if feedback is None:
        return None
    all_reduce = open_all_reduce(
        run.cluster,
        config=sync,
        collectives=run.collectives,
        device=run.device,
        rank=run.rank,
        store=run.store,
        purpose="factors",
    )
    return RowProducts(all_reduce, feedback)


def _layout_of(cluster: Cluster, parallel: ParallelConfig) -> Layout:
    """Of shards over all ranks, or, as often as there are hosts, over those of a host."""
    if parallel.mode != "hsdp":
        return Layout.in_rank_order(cluster, Axes(dp_shard=cluster.world_size))
    order = [rank for host in cluster.hosts for rank in cluster.ranks_of_host(host)]
    axes = Axes(dp_replicate=cluster.num_hosts, dp_shard=cluster.world_size // cluster.num_hosts)
    return Layout(cluster, axes, tuple(order))


def shard_model(
    module: torch.nn.Module,
    links: ShardLinks,
    *,
    run: RunContext,
    parallel: ParallelConfig,
    by_child: bool,
    split: TensorParallel | None = None,
    tables: TablesBeside | None = None,
) -> Sharded:
    """Shard a module; every rank calls it.

    Args:
        module: Whole, or on the meta device.
        links: What shards travel over.
        run: For the seam and the device.
        parallel: Mode and options.
        by_child: See :func:`~lightning_dist.parallel.zero.shard`.
        split: What has split its layers before.
        tables: What has sparse gradients, and who averages them.
    """
    seed = [torch.initial_seed() % (1 << 62)]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the seed"):
            run.meet()
            dist.broadcast_object_list(seed, 0)
    with side_stream(run.device), run.collectives.opening("sharding the model", run.world):
        return shard(
            module, parallel, links, device=run.device, seed=seed[0], by_child=by_child, split=split, tables=tables
        )


def describe_shards(
    run: RunContext, sharded: Sharded, links: ShardLinks, *, parallel: ParallelConfig, num_data: int
) -> str:
    """How the model is spread, in a few lines.

    Args:
        run: For the ranks.
        sharded: The model.
        links: What its shards travel over.
        parallel: Mode and options.
        num_data: Ranks that read different data.
    """
    shards = len(links.scatter.members)
    said = [f"{shards} shard{'' if shards == 1 else 's'}"]
    if num_data > shards:
        said.append(f"{num_data // shards} replicas")
    if links.secondary is not None:
        said.append("kept a second time in each host")
    return f"hierdist: {describe_ranks(run.cluster)}; {parallel.mode}: {', '.join(said)}\n{sharded.description}"
