"""ZeRO-1, 2 and 3 and hybrid shards: one mechanism, FSDP2's ``fully_shard``, and a policy for each.

ZeRO: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. The secondary
shard inside a host is hpZ of Wang et al., "ZeRO++: extremely efficient collective communication for giant model
training", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import broadcast_from_first
from lightning_dist.config import ParallelConfig
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.beside_shards import BesideShards, beside_shards
from lightning_dist.parallel.blocks import describe_blocks, survey_blocks, without_parameters
from lightning_dist.parallel.children import Owners, child_owners
from lightning_dist.parallel.fsdp_groups import (
    adopt_ties,
    groups_of,
    initialise,
    names_of_groups,
    params_of,
    places_of_parameters,
)
from lightning_dist.parallel.lane_comm import LaneAllGather, LaneReduceScatter
from lightning_dist.parallel.lane_sums import LaneSums
from lightning_dist.parallel.lost_weights import has_lost_weights, raise_lost
from lightning_dist.parallel.materialize import is_on_meta, materialize
from lightning_dist.parallel.reduction import GradientReduction
from lightning_dist.parallel.replicated import ReplicatedGradients
from lightning_dist.parallel.row_gradients import TablesBeside, sparse_embeddings
from lightning_dist.parallel.row_sums import RowSums
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.shard_tensors import ShardTensors
from lightning_dist.parallel.sharded import Sharded, ShardPolicy
from lightning_dist.parallel.tensor.model import TensorParallel
from lightning_dist.parallel.unsharding import undo_sharding

POLICIES: dict[str, ShardPolicy] = {
    "zero1": ShardPolicy(keeps_parameters=True, sums_each_micro_step=False),
    "zero2": ShardPolicy(keeps_parameters=True, sums_each_micro_step=True),
    "zero3": ShardPolicy(keeps_parameters=False, sums_each_micro_step=True),
    "hsdp": ShardPolicy(keeps_parameters=False, sums_each_micro_step=True, replicates=True),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    module: nn.Module,
    config: ParallelConfig,
    links: ShardLinks,
    *,
    device: torch.device,
    seed: int,
    by_child: bool = False,
    owners: Owners | None = None,
    split: TensorParallel | None = None,
    tables: TablesBeside | None = None,
) -> Sharded:
    """Spread a module over ranks; every rank calls it.

    Values are rank 0's, as under DDP, or, where the module was made on the meta device, drawn block by block, so that
    it is never whole on a rank.

    Args:
        module: Whole on each rank, on any device, or on the meta device.
        config: Mode and options.
        links: What shards travel over.
        device: Where its parameters are to live.
        seed: Of parameters made on the meta device; the same on all ranks.
        by_child: Shard each child for itself; parameters that are not in exactly one of them stay whole. FSDP2 gathers
            the rest of a module once for its whole forward, so a forward that trains, as manual optimization does, must
            not have one.
        owners: Of a model cut into stages: the modules that are sharded each for itself, by a schedule.
        split: What has split the module's layers before; its values are alike on all ranks already.
        tables: What is left out, because its gradients are sparse; ``None``: there are none.

    Raises:
        CombinationError: A parameter that FSDP2 does not take is split.
        ConfigError: A name of ``parallel.shard_modules`` matches nothing, or a module on the meta device cannot make
            its values.
        LostWeightsError: A fit of the module has failed.
    """
    _refuse_unusable(module)
    policy = policy_of(config)
    sharded = Sharded(
        module,
        operation=links.operation,
        policy=policy,
        by_child=by_child or owners is not None,
        broadcast_buffers=config.broadcast_buffers,
    )
    was_meta = is_on_meta(module)
    if was_meta and tables is not None:
        _materialize_tables(module, device, seed)
    named = dict(sharded.named_parameters())
    originals = {} if was_meta else {name: p for name, p in named.items() if not isinstance(p, DTensor)}
    rest: list[nn.Module] = [sharded]
    by_schedule, elsewhere = owners is not None, owners.elsewhere if owners is not None else frozenset()
    if by_child and owners is None:
        owners = child_owners(module)
    beside = beside_shards(sharded, config, tables, owners)
    survey = survey_blocks(module, named=tuple(config.shard_modules))
    survey = without_parameters(survey, frozenset(beside.tables.values())) if beside.tables else survey
    sharded.description = describe_blocks(survey) + beside.description
    blocks = [block.module for block in survey.blocks]  # those inside others come first
    if owners is not None:
        blocks = owners.inside(blocks) if by_schedule else blocks
        rest = [owner for owner in owners.modules if owner not in blocks]
    places = places_of_parameters(module)
    try:
        _apply(sharded, blocks, rest, beside, config, links, device=device, seed=seed)
    except BaseException:
        undo_sharding(sharded, {} if was_meta else named)
        raise
    if by_schedule:
        adopt_ties(params_of(sharded), places)
    for parameter in originals.values():
        if parameter not in beside.parameters and parameter not in elsewhere:
            parameter.data = parameter.data.new_empty(0)  # its values live in the shards now
    reduction = _connect(sharded, config, links, beside, by_schedule=by_schedule)
    full = ShardTensors(sharded, links.scatter, split, axes=links.axes)
    sharded.complete(reduction=reduction, full=full, originals=originals, was_whole=not was_meta)
    return sharded


def _materialize_tables(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give tables on the meta device memory and values before all else: they are told apart by what they are."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for embedding in sparse_embeddings(module):
            materialize(embedding, device)


def _refuse_unusable(module: nn.Module) -> None:
    """Refuse a module that has lost its weights, or is sharded already."""
    if has_lost_weights(module):
        raise_lost(type(module).__name__)
    if any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise ConfigError(
            "the model is sharded already, by another Trainer's strategy or by fully_shard in your code; give the "
            "same Trainer the model again, or make a new model"
        )


def policy_of(config: ParallelConfig) -> ShardPolicy:
    """The policy of a mode; conditional use of modules needs all parameters gathered in one order."""
    policy = POLICIES[config.mode]
    if config.find_unused_parameters and not policy.keeps_parameters:
        return ShardPolicy(True, policy.sums_each_micro_step, policy.replicates)
    return policy


def _apply(
    sharded: Sharded,
    blocks: Sequence[nn.Module],
    rest: Sequence[nn.Module],
    beside: BesideShards,
    config: ParallelConfig,
    links: ShardLinks,
    *,
    device: torch.device,
    seed: int,
) -> None:
    """FSDP2 on each block, then on the rest; what is on the meta device gets memory just before."""
    if rest != [sharded]:
        materialize(sharded.module, device, skip=[*blocks, *rest])
        _align(sharded.module, [*blocks, *rest], beside, links, device)
    policy = policy_of(config)
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(config.gather_dtype),
        reduce_dtype=_DTYPES.get(config.reduce_dtype) or (torch.float32 if config.gather_dtype in _DTYPES else None),
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if config.cpu_offload and device.type == "cuda" else OffloadPolicy()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for target in (*blocks, *rest):
            inside = set(target.modules())
            others = [block for block in blocks if block is not target and block in inside]
            materialize(target, device, skip=others)
            _align(target, others, beside, links, device)
            for parameter in target.parameters():
                if not isinstance(parameter, DTensor):  # FSDP2 takes no other memory format; the values are the same
                    parameter.data = parameter.data.contiguous()
            fully_shard(
                target,
                mesh=links.mesh,
                reshard_after_forward=not policy.keeps_parameters and target not in rest,
                mp_policy=precision,
                offload_policy=offload,
                ignored_params=beside.parameters,
            )


def _align(
    target: nn.Module, others: Sequence[nn.Module], beside: BesideShards, links: ShardLinks, device: torch.device
) -> None:
    """Move what is about to be sharded to the device, with rank 0's values, as DDP does with a whole model."""
    done = {id(tensor) for other in others for tensor in (*other.parameters(), *other.buffers())}
    done |= {id(tensor) for tensor in beside.dealt.values()}
    tensors = [t for t in (*target.parameters(), *target.buffers()) if id(t) not in done]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    values = [tensor.detach() for tensor in tensors]
    if values and links.brings_values and links.world.size > 1:
        with links.operation("broadcast of parameters"):
            broadcast_from_first(values)


