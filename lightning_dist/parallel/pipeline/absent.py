"""Parameters and buffers of layers that are on other ranks: they keep their place, name and shape, and no memory.

So a module's names, an optimizer's list of parameters and the order of its state are those of the uncut model on every
rank. An absent parameter gets no gradient, which every optimizer of torch skips. Its values read as NaN. If its layer
is split over ranks, each gives up the memory of its part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dist.parallel.pipeline.parts import part_of


class AbsentTensors:
    """Tensors whose memory is given up, and given back at the end.

    Args:
        tensors: Parameters and buffers.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._ids = {id(tensor) for tensor in self._tensors}
        for tensor in self._tensors:
            tensor.grad = None
            part = part_of(tensor)
            part.data = placeholder(part)

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._ids

    def restore(self) -> None:
        """Give them memory again; values are for the caller to fill in. Safe twice."""
        for tensor in self._tensors:
            part = part_of(tensor)
            part.data = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        self._tensors, self._ids = [], set()


def placeholder(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type that holds one value: NaN, or 0 where there is none."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
