"""Gradients of parameters that cannot be sharded, such as those without a dimension: averaged whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_dist.comm.collectives import Collectives, RankGroup


class ReplicatedGradients:
    """Averages a few small gradients together. Every rank makes it, and calls :meth:`average`, alike.

    Args:
        parameters: Name -> parameter.
        collectives: The seam.
        group: All ranks that hold the parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, collectives: Collectives, group: RankGroup) -> None:
        self._parameters = dict(parameters)
        self._collectives = collectives
        self._group = group

    def part(self, inside: RankGroup) -> None:
        """From now on only the ranks of a smaller group average."""
        self._group = inside

    def names(self) -> list[str]:
        """Of those that want gradients now."""
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def used(self) -> list[bool]:
        """Which of :meth:`names` have a gradient on this rank."""
        return [self._parameters[name].grad is not None for name in self.names()]

    def average(self, wanted: Sequence[bool]) -> None:
        """Average those of :meth:`names` that are wanted; a rank that has none adds zeros.

        What has been averaged before, and is the same on all ranks, stays as it is in the mean.
        """
        chosen = [self._parameters[name] for name, want in zip(self.names(), wanted, strict=True) if want]
        for dtype in dict.fromkeys(parameter.dtype for parameter in chosen):
            alike = [parameter for parameter in chosen if parameter.dtype == dtype]
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in alike]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if self._group.size > 1 and flat.numel():
                self._collectives.all_reduce(flat, self._group)
                flat.div_(self._group.size)
            for parameter, mean in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                parameter.grad = mean.view_as(parameter).clone()
