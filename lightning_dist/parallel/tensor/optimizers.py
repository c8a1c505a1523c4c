"""Optimizers where parameters are of two kinds.

After tensor parallelism a model holds plain tensors beside DTensors, which torch's functions over lists do not take
together (``foreach`` and fused optimizers). After FSDP2 over the data axes all are DTensors, on two meshes, which
optimizers take together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.tensor.model import TensorParallel

WHOLE_ONLY = {
    "Adafactor": "takes means over rows and columns of whole matrices; write torch.optim.AdamW",
    "LBFGS": "puts all gradients into one list of numbers; write torch.optim.AdamW",
    "Rprop": "picks values out of gradients; write torch.optim.AdamW",
}
"""Optimizers of torch that do not take DTensors (2.13), by name: why, and what does."""


def refuse_whole_only(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps whole tensors only.

    Raises:
        CombinationError: It is one of :data:`WHOLE_ONLY`, or made from one.
    """
    for base in type(optimizer).__mro__:
        if base.__name__ in WHOLE_ONLY:
            raise CombinationError(
                f"{type(optimizer).__name__} does not step layers that are split over ranks: it "
                f"{WHOLE_ONLY[base.__name__]}, or parallel=ddp"
            )


def keep_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer treat tensor after tensor where a parameter group holds plain tensors and DTensors.

    On CUDA torch would take ``foreach`` by itself, which fails on such a group. After FSDP2 there is none.

    Raises:
        CombinationError: The user asked for ``fused`` or ``foreach``.
    """
    for index, group in enumerate(optimizer.param_groups):
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) < 2:
            continue
        for option in ("fused", "foreach"):
            if group.get(option):
                raise CombinationError(
                    f"{type(optimizer).__name__}({option}=True): parameter group {index} holds tensors that are split "
                    "over ranks beside others that are not, which it cannot take together; leave the option out"
                )
        if "foreach" in group:
            group["foreach"] = False


def refuse_unsplit(optimizers: Iterable[torch.optim.Optimizer], split: TensorParallel) -> None:
    """Refuse optimizers that were made before their parameters were split.

    Raises:
        ConfigError: One was; it would step nothing.
    """
    names = {id(entry.original): entry.places[0][2] for entry in split.entries}
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    stale = [names[key] for key in held if key in names]
    if stale:
        raise ConfigError(
            f"an optimizer holds {stale[0]} (and {len(stale) - 1} more) as it was before its layer was split; "
            "take parameters in configure_optimizers, from self.parameters(), not in __init__"
        )


def keep_list_options(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state to load, in which lists of tensors are treated as this optimizer does, not as the saved one did."""
    return {
        **state,
        "param_groups": [
            {**saved, **{option: group[option] for option in ("foreach", "fused") if option in group}}
            for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
        ],
    }
