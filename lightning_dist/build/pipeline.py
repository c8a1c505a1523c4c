"""A model cut into stages: which ranks make a pipeline, what each holds, and what connects them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.build.groups import GroupMaker, mode_of
from lightning_dist.build.run import RunContext, describe_ranks, side_stream
from lightning_dist.build.stage_values import draw_stage_values, make_shared_alike
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import broadcast_from_first, make_group
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.config.pipeline import position_of_stage
from lightning_dist.errors import CombinationError, ConfigError, PlacementError
from lightning_dist.gradsync.part_average import PartAverage
from lightning_dist.gradsync.sparse import has_sparse_gradients
from lightning_dist.parallel.lost_weights import has_lost_weights, raise_lost
from lightning_dist.parallel.materialize import is_on_meta, materialize
from lightning_dist.parallel.pipeline import LayeredModel, StagedModel, StageLinks, find_layers
from lightning_dist.parallel.pipeline.channels import ACTIVATION, GRADIENT, Boundary, Channels
from lightning_dist.parallel.pipeline.cut import Cut, cost_of, cut_model
from lightning_dist.parallel.pipeline.graph import enter
from lightning_dist.parallel.pipeline.links import LayerMesh
from lightning_dist.parallel.pipeline.runner import kept_buffers
from lightning_dist.parallel.pipeline.split import check_split, split_evenly
from lightning_dist.parallel.pipeline.stage import as_tuple
from lightning_dist.parallel.pipeline.staged_model import crossings
from lightning_dist.parallel.tensor import make_mesh, parallelize
from lightning_dist.topology import Axes, Cluster, Layout
from lightning_dist.topology.layout import DATA_AXES

_TIMED_RUNS = 3


def pipeline_size(cluster: Cluster, parallel: ParallelConfig) -> int:
    """Ranks of a pipeline; 1 where the model is not cut."""
    if parallel.pipeline.size is not None or parallel.mode != "pipeline":
        return parallel.pipeline.size or 1
    sharers = parallel.tensor.size or 1
    sizes = {ranks // sharers for ranks in cluster.ranks_per_host}
    return sizes.pop() if len(sizes) == 1 and max(sizes) > 1 else max(1, cluster.world_size // sharers)


def place_stages(cluster: Cluster, parallel: ParallelConfig) -> Layout:
    """Who is which stage of which pipeline.

    Raises:
        PlacementError: The number of ranks is no multiple of the pipeline's, or ranks that share layers would sit on
            several hosts; the message names sizes that work, or the groups that would cross.
        CombinationError: The schedule does not take the number of micro-batches.
    """
    size, sharers = pipeline_size(cluster, parallel), parallel.tensor.size or 1
    if cluster.world_size % (size * sharers):
        raise _no_pipelines(cluster.world_size, size, sharers)
    parallel.pipeline.check_size(size)
    same = cluster.world_size // (size * sharers)
    axes = Axes(pp=size, dp_replicate=same, tp=sharers)
    if parallel.shards:
        axes = Axes(pp=size, dp_shard=same)
    place = Layout.in_rank_order if parallel.pipeline.placement == "rank_order" else Layout.place
    try:
        return place(cluster, axes)
    except PlacementError as error:
        fitting = math.gcd(sharers, *cluster.ranks_per_host)
        instead = f"parallel.tensor.size={fitting if fitting > 1 else 'null'}"
        if fitting == sharers:
            instead = "parallel.pipeline.placement=auto"
        raise PlacementError(f"{error}. Write {instead}") from error


def _no_pipelines(ranks: int, size: int, sharers: int) -> PlacementError:
    fitting = [str(n) for n in range(2, ranks + 1) if ranks % (n * sharers) == 0]
    stages = f"{size} stages of {sharers} ranks that share layers" if sharers > 1 else str(size)
    others = "another parallel.tensor.size" if sharers > 1 else "parallel=ddp"
    instead = f"parallel.pipeline.size={' or '.join(fitting)}" if fitting else others
    counted = "1 rank does" if ranks == 1 else f"{ranks} ranks do"
    return PlacementError(f"parallel.pipeline.size={size}: {counted} not make pipelines of {stages}; write {instead}")


def open_stage_links(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> StageLinks:
    """The groups of pipelines; every rank calls it.

    Raises:
        PlacementError: See :func:`place_stages`.
    """
    layout = place_stages(run.cluster, parallel)
    with run.collectives.opening("opening the pipelines' groups", run.world):
        maker = GroupMaker(run, sync, mode=mode_of(parallel))
        pipelines, replicas = layout.groups("pp"), [sorted(part) for part in layout.groups(*DATA_AXES)]
        both_ways = parallel.pipeline.stages_per_rank > 1
        directions = [(ACTIVATION, True), (GRADIENT, False)]
        directions += [(ACTIVATION, False), (GRADIENT, True)] if both_ways else []
        channels = {each: maker.make(pipelines, each[0]) for each in directions}
        maker.made.clear()  # the channels close them
        pipeline = maker.make(pipelines, "pipeline")
        splits = layout.axes.tp > 1
        return StageLinks(
            layout=layout,
            pipeline=pipeline,
            data=maker.make(replicas, "data"),
            channels=Channels(channels, run.collectives, run.device),
            scatter=maker.scatter(replicas, "averages") if len(replicas[0]) > 1 else None,
            collectives=run.collectives,
            groups=maker.made,
            readers=maker.make(layout.groups("pp", "tp"), "readers") if splits else pipeline,
            tensor=maker.make(layout.groups("tp"), "tp") if splits else None,
            layers=_mesh_of(layout, run, sync) if splits else None,
        )


def _mesh_of(layout: Layout, run: RunContext, sync: SyncConfig) -> LayerMesh:
    device_type = run.device.type
    return LayerMesh(make_mesh(layout, rank=run.rank, device_type=device_type, timeout_s=sync.timeout_s, axes=("tp",)))


def cut_into_stages(
    module: nn.Module, links: StageLinks, *, run: RunContext, parallel: ParallelConfig, sync: SyncConfig
) -> StagedModel:
    """Cut a model into stages, with rank 0's values; split its layers first, if they are to be. Every rank calls it.

    Args:
        module: Whole on each rank, or on the meta device: then each rank makes its stages, or, if layers are to be
            split, the whole of it.
        links: Its groups.
        run: For the seam and the device.
        parallel: Options.
        sync: For the deadline of groups.

    Raises:
        ConfigError: The module does not say how it can be cut, or has too few layers, or the plan does not fit it.
        CombinationError: It has gradients that are sparse.
    """
    if has_sparse_gradients(module):
        raise CombinationError(
            "nn.Embedding(sparse=True) does not go with pipeline stages, whose gradients are dense: write "
            "sparse=False, or parallel=ddp"
        )
    if has_lost_weights(module):
        raise_lost(type(module).__name__)
    config, size = parallel.pipeline, links.pipeline.size
    if is_on_meta(module) and links.layers is not None:
        with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
            materialize(module, run.device)
    is_deferred = is_on_meta(module)
    if not is_deferred:
        module.to(run.device)
    model = find_layers(module, config.layers)
    positions = position_of_stage(config.schedule, size, size * config.stages_per_rank)
    with side_stream(run.device), run.collectives.opening("cutting the model into stages", run.world):
        values = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
        if values and run.cluster.world_size > 1:
            with run.operation("broadcast of parameters"):
                broadcast_from_first(values)
        counts = _counts(module, model, run, parallel, len(positions))
        if is_deferred:
            draw_stage_values(module, cut_model(module, model, counts, positions), links, run)
            module.to(run.device)
            model = find_layers(module, config.layers)  # of the parameters that stay
        split = None
        if links.layers is not None:
            mesh, tensor = links.layers.mesh, parallel.tensor
            split = parallelize(module, mesh, plan=tensor.plan, loss_parallel=tensor.loss_parallel)
        try:
            cut = cut_model(module, model, counts, positions)
            shared_groups = _shared_groups(cut, links, run, sync, by_shard=parallel.shards)
            if is_deferred:
                make_shared_alike(cut, shared_groups, links, run)
        except BaseException:
            if split is not None:
                split.abandon()
            raise
        return StagedModel(
            module,
            cut,
            links,
            shared_groups=shared_groups,
            config=config,
            events=run.events,
            device=run.device,
            failed=lambda error, said: run.testimony.post(f"{said}: {type(error).__name__}: {error}", own_fault=True),
            split=split,
        )


def average_stages(
    staged: StagedModel, links: StageLinks, *, parallel: ParallelConfig, sync: SyncConfig
) -> tuple[dict[int, PartAverage], PartAverage | None]:
    """What averages gradients over pipelines: stage -> its own, and what is complete at the end of a batch only."""
    scatter = links.scatter
    if scatter is None:
        return {}, None

    def any_of(said: Sequence[bool]) -> list[bool]:
        votes = torch.tensor(said, dtype=torch.uint8, device=staged.stages[0].device)
        if votes.numel():
            links.collectives.all_reduce(votes, links.data, dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def average(parameters: dict[str, nn.Parameter]) -> PartAverage:
        vote = any_of if parallel.find_unused_parameters else None
        return PartAverage(parameters, scatter, bucket_bytes=sync.bucket_bytes, vote=vote, watches=False)

    own: dict[nn.Parameter, str] = {}
    by_stage = {}
    for stage in staged.stages:
        mine = {name: p for name, p in staged.parameters_of(stage).items() if p not in own}
        own.update({parameter: name for name, parameter in mine.items()})
        by_stage[stage.stage_index] = average(mine)
    late = staged.late_parameters
    return by_stage, average(late) if late else None


def describe_stages(run: RunContext, staged: StagedModel, links: StageLinks, parallel: ParallelConfig) -> str:
    """How a model is cut, and where its stages are, in a few lines."""
    config, cut, layout = parallel.pipeline, staged.cut, links.layout
    size, count = links.pipeline.size, config.micro_batches_for(links.pipeline.size)
    replicas = layout.groups(*DATA_AXES)
    same = len(replicas[0])
    lines = [
        f"hierdist: {describe_ranks(run.cluster)}; {same} pipeline{'' if same == 1 else 's'} of {size} ranks, "
        f"schedule {config.schedule}, up to {count} micro-batches, split by "
        f"{'hand' if config.split else config.balance}"
        + (f"; {parallel.mode}: each stage in {same} shards" if parallel.shards and same > 1 else "")
    ]
    if staged.split is not None:
        lines[0] += f"; in each stage {staged.split.split.describe()}"
    for stage in range(len(cut.counts)):
        layers = cut.layers_of(stage)
        names = layers[0].name if len(layers) == 1 else f"{layers[0].name} ... {layers[-1].name}"
        ranks = [rank for rank in layout.order if layout.coordinates(rank).pp == cut.positions[stage]]
        own = sum(p.numel() for p in {p for layer in layers for m in layer.modules for p in m.parameters()})
        lines.append(f"  stage {stage} on rank {', '.join(map(str, ranks))}: {names} ({own:,} parameters)")
    return "\n".join(lines)


def describe_boundaries(run: RunContext, staged: StagedModel, links: StageLinks) -> str:
    """What crosses each boundary of this rank's pipeline in a step, as the last batch did; collective."""
    own = {
        stage.stage_index: _boundary_bytes([each[number][1] for each in staged.runner.boundaries])
        for number, stage in enumerate(staged.stages)
    }
    sizes = {stage: size for heard in staged.gather.exchange(own) for stage, size in heard.items()}
    lines = []
    for stage in range(len(staged.cut.counts) - 1):
        forward, backward = (size * links.layout.axes.tp for size in sizes[stage])
        ends = [links.pipeline.ranks[staged.cut.positions[s]] for s in (stage, stage + 1)]
        tier = "in the rank" if ends[0] == ends[1] else run.cluster.tier_of(ends).value
        lines.append(
            f"  stage {stage} -> {stage + 1} ({tier}): {forward / 1e6:,.2f} MB of activations, {backward / 1e6:,.2f} "
            "MB of gradients a step"
        )
    return "\n".join(["hierdist: what crosses the boundaries of a pipeline", *lines])


