"""Optimizers that a server process can make: of classes that are named here, so that no message brings in code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.parameter_server.stepping import made_of
from lightning_dist.gradsync.sparse.row_wise_adagrad import RowWiseAdagrad

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "SparseAdam": torch.optim.SparseAdam,
    "RowWiseAdagrad": RowWiseAdagrad,
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
    return made_of(KINDS[name], options)([parameter])
