"""Who reads which part of the data."""

from __future__ import annotations

from lightning_dist.build.pipeline import place_stages
from lightning_dist.build.run import RunContext
from lightning_dist.build.tensor import place_ranks
from lightning_dist.config import ParallelConfig
from lightning_dist.data.order.replicas import Replicas
from lightning_dist.topology import Layout


def replicas_of(run: RunContext, parallel: ParallelConfig) -> Replicas:
    """The replicas of the model and their hosts. Ranks that share layers, or a pipeline, are one and read the same.

    The host of one whose stages sit on several is that of its first rank.
    """
    cluster = run.cluster
    numbers = {host: number for number, host in enumerate(cluster.hosts)}
    host_of_rank = [numbers[cluster.host_of(rank)] for rank in range(cluster.world_size)]
    if not (parallel.splits or parallel.stages):
        return Replicas(tuple(host_of_rank), run.rank)
    layout = layout_of(run, parallel)
    first: dict[int, int] = {}
    for rank in range(cluster.world_size):
        first.setdefault(_replica_of(layout, rank), rank)
    hosts = tuple(host_of_rank[first[replica]] for replica in range(len(first)))
    return Replicas(hosts, _replica_of(layout, run.rank))


def layout_of(run: RunContext, parallel: ParallelConfig) -> Layout:
    """Where ranks that share layers, or a pipeline, sit."""
    return (place_stages if parallel.stages else place_ranks)(run.cluster, parallel)


def _replica_of(layout: Layout, rank: int) -> int:
    place = layout.coordinates(rank)
    return place.dp_replicate * layout.axes.dp_shard + place.dp_shard
