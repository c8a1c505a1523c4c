"""Norms and clipping of gradients that are spread over ranks: decided on global values, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.comm.collectives import Collectives, RankGroup

TENSOR_AXIS = "tp"
_DOUBLE = (torch.float64, torch.complex128)


class GlobalNorm:
    """The norm of all gradients, as if they were whole. Every rank makes it, and calls it with the same parameters.

    A gradient that is a ``DTensor`` is spread over the group of each axis along which it is; any other is the same on
    all ranks. Of a sparse one the rows that it has count, summed where it has them twice.

    Args:
        collectives: The seam.
        shards: The ranks that share the shards; ``None`` where nothing is sharded.
        tensor: The ranks that share layers, along the axis ``tp``; ``None`` where no layer is split.
        stages: The ranks of the pipeline; ``None`` where the model is not cut into stages.
        counts: Whether a parameter's gradient counts on this rank; another one counts it otherwise.
        dealt: Whether ``owners`` have a part each of a parameter's gradient, though it is no ``DTensor``.
        owners: Those ranks; ``None`` where nothing is dealt.
    """

    def __init__(
        self,
        collectives: Collectives,
        shards: RankGroup | None = None,
        tensor: RankGroup | None = None,
        *,
        stages: RankGroup | None = None,
        counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
        dealt: Callable[[nn.Parameter], bool] = lambda parameter: False,
        owners: RankGroup | None = None,
    ) -> None:
        self._collectives = collectives
        self._shards = shards
        self._tensor = tensor
        self._stages = stages
        self._counts = counts
        self._dealt = dealt
        self._owners = owners

    def total(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
        """The norm over all gradients, 0-dim; 0 if there is none. In fp32, in fp64 where a parameter is.

        Args:
            parameters: Those without a gradient do not count.
            norm_type: Which norm; ``math.inf`` is the largest absolute value.
        """
        listed = list(parameters)
        zero = torch.zeros(
            1,
            dtype=torch.float64 if any(p.dtype in _DOUBLE for p in listed) else torch.float32,
            device=listed[0].device if listed else torch.device("cpu"),
        )
        local: dict[tuple[bool, bool], list[torch.Tensor]] = {
            (True, False): [],  # over shards only; then over both; then over tp only; then whole
            (True, True): [],
            (False, True): [],
            (False, False): [],
        }
        dealt: list[torch.Tensor] = []
        for parameter in listed:
            if parameter.grad is not None and self._counts(parameter):
                owner = dealt if self._dealt(parameter) else local[_spread(parameter.grad)]
                owner.append(_local(parameter))
        powers = torch.cat([_power(tensors, norm_type, zero) for tensors in (*local.values(), dealt)])
        largest = math.isinf(norm_type)
        for group, part in (
            (self._shards, powers[:2]),
            (self._tensor, powers[1:3]),
            (self._owners, powers[4:]),
            (self._stages, powers),
        ):
            if group is not None and group.size > 1:
                self._collectives.all_reduce(part, group, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return powers.max() if largest else powers.sum().pow(1.0 / norm_type)

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
    return [_local(p) for p in parameters if p.grad is not None]


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Of a sparse gradient a row at a time: one that has rows twice is replaced by one that has them once."""
    gradient = parameter.grad
    assert gradient is not None, "those without are left out before"
    if isinstance(gradient, DTensor):
        return gradient._local_tensor
    if not gradient.is_sparse:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _spread(gradient: torch.Tensor) -> tuple[bool, bool]:
    """Whether it is spread over the ranks that share the shards, and over those that share layers."""
    if not isinstance(gradient, DTensor):
        return False, False
    names = gradient.device_mesh.mesh_dim_names or ("shard",) * gradient.device_mesh.ndim
    axes = [name for name, p in zip(names, gradient.placements, strict=True) if not p.is_replicate()]
    return any(name != TENSOR_AXIS for name in axes), TENSOR_AXIS in axes


def _power(tensors: list[torch.Tensor], norm_type: float, zero: torch.Tensor) -> torch.Tensor:
    """[1], as ``zero`` is: the sum of absolute values to the power of ``norm_type``, or the largest of them."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return zero
    norms = torch.stack([norm.to(zero.dtype) for norm in torch._foreach_norm(filled, norm_type)])
    return norms.max().view(1) if math.isinf(norm_type) else norms.pow(norm_type).sum().view(1)
