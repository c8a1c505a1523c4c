"""Local SGD: who trains together, over what, and what workers average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from lightning_dist.build.feedback import BETWEEN_WORKERS, feedback_of
from lightning_dist.build.groups import GroupMaker, mode_of
from lightning_dist.build.run import RunContext
from lightning_dist.comm.agreement import Agreement, GroupVote, PartingVote
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.opening import open_all_reduce, open_all_reduce_across, open_all_reduce_inside
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.errors import CombinationError, PlacementError
from lightning_dist.gradsync.local_sgd import LocalSGD, OuterOptimizer, OuterWeights, Timetable, Workers
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.zero import open_mesh
from lightning_dist.topology.layout import Axes, Layout


def workers_of(run: RunContext, sync: SyncConfig) -> Workers:
    """Who trains together; one worker where nothing is to be averaged."""
    cluster = run.cluster
    if sync.local_sgd.workers == "ranks":
        return Workers(tuple((rank,) for rank in range(cluster.world_size)), run.rank)
    return Workers(tuple(tuple(cluster.ranks_of_host(host)) for host in cluster.hosts), run.rank)


def exactly(sync: SyncConfig) -> SyncConfig:
    """The same for what is no mean over workers: gradients, and parameters that are gathered."""
    return dataclasses.replace(sync, algorithm="hierarchical", codec="same", gathers="same", everywhere=False)


def open_worker_gradients(
    run: RunContext, sync: SyncConfig, workers: Workers
) -> tuple[HierarchicalAllReduce, RankGroup]:
    """Lanes and a group for gradients inside each worker; every rank calls it."""
    with run.collectives.opening("opening the workers' groups", run.world):
        groups = GroupMaker(run, exactly(sync), mode="worker")
        all_reduce = open_all_reduce_inside(
            workers.parts,
            config=sync,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.store,
        )
        return all_reduce, groups.make(workers.parts, "worker")


def open_shard_links_inside(
    run: RunContext, parallel: ParallelConfig, sync: SyncConfig, workers: Workers, *, meets_first: bool
) -> ShardLinks:
    """Lanes and groups for parameters that are sharded inside each worker; every rank calls it.

    Args:
        run: For the cluster and the seam.
        parallel: Mode and options.
        sync: How values travel.
        workers: Who trains together.
        meets_first: Whether workers average gradients at first.

    Raises:
        PlacementError: Workers differ in their number of ranks.
    """
    sizes = [len(part) for part in workers.parts]
    if len(set(sizes)) > 1:
        raise PlacementError(
            f"sync=local_sgd with parallel={parallel.mode} needs as many ranks on each host, so that shards have "
            f"counterparts; {', '.join(run.cluster.hosts)} have {', '.join(map(str, sizes))}. Write parallel=ddp"
        )
    order = tuple(rank for part in workers.parts for rank in part)
    replicas = tuple(zip(*workers.parts, strict=True))
    with run.collectives.opening("opening the shards' groups", run.world):
        groups = GroupMaker(run, exactly(sync), mode=mode_of(parallel))
        shards = groups.make(workers.parts, "shards")
        world = groups.make([range(run.cluster.world_size)], "whole")
        inside = groups.make(workers.parts, "worker")
        return ShardLinks(
            layout=Layout(run.cluster, Axes(dp_replicate=len(workers.parts), dp_shard=sizes[0]), order),
            axes=frozenset({"dp_shard"}),
            mesh=open_mesh([shards], device_type=run.device.type),
            scatter=groups.scatter(workers.parts, "shards"),
            secondary=None,
            secondary_scatter=None,
            across=groups.all_reduce(replicas) if meets_first else None,
            world=world,
            collectives=run.collectives,
            vote=PartingVote(
                Agreement(run.collectives.blocking_host(), run.cluster.world_size),
                GroupVote(run.collectives, inside, run.device),
            ),
            operation=run.operation,
            groups=groups.made,
            inside=inside,
        )


def open_outer_lanes(
    run: RunContext, parallel: ParallelConfig, sync: SyncConfig, workers: Workers
) -> HierarchicalAllReduce:
    """Lanes for means over workers; every rank calls it.

    Where each rank has the whole model, ranks of a host share the way to other hosts; where it is sharded, each has
    the counterparts of its own shard.
    """
    config = dataclasses.replace(sync, everywhere=False)
    feedback = feedback_of(run, config, mode=f"{mode_of(parallel)}{BETWEEN_WORKERS}")
    with run.collectives.opening("opening the outer groups", run.world):
        if parallel.mode == "ddp":
            return open_all_reduce(
                run.cluster,
                config=config,
                collectives=run.collectives,
                device=run.device,
                rank=run.rank,
                store=run.store,
                purpose="outer",
                feedback=feedback,
            )
        return open_all_reduce_across(
            tuple(zip(*workers.parts, strict=True)),
            config=config,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.store,
            purpose="outer",
            feedback=feedback,
        )


def local_sgd_of(
    run: RunContext,
    module: torch.nn.Module,
    sync: SyncConfig,
    *,
    warmup_steps: int,
    workers: Workers,
    lanes: HierarchicalAllReduce,
    agreement: Agreement,
    values_of: Callable[[torch.Tensor], torch.Tensor],
    start_of: Callable[[torch.nn.Parameter], int],
) -> LocalSGD:
    """The scheme, of a module as it will be trained.

    Args:
        run: For events.
        module: Wrapped or sharded, on its device.
        sync: Options.
        warmup_steps: So many first steps are made together.
        workers: Who trains together.
        lanes: Of :func:`open_outer_lanes`.
        agreement: Used by nobody else.
        values_of: See :class:`~lightning_dist.gradsync.local_sgd.weights.OuterWeights`.
        start_of: As that.

    Raises:
        CombinationError: A parameter is complex.
    """
    _refuse_complex(list(module.named_parameters()))
    options = sync.local_sgd
    has_momentum = options.outer_momentum > 0
    weights = OuterWeights(module, values_of=values_of, start_of=start_of, has_momentum=has_momentum)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in weights.parameters.items()}
    return LocalSGD(
        weights,
        sizes,
        timetable=Timetable(
            every=options.every,
            fragments=options.fragments,
            warmup_steps=warmup_steps,
            overlap_steps=options.overlap_steps,
        ),
        optimizer=OuterOptimizer(options.outer_lr, options.outer_momentum, options.nesterov),
        kept=options.kept,
        lanes=lanes,
        vote=agreement.any_of,
        workers=workers,
        events=run.events,
    )


def describe_local_sgd(local: LocalSGD, sync: SyncConfig) -> str:
    """Who trains apart, when they meet and how, in a line."""
    options, timetable = sync.local_sgd, local.timetable
    said = [f"{len(local.workers.parts)} workers train apart"]
    if timetable.warmup_steps:
        said.append(f"after {timetable.warmup_steps} steps together")
    said.append(f"and average every {timetable.every} optimizer steps")
    if timetable.fragments > 1:
        said.append(f"in {timetable.fragments} fragments")
    if timetable.overlap_steps:
        said.append(f"which arrive {timetable.overlap_steps} steps later")
    momentum = f"momentum {options.outer_momentum:g}" if options.outer_momentum else "no momentum"
    kind = "Nesterov " if options.outer_momentum and options.nesterov else ""
    return f"hierdist: {' '.join(said)}; outer lr {options.outer_lr:g}, {kind}{momentum}; {local.lanes.description}"


def _refuse_complex(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    if wrong := [name for name, parameter in named if parameter.is_complex()]:
        raise CombinationError(
            f"{wrong[0]} is complex, which sync=local_sgd does not average: write sync=hierarchical, or keep it as "
            "real numbers (torch.view_as_real)"
        )
