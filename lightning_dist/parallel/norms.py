"""Norms and clipping of gradients that are spread over ranks: decided on global values, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.comm.collectives import Collectives, RankGroup


class GlobalNorm:
    """The norm of all gradients, as if they were whole. Every rank makes it, and calls it with the same parameters.

    A gradient that is a ``DTensor`` is spread over the group's ranks; any other is the same on all of them.

    Args:
        collectives: The seam.
        shards: The ranks that share the shards.
    """

    def __init__(self, collectives: Collectives, shards: RankGroup) -> None:
        self._collectives = collectives
        self._shards = shards

    def total(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
        """The norm over all gradients, fp32, 0-dim; 0 if there is none.

        Args:
            parameters: Those without a gradient do not count.
            norm_type: Which norm; ``math.inf`` is the largest absolute value.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        spread = [g._local_tensor for g in gradients if isinstance(g, DTensor)]
        whole = [g for g in gradients if not isinstance(g, DTensor)]
        device = gradients[0].device if gradients else torch.device("cpu")
        part = _power(spread, norm_type, device)
        if self._shards.size > 1:
            largest = math.isinf(norm_type)
            self._collectives.all_reduce(part, self._shards, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        rest = _power(whole, norm_type, device)
        if math.isinf(norm_type):
            return torch.maximum(part, rest)[0]
        return (part + rest)[0].pow(1.0 / norm_type)

    def clip(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; the norm before.

        Raises:
            RuntimeError: The norm is not finite, and ``error_if_nonfinite``; on all ranks alike.
        """
        listed = list(parameters)
        norm = self.total(listed, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the total norm of gradients is {float(norm)}, so they cannot be clipped")
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for local in _locals(listed):
            local.mul_(scale.to(local.dtype))
        return norm

    def clip_values(self, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """Bring each value of each gradient between ``-limit`` and ``limit``; needs no other rank."""
        for local in _locals(parameters):
            local.clamp_(-limit, limit)


def _locals(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """What each gradient holds on this rank."""
    return [p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]


def _power(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """[1], fp32: the sum of absolute values to the power of ``norm_type``, or the largest of them."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros(1, device=device)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(filled, norm_type)])
    return norms.max().view(1) if math.isinf(norm_type) else norms.pow(norm_type).sum().view(1)
