"""Stages of a pipeline spread over the ranks that hold the same ones, and what their shards travel over."""

from __future__ import annotations

from lightning_dist.build.run import RunContext, side_stream
from lightning_dist.comm.agreement import GroupVote
from lightning_dist.config import ParallelConfig
from lightning_dist.parallel.pipeline import StagedModel, StageLinks
from lightning_dist.parallel.pipeline.shards import ShardedStages, stage_owners
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.zero import open_mesh, shard
from lightning_dist.topology.layout import DATA_AXES


def open_stage_shard_links(run: RunContext, links: StageLinks) -> ShardLinks:
    """Shards on the lanes of the ranks that hold the same stages; every rank calls it.

    Args:
        run: For the seam.
        links: Of a pipeline that is not alone; they own what is opened here.
    """
    assert links.scatter is not None, "several ranks hold the same stages"
    return ShardLinks(
        layout=links.layout,
        axes=frozenset(DATA_AXES),
        mesh=open_mesh([links.data], device_type=run.device.type),
        scatter=links.scatter,
        secondary=None,
        secondary_scatter=None,
        across=None,
        world=links.data,
        collectives=run.collectives,
        vote=GroupVote(run.collectives, links.data, run.device),
        operation=links.among_replicas,
        groups=(),
        brings_values=False,
    )


def shard_stages(staged: StagedModel, links: ShardLinks, *, run: RunContext, parallel: ParallelConfig) -> ShardedStages:
    """Shard the stages of this rank; every rank calls it.

    Args:
        staged: The model, with the same values on every rank.
        links: What shards travel over.
        run: For the seam and the device.
        parallel: Mode and options.
    """
    names = {parameter: f"module.{name}" for name, parameter in staged.module.named_parameters()}
    owners = stage_owners(staged)
    with side_stream(run.device), run.collectives.opening("sharding the stages", run.world):
        sharded = shard(staged.module, parallel, links, device=run.device, seed=0, owners=owners)
    return ShardedStages(staged, sharded, names)
