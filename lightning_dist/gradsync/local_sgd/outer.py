"""The outer optimizer: SGD with momentum on what workers have gone; pure but for the tensors it changes.

DiLoCo (Douillard et al. 2023) takes Nesterov's momentum; SlowMo (Wang et al. 2020) is the same with heavy-ball
momentum, and a rate of 1 without momentum is Local SGD (Stich 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OuterOptimizer:
    """What :class:`torch.optim.SGD` does with a gradient of outer weights minus mean weights.

    Attributes:
        lr: Learning rate.
        momentum: Of the steps before, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
    """

    lr: float
    momentum: float
    nesterov: bool

    def step(self, outer: torch.Tensor, momentum: torch.Tensor | None, gone: torch.Tensor) -> None:
        """One step.

        Args:
            outer: [n] outer weights; changed.
            momentum: [n] of the steps before, zeros at first; changed. ``None`` without momentum.
            gone: [n] outer weights minus the mean of the workers' weights; changed.
        """
        direction = gone
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gone)
            direction = gone.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
        if outer.dtype == direction.dtype:
            outer.sub_(direction, alpha=self.lr)
        else:  # of half types: one rounding
            outer.copy_(outer.to(direction.dtype).sub_(direction, alpha=self.lr))


def mix(own: torch.Tensor, outer: torch.Tensor, kept: float) -> None:
    """A worker's own weights once the outer ones have arrived: ``kept`` of what they are, the rest of the outer ones.

    Args:
        own: [n], changed.
        outer: [n] of the same type.
        kept: In [0, 1).
    """
    if kept:
        own.lerp_(outer, 1.0 - kept)
    else:
        own.copy_(outer)