def _connect(
    sharded: Sharded,
    config: ParallelConfig,
    links: ShardLinks,
    beside: BesideShards,
    *,
    by_schedule: bool,
) -> GradientReduction:
    """Put our lanes and our order under FSDP2."""
    policy = policy_of(config)
    if links.secondary is not None and not policy.keeps_parameters:
        _keep_in_host(sharded, links.secondary)
    initialise(sharded)
    groups = groups_of(sharded)
    reduction = GradientReduction(
        sharded,
        sums=_sums_of(links),
        rows=beside.by_rows,
        replicated=ReplicatedGradients(beside.averaged, collectives=links.collectives, group=links.world),
        vote=links.vote.any_of if config.find_unused_parameters else None,
        keeps_parameters=policy.keeps_parameters,
        waits_at_once=config.cpu_offload or _casts_sums(sharded),
        max_pending=None if by_schedule else 4,
    )
    scatter_of = [(links.mesh.get_group(), links.scatter)]
    if links.secondary is not None and links.secondary_scatter is not None:
        scatter_of.append((links.secondary.get_group(1), links.secondary_scatter))
    for index, (group, name) in enumerate(zip(groups, names_of_groups(sharded), strict=True)):
        group._all_gather_comm = LaneAllGather(scatter_of, name=name, codec=links.gathers)
        group._reduce_scatter_comm = LaneReduceScatter(_bound(reduction, index))
        if links.mesh.size() == 1:  # FSDP2 then calls no collective
            group._all_reduce_hook = _sum_hook(reduction, index)
        group.reduce_scatter_unused_params = True
        group.unshard_async_op = True
    if not sharded.by_child:  # what is gathered for one child would be stale once another's optimizer has stepped
        _prefetch(sharded, config.prefetch)
    return reduction


