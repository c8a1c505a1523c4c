"""Norms, clipping and optimizers where parameters are of several kinds.

After tensor parallelism a model holds plain tensors beside DTensors, which torch's functions over lists do not take
together (``clip_grad_norm_``, ``foreach`` and fused optimizers). After FSDP2 over the data axes all are DTensors, but
on two meshes: optimizers take those together, norms do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_dist.errors import CombinationError

Kind = tuple[DeviceMesh, tuple[Placement, ...]] | None
"""How a tensor is spread: mesh and, for each axis, whether parts or whole; ``None`` for a plain tensor."""


def global_norm(gradients: Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """The norm of gradients as of one process that has the whole model; alike on all ranks; collective.

    What is split is summed over the ranks that split it, what is whole counts once. One reduction for each kind of
    tensor and axis, in fp64.

    Args:
        gradients: Plain tensors and DTensors, in the same order on all ranks; of one device.
        norm_type: p, at least 1; ``inf`` is the largest absolute entry.

    Returns:
        0-dim, fp32, plain.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be at least 1, got {norm_type}")
    kinds: dict[Kind, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(_kind_of(gradient, norm_type), []).append(gradient)
    totals = [_reduced(kind, _local_total(tensors, norm_type)) for kind, tensors in kinds.items()]
    if not totals:
        return torch.zeros(())
    stacked = torch.stack(totals)
    if math.isinf(norm_type):
        return stacked.max().float()
    return stacked.sum().pow(1 / norm_type).float()


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; the norm before that; collective."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm([parameter.grad for parameter in held if parameter.grad is not None], norm_type=norm_type)
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm, foreach=False)
    return norm


def keep_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer treat tensor after tensor where a parameter group holds plain tensors and DTensors.

    On CUDA torch would take ``foreach`` by itself, which fails on such a group. After FSDP2 there is none.

    Raises:
        CombinationError: The user asked for ``fused`` or ``foreach``.
    """
    for index, group in enumerate(optimizer.param_groups):
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) < 2:
            continue
        for option in ("fused", "foreach"):
            if group.get(option):
                raise CombinationError(
                    f"{type(optimizer).__name__}({option}=True): parameter group {index} holds tensors that are split "
                    "over ranks beside others that are not, which it cannot take together; leave the option out"
                )
        if "foreach" in group:
            group["foreach"] = False


def _kind_of(gradient: Tensor, norm_type: float) -> Kind:
    if not isinstance(gradient, DTensor):
        return None
    how = "max" if math.isinf(norm_type) else "sum"
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("a gradient that is not reduced yet has no norm")
    placements = [Replicate() if placement.is_replicate() else Partial(how) for placement in gradient.placements]
    return gradient.device_mesh, tuple(placements)


def _local_total(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Sum of the p-th powers of all local entries, or their largest; 0-dim, fp64."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    filled = [tensor for tensor in local if tensor.numel()] or [local[0].new_zeros(1)]
    norm = torch.nn.utils.get_total_norm(filled, norm_type)
    return norm.double() if math.isinf(norm_type) else norm.double().pow(norm_type)


def _reduced(kind: Kind, total: Tensor) -> Tensor:
    if kind is None:
        return total
    mesh, placements = kind
    return DTensor.from_local(total, mesh, placements).full_tensor()