def needless_crossings(run: RunContext, staged: StagedModel, links: StageLinks, parallel: ParallelConfig) -> str | None:
    """What to warn of: stages placed so that more boundaries cross hosts than need to; ``None``: they are not."""
    best = Layout.place(run.cluster, links.layout.axes)
    positions = staged.cut.positions

    def count(layout: Layout) -> int:
        return sum(crossings([run.cluster.host_of(r) for r in group], positions) for group in layout.groups("pp"))

    now, then = count(links.layout), count(best)
    if now <= then:
        return None
    order = "; ".join(str(list(group)) for group in best.groups("pp")[:4])
    return (
        f"parallel.pipeline.placement={parallel.pipeline.placement} puts {now} boundaries between stages across hosts, "
        f"and {then} are enough, with the pipelines on ranks {order}: write parallel.pipeline.placement=auto"
    )


def _counts(
    module: nn.Module, model: LayeredModel, run: RunContext, parallel: ParallelConfig, stages: int
) -> tuple[int, ...]:
    config = parallel.pipeline
    if config.split:
        return check_split(config.split, len(model.layers))
    if config.balance == "parameters":
        return split_evenly([cost_of(layer) for layer in model.layers], stages)
    if is_on_meta(module):
        raise ConfigError(
            "parallel.pipeline.balance=time runs all layers on one rank, and the model is on the meta device, to be "
            "whole on none: write parallel.pipeline.balance=parameters, or parallel.pipeline.split by hand"
        )
    example = _example(module)  # asked on every rank, so that all refuse
    costs: list[list[float]] = [_timed(module, model, run.device, example) if run.rank == 0 else []]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the layers' costs"):
            run.meet()
            dist.broadcast_object_list(costs, 0)
    return split_evenly(costs[0], stages)


