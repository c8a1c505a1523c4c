"""A model cut into stages: which ranks make a pipeline, what each holds, and what connects them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.build.groups import GroupMaker
from lightning_dist.build.run import RunContext, describe_ranks, side_stream
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
from lightning_dist.parallel.pipeline.runner import kept_buffers
from lightning_dist.parallel.pipeline.split import check_split, split_evenly
from lightning_dist.parallel.pipeline.stage import as_tuple
from lightning_dist.parallel.pipeline.staged_model import crossings
from lightning_dist.topology import Axes, Cluster, Layout
from lightning_dist.topology.layout import DATA_AXES

_TIMED_RUNS = 3


def pipeline_size(cluster: Cluster, parallel: ParallelConfig) -> int:
    """Ranks of a pipeline; 1 where the model is not cut."""
    if parallel.pipeline.size is not None or parallel.mode != "pipeline":
        return parallel.pipeline.size or 1
    sizes = set(cluster.ranks_per_host)
    return sizes.pop() if len(sizes) == 1 and sizes != {1} else cluster.world_size


def place_stages(cluster: Cluster, parallel: ParallelConfig) -> Layout:
    """Who is which stage of which pipeline.

    Raises:
        PlacementError: The number of ranks is no multiple of the pipeline's; the message names sizes that work.
        CombinationError: The schedule does not take the number of micro-batches.
    """
    size = pipeline_size(cluster, parallel)
    if cluster.world_size % size:
        fitting = [str(n) for n in range(2, cluster.world_size + 1) if cluster.world_size % n == 0]
        raise PlacementError(
            f"parallel.pipeline.size={size}: {cluster.world_size} ranks do not make pipelines of {size}; write "
            f"parallel.pipeline.size={' or '.join(fitting)}"
        )
    parallel.pipeline.check_size(size)
    same = cluster.world_size // size
    axes = Axes(pp=size, dp_shard=same) if parallel.shards else Axes(pp=size, dp_replicate=same)
    if parallel.pipeline.placement == "rank_order":
        return Layout.in_rank_order(cluster, axes)
    return Layout.place(cluster, axes)


def open_stage_links(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> StageLinks:
    """The groups of pipelines; every rank calls it.

    Raises:
        PlacementError: See :func:`place_stages`.
    """
    layout = place_stages(run.cluster, parallel)
    with run.collectives.opening("opening the pipelines' groups", run.world):
        maker = GroupMaker(run, sync)
        pipelines, replicas = layout.groups("pp"), [sorted(part) for part in layout.groups(*DATA_AXES)]
        both_ways = parallel.pipeline.stages_per_rank > 1
        directions = [(ACTIVATION, True), (GRADIENT, False)]
        directions += [(ACTIVATION, False), (GRADIENT, True)] if both_ways else []
        channels = {each: maker.make(pipelines, each[0]) for each in directions}
        maker.made.clear()  # the channels close them
        return StageLinks(
            layout=layout,
            pipeline=maker.make(pipelines, "pipeline"),
            data=maker.make(replicas, "data"),
            channels=Channels(channels, run.collectives, run.device),
            scatter=maker.scatter(replicas, "averages") if len(replicas[0]) > 1 else None,
            collectives=run.collectives,
            groups=maker.made,
        )


def cut_into_stages(
    module: nn.Module, links: StageLinks, *, run: RunContext, parallel: ParallelConfig, sync: SyncConfig
) -> StagedModel:
    """Cut a model into stages, with rank 0's values; every rank calls it.

    Args:
        module: Whole on each rank, or on the meta device.
        links: Its groups.
        run: For the seam and the device.
        parallel: Options.
        sync: For the deadline of groups.

    Raises:
        ConfigError: The module does not say how it can be cut, or has too few layers.
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
    model = find_layers(module, config.layers)
    if is_on_meta(module):
        with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
            materialize(module, run.device)
    module.to(run.device)
    positions = position_of_stage(config.schedule, size, size * config.stages_per_rank)
    with side_stream(run.device), run.collectives.opening("cutting the model into stages", run.world):
        values = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        if values and run.cluster.world_size > 1:
            with run.operation("broadcast of parameters"):
                broadcast_from_first(values)
        cut = cut_model(module, model, _counts(module, model, run, parallel, len(positions)), positions)
        return StagedModel(
            module,
            cut,
            links,
            shared_groups=_shared_groups(cut, links, run, sync, by_shard=parallel.shards),
            config=config,
            events=run.events,
            device=run.device,
            failed=lambda error, said: run.testimony.post(f"{said}: {type(error).__name__}: {error}", own_fault=True),
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
    for stage in range(len(cut.counts)):
        layers = cut.layers_of(stage)
        names = layers[0].name if len(layers) == 1 else f"{layers[0].name} ... {layers[-1].name}"
        ranks = replicas[cut.positions[stage]]
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
        forward, backward = sizes[stage]
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
    costs: list[list[float]] = [_timed(module, model, run.device) if run.rank == 0 else []]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the layers' costs"):
            dist.broadcast_object_list(costs, 0)
    return split_evenly(costs[0], stages)


def _timed(module: nn.Module, model: LayeredModel, device: torch.device) -> list[float]:
    """Seconds of each layer's forward and backward on the module's example input; the fastest of a few runs."""
    example = getattr(module, "example_input_array", None)
    if not isinstance(example, torch.Tensor):
        raise ConfigError(
            f"parallel.pipeline.balance=time measures layers on {type(module).__name__}.example_input_array, which is "
            "not set: set it to a tensor as the model is called with, or write parallel.pipeline.balance=parameters"
        )
    best = [float("inf")] * len(model.layers)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), kept_buffers(module), torch.enable_grad():
        for _ in range(_TIMED_RUNS):
            values: tuple[torch.Tensor, ...] = (example.to(device),)
            for index, layer in enumerate(model.layers):
                given = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in values)
                start = _now(device)
                result = as_tuple(layer.call(*given))
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
