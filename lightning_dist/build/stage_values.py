"""Values of the parameters of stages that are made on the meta device: no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_dist.build.run import RunContext
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import broadcast_from_first
from lightning_dist.parallel.materialize import materialize
from lightning_dist.parallel.pipeline import StageLinks
from lightning_dist.parallel.pipeline.absent import placeholder
from lightning_dist.parallel.pipeline.cut import Cut


def draw_stage_values(module: nn.Module, cut: Cut, links: StageLinks, run: RunContext) -> None:
    """Give memory to what is on the meta device, and values: those that rank 0 would draw for the whole model.

    Each rank draws all of them, one submodule after another, and keeps those of its stages, alike on all ranks that
    hold the same; the others hold one value. Every rank calls it, inside the seam.

    Args:
        module: On the meta device, in part or whole; what is not has the same values on every rank.
        cut: Of the model as it is on the meta device.
        links: The pipeline's groups.
        run: For the seam and the device.
    """
    position = links.pipeline.index
    held = {tensor for tensor in cut.tensors if position in cut.holders(tensor)}
    names = [name for name, tensor in _tensors(module) if tensor.is_meta and tensor in held]

    def let_go(before: Tensor, after: Tensor) -> None:
        if before not in held:
            after.data = placeholder(after)

    is_cuda = run.device.type == "cuda"
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(run.device)] if is_cuda else [])]
    states = [state.to(run.device) for state in states]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the state of random numbers"):
            broadcast_from_first(states)
    with torch.random.fork_rng(devices=[run.device] if is_cuda else []):
        torch.set_rng_state(states[0].cpu())
        if is_cuda:
            torch.cuda.set_rng_state(states[1].cpu(), run.device)
        materialize(module, run.device, made=let_go)
    present = dict(_tensors(module))
    found = [present[name].detach() for name in names]
    if found and links.data.size > 1:  # a reset_parameters may draw from another generator
        with links.among_replicas("broadcast of parameters"):
            broadcast_from_first(found, links.data.process_group)


def make_shared_alike(
    cut: Cut, groups: Mapping[tuple[int, ...], RankGroup], links: StageLinks, run: RunContext
) -> None:
    """Give parameters that several stages use the values of the first; every rank calls it, inside the seam."""
    for holders, parameters in cut.shared().items():
        group = groups.get(holders)
        if group is None:
            continue
        for parameter in parameters:
            owner = cut.owner(parameter)
            source = next(rank for rank in group.ranks if links.layout.coordinates(rank).pp == owner)
            run.collectives.broadcast(parameter.detach(), group, source=source)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