def _example(module: nn.Module) -> torch.Tensor:
    example = getattr(module, "example_input_array", None)
    if not isinstance(example, torch.Tensor):
        raise ConfigError(
            f"parallel.pipeline.balance=time measures layers on {type(module).__name__}.example_input_array, which is "
            "not set: set it to a tensor as the model is called with, or write parallel.pipeline.balance=parameters"
        )
    return example


def _timed(module: nn.Module, model: LayeredModel, device: torch.device, example: torch.Tensor) -> list[float]:
    """Seconds of each layer's forward and backward on an example input; the fastest of a few runs."""
    best = [float("inf")] * len(model.layers)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), kept_buffers(module), torch.enable_grad():
        for _ in range(_TIMED_RUNS):
            values: tuple[torch.Tensor, ...] = (example.to(device).clone(),)  # layers may work in place
            for index, layer in enumerate(model.layers):
                given = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in values)
                start = _now(device)
                result = as_tuple(layer.call(*enter(given)))
                roots = [r for r in result if isinstance(r, torch.Tensor) and r.requires_grad]
                if roots:
                    wanted: list[torch.Tensor] = [p for m in layer.modules for p in m.parameters() if p.requires_grad]
                    wanted += [value for value in given if value.requires_grad]
                    torch.autograd.grad([r.sum() for r in roots], wanted, allow_unused=True)
                best[index] = min(best[index], _now(device) - start)
                values = result
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _shared_groups(
    cut: Cut, links: StageLinks, run: RunContext, sync: SyncConfig, *, by_shard: bool
) -> dict[tuple[int, ...], RankGroup]:
    """A group for each set of ranks that hold parameters together; every rank makes those of all pipelines.

    Where stages are sharded, holders of the same shard belong together; they may be in different pipelines.
    """
    found = {}
    same = [sorted(part) for part in links.layout.groups(*DATA_AXES)]  # as shards are numbered
    pipelines = list(zip(*same, strict=True)) if by_shard else links.layout.groups("pp")
    for holders in cut.shared():
        for pipeline in pipelines:
            ranks = sorted(pipeline[position] for position in holders)
            group = make_group(
                ranks, rank=run.rank, label="tied", tier=run.cluster.tier_of(ranks).value, timeout_s=sync.timeout_s
            )
            if group is not None:
                links.groups.append(group)
                found[holders] = group
    return found


def _boundary_bytes(boundaries: Sequence[Boundary]) -> tuple[int, int]:
    """(bytes of activations, bytes of gradients) of what crosses one boundary for some micro-batches."""
    kinds = [kind for boundary in boundaries for kind in boundary]
    return sum(kind.size_bytes for kind in kinds), sum(kind.size_bytes for kind in kinds if kind.has_gradient)
