"""Optimizers where parameters are of two kinds.

After tensor parallelism a model holds plain tensors beside DTensors, which torch's functions over lists do not take
together (``foreach`` and fused optimizers). After FSDP2 over the data axes all are DTensors, on two meshes, which
optimizers take together.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from lightning_dist.errors import CombinationError


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
