"""Optimizers that a server process can make: of classes that are named here, so that no message brings in code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_dist.errors import CombinationError

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "SparseAdam": torch.optim.SparseAdam,
}
"""Name -> class, of those that take sparse gradients and step a row by what is known of it."""


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Under which a server knows it.

    Raises:
        CombinationError: It is of another class, maybe one made from a known one.
    """
    for name, kind in KINDS.items():
        if type(optimizer) is kind:
            return name
    raise CombinationError(
        f"sync.parameter_server.servers=processes steps tables by {', '.join(KINDS)}, and "
        f"{type(optimizer).__name__} is none of them: write sync.parameter_server.servers=ranks"
    )


def made(name: str, parameter: nn.Parameter, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of one parameter.

    Args:
        name: Of :data:`KINDS`.
        parameter: What it steps.
        options: Of a parameter group; those count that the class takes.
    """
    kind = KINDS[name]
    taken = {each: options[each] for each in inspect.signature(kind).parameters if each in options}
    return kind([parameter], **taken)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's present options without its parameters, as values that JSON can carry."""
    return {name: _plain(value) for name, value in group.items() if name != "params"}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