def _sums_of(links: ShardLinks) -> LaneSums:
    if links.rows is None or links.in_host is None:
        return LaneSums(links.scatter, links.across)
    return RowSums(links.scatter, links.across, in_host=links.in_host, average=links.rows, world_size=links.world.size)


def _bound(reduction: GradientReduction, index: int) -> Callable[[torch.Tensor, torch.Tensor, bool], None]:
    return lambda output, gradients, mean: reduction.arrive(index, output, gradients, mean)


def _sum_hook(reduction: GradientReduction, index: int) -> Callable[[torch.Tensor], None]:
    return lambda output: reduction.arrive(index, output, None)


def _casts_sums(sharded: Sharded) -> bool:
    """Whether FSDP2 does something with a sum as soon as it has started it: a cast, or the scaling of fp16."""
    for group in groups_of(sharded):
        summed = group._reduce_dtype or (group.fsdp_params[0].param_dtype if group.fsdp_params else None)
        own = group._orig_dtype
        if (summed is not None and summed != own) or torch.float16 in (summed, own):
            return True
    return False


def _keep_in_host(sharded: Sharded, mesh: DeviceMesh) -> None:
    """Between forward and backward, keep 1/k of each block's parameters on each of a host's k ranks.

    FSDP2's own way (``reshard_after_forward=k``) groups ranks by their number, wherever they sit.
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in groups_of(sharded):
        if group.post_forward_mesh_info is None:
            continue
        group.post_forward_mesh_info = info
        for param in group.fsdp_params:
            param.post_forward_mesh_info = info
            param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))


def _prefetch(sharded: Sharded, depth: int) -> None:
    """Gather the next blocks while one computes; in backward the previous ones."""
    modules: list[FSDPModule] = [m for m in sharded.modules() if isinstance(m, FSDPModule)]
    for place, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + depth])
        if depth > 1:
            module.set_modules_to_backward_prefetch(modules[max(0, place - depth) : place][::-1])


def open_mesh(
    groups: Sequence[RankGroup], *, device_type: str, ranks: Sequence[Sequence[int]] | None = None
) -> DeviceMesh:
    """A device mesh on groups that exist.

    Args:
        groups: This rank's group for each dim, from outside in.
        device_type: ``cpu`` or ``cuda``.
        ranks: Global ranks of all dims; needed for more than one.
    """
    process_groups = [group.process_group for group in groups if group.process_group is not None]
    if len(process_groups) == 1:
        return DeviceMesh.from_group(process_groups[0], device_type, mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        process_groups, device_type, mesh=torch.tensor(ranks), mesh_dim_names=("replicate", "shard")
    )
