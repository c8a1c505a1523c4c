"""Gradients that exist before their backward: the schedule makes them while the step runs, and they wait for it.

Lightning calls ``training_step``, then zeroes gradients, then calls ``backward`` with the loss. The loss that a
pipeline gives it puts the gradients in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dist.errors import CombinationError

_TOLERANCE = 1e-3


def check_gradient_hooks(module: nn.Module) -> None:
    """Refuse or warn of hooks on parameters, which a schedule calls once a micro-batch.

    Raises:
        CombinationError: A parameter has a hook that is to see its whole gradient.
    """
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise CombinationError(
                f"{name} has a hook by register_post_accumulate_grad_hook, and in a pipeline its gradient comes in one "
                "part a micro-batch: write what it does in on_after_backward or on_before_optimizer_step"
            )
        if parameter._backward_hooks:
            warnings.warn(
                f"{name} has a hook by register_hook, which a pipeline calls once a micro-batch, with that "
                "micro-batch's part of the gradient; if it does more than multiply, write it in on_after_backward",
                stacklevel=2,
            )
            return


class HeldGradients:
    """Takes gradients from their parameters, and puts them back.

    Args:
        parameters: Whose.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def begin(self, *, window: bool, keeps: bool) -> None:
        """A schedule is about to make gradients.

        Args:
            window: Whether a window of accumulation begins, so that what the last one left is to be zeroed.
            keeps: Whether somebody looks at it before, or zeroes it in a way of his own; else it is let go at once, so
                that it takes no memory.
        """
        self._held = []
        if not window:
            return
        self._before = [(p, p.grad) for p in self._parameters if keeps and p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> None:
        """Set aside what the schedule has made."""
        self._held = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    @torch.no_grad()
    def put_back(self) -> None:
        """Put it in place; added, where not all has been zeroed."""
        for parameter, gradient in self._held:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
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
