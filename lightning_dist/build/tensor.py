"""Layers split over the ranks of a host: who shares them, and what the rest of the ranks do."""

from __future__ import annotations

import math

import torch

from lightning_dist.build.groups import GroupMaker, mode_of
from lightning_dist.build.run import RunContext, side_stream
from lightning_dist.comm.groups import broadcast_from_first
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.errors import CombinationError, PlacementError
from lightning_dist.gradsync.part_average import PartAverage, Vote
from lightning_dist.gradsync.sparse import has_sparse_gradients
from lightning_dist.parallel.materialize import is_on_meta, materialize
from lightning_dist.parallel.tensor import TensorLinks, TensorParallel, make_mesh, parallelize
from lightning_dist.topology import Axes, Cluster, Layout
from lightning_dist.topology.layout import DATA_AXES


def place_ranks(cluster: Cluster, parallel: ParallelConfig) -> Layout:
    """Who shares layers with whom, and who shards or averages with whom.

    Raises:
        PlacementError: The ranks that share layers would not sit on one host; the message names the groups.
    """
    size = _size_of(cluster, parallel)
    fitting = math.gcd(size, *cluster.ranks_per_host)
    instead = f"parallel.tensor.size={fitting}" if fitting > 1 else "parallel=ddp, or zero2 or zero3"
    if cluster.world_size % size:
        raise PlacementError(
            f"parallel.tensor.size={size}: {cluster.world_size} ranks ({_hosts(cluster)}) cannot be dealt to groups of "
            f"{size} that share layers; write {instead}"
        )
    data = cluster.world_size // size
    axes = Axes(dp_replicate=data, tp=size)
    if parallel.mode == "hsdp":
        axes = Axes(dp_replicate=cluster.num_hosts, dp_shard=max(1, data // cluster.num_hosts), tp=size)
    elif parallel.shards:
        axes = Axes(dp_shard=data, tp=size)
    try:
        return Layout.place(cluster, axes)
    except PlacementError as error:
        raise PlacementError(f"{error}. Write {instead}") from error


def _size_of(cluster: Cluster, parallel: ParallelConfig) -> int:
    """Ranks that share a layer."""
    if parallel.tensor.size is not None or parallel.mode != "tensor":
        return parallel.tensor.size or 1
    sizes = set(cluster.ranks_per_host)
    if len(sizes) == 1 and (sizes != {1} or cluster.world_size == 1):
        return sizes.pop()
    crossing = "; ".join(f"{list(cluster.ranks_of_host(host))} on {host}" for host in cluster.hosts[:8])
    fitting = math.gcd(*cluster.ranks_per_host)
    raise PlacementError(
        f"parallel=tensor shares each layer among all ranks of a host, and the hosts ({_hosts(cluster)}) make no equal "
        f"groups of two or more: {crossing}; groups of one size would cross hosts. Write "
        + (f"parallel.tensor.size={fitting}" if fitting > 1 else "parallel=ddp, or zero2 or zero3")
    )


def _hosts(cluster: Cluster) -> str:
    counted = [f"{host}: {len(cluster.ranks_of_host(host))}" for host in cluster.hosts[:8]]
    return ", ".join(counted) + (", ..." if cluster.num_hosts > len(counted) else "")


def open_tensor_links(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> TensorLinks:
    """The groups of split layers; every rank calls it.

    Raises:
        PlacementError: See :func:`place_ranks`.
    """
    layout = place_ranks(run.cluster, parallel)
    with run.collectives.opening("opening the groups of split layers", run.world):
        placed = make_mesh(
            layout,
            rank=run.rank,
            device_type=run.device.type,
            timeout_s=sync.timeout_s,
            axes=("dp_shard", "tp") if parallel.shards else ("tp",),
        )
        maker = GroupMaker(run, sync, mode=mode_of(parallel))
        parts = [sorted(part) for part in layout.groups(*DATA_AXES)]
        data = maker.make(parts, "data")
        averages = not parallel.shards and len(parts[0]) > 1
        scatter = maker.scatter(parts, "averages") if averages else None
        return TensorLinks(layout, placed, data, scatter, run.collectives)


def split_module(
    module: torch.nn.Module, links: TensorLinks, *, run: RunContext, parallel: ParallelConfig
) -> TensorParallel:
    """Split a module's layers, with rank 0's values; every rank calls it.

    Args:
        module: Whole on each rank, or on the meta device: it then is whole until it has been split.
        links: Its groups.
        run: For the seam and the device.
        parallel: Options.

    Raises:
        ConfigError: The plan does not fit the module.
        CombinationError: Nor does the number of ranks, or it has gradients that are sparse.
    """
    if has_sparse_gradients(module):
        raise CombinationError(
            "nn.Embedding(sparse=True) does not go with split layers, whose gradients are dense: write sparse=False, "
            "or parallel=ddp"
        )
    if is_on_meta(module):
        with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
            materialize(module, run.device)
    module.to(run.device)
    values = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    tensor = parallel.tensor
    with side_stream(run.device), run.collectives.opening("splitting the model's layers", run.world):
        if values and run.cluster.world_size > 1:
            with run.operation("broadcast of parameters"):
                broadcast_from_first(values)
        return parallelize(module, links.mesh, plan=tensor.plan, loss_parallel=tensor.loss_parallel)


def average_parts(
    module: torch.nn.Module, links: TensorLinks, *, parallel: ParallelConfig, sync: SyncConfig, vote: Vote
) -> PartAverage | None:
    """What averages gradients over the ranks that hold the same parts; ``None`` where there is one.

    Args:
        module: Split.
        links: Its groups.
        parallel: Options.
        sync: For the size of buckets.
        vote: How ranks learn which parameters any of them used.
    """
    if links.scatter is None:
        return None
    return PartAverage(
        dict(module.named_parameters()),
        links.scatter,
        bucket_bytes=sync.bucket_bytes,
        vote=vote if parallel.find_unused_parameters else None,
    )


def describe_split(run: RunContext, split: TensorParallel, links: TensorLinks) -> str:
    """How layers are split, and how many ranks read other data, in a line."""
    data = links.data.size
    copies = f"{data} groups of them read different data" if data > 1 else "all read the same data"
    return f"hierdist: {run.cluster.world_size} ranks; {split.split.describe()}; {copies}"
