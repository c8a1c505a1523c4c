"""Gradients that exist before their backward: the schedule makes them while the step runs, and they wait for it.

Lightning calls ``training_step``, then zeroes gradients, then calls ``backward`` with the loss. The loss that a
pipeline gives it puts the gradients in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dist.errors import CombinationError

_TOLERANCE = 1e-3


class HeldGradients:
    """Takes gradients from their parameters, and puts them back.

    Args:
        parameters: Whose.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held: list[tuple[nn.Parameter, Tensor]] = []

    def forget(self) -> None:
        """A window of accumulation begins: what the last one left is to be zeroed, so it need not take memory."""
        self._held = []
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> None:
        """Set them aside."""
        self._held = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None

    def put_back(self) -> None:
        """Put them in place."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []

    def loss(self, value: Tensor, scale: float) -> Tensor:
        """A loss whose backward puts them in place.

        Args:
            value: 0-dim.
            scale: What the gradients have been multiplied by already; a backward that wants another is refused.
        """
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        result: Tensor = _PutBack.apply(anchor, value, self, scale)  # type: ignore[no-untyped-call]  # torch's
        return result


class _PutBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, held: HeldGradients, scale: float) -> Tensor:
        ctx.held, ctx.scale = held, scale
        return value.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        wanted = float(gradient)
        if abs(wanted - ctx.scale) > _TOLERANCE * ctx.scale:
            raise CombinationError(
                f"the loss of a pipeline's training_step was scaled by {wanted / ctx.scale:g} before backward, and its "
                "gradients exist already; scale the loss in training_step instead"
            )
        ctx.held.put_back()
        return None, None, None, None
