"""What autograd's graph of one stage begins with: inputs from other stages, and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dist.errors import ConfigError


class _Enter(torch.autograd.Function):
    """The same memory, as no leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def enter(values: Iterable[Any]) -> tuple[Any, ...]:
    """What layers get for a stage's inputs, which are leaves: tensors that they may change in place."""
    return tuple(
        _Enter.apply(v) if isinstance(v, Tensor) and v.is_leaf and v.requires_grad else v  # type: ignore[no-untyped-call]
        for v in values
    )


def refuse_elsewhere(roots: Iterable[Tensor | None], elsewhere: Mapping[int, str], *, stage: object) -> None:
    """Refuse parameters of other ranks, which have no values here.

    Args:
        roots: What backward begins with.
        elsewhere: ``id`` of each such parameter -> its name.
        stage: For the message.

    Raises:
        ConfigError: One took part.
    """
    waiting: list[Any] = [root.grad_fn for root in roots if root is not None and root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        name = elsewhere.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ConfigError(
                f"{stage} uses {name}, which is on another rank. A layer's function names all that it uses, parameters "
                "too: PipelineLayer(function, *parts); training_step can use what is in no layer, or in layers of the "
                "last stage (a penalty on all weights is the optimizer's weight_decay)"
            )
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following


def all_depend(roots: Iterable[Tensor | None], inputs: Iterable[Any]) -> bool:
    """Whether each root that has a gradient depends on one of the inputs.

    torch (2.13) finds the parameters of a backward in two parts where their paths meet those of the inputs, and leaves
    out the others in silence.
    """
    leaves = {id(value) for value in inputs}
    return all(_reaches(root.grad_fn, leaves) for root in roots if root is not None and root.requires_grad)


def _reaches(node: Any, leaves: set[int]) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node is None:  # a leaf has none: it is an input, or a parameter given on as it is
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return False


def users_own(error: Exception) -> Exception:
    """What torch's functions for a stage's backward have wrapped in an error of theirs that lists tensors."""
    cause = error.__cause__
    return cause if "Failed to run stage backward" in str(error) and isinstance(cause, Exception) else error
