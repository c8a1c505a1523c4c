"""Recomputation of a module's blocks, alike on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.build.run import RunContext
from lightning_dist.config import RecomputeConfig
from lightning_dist.parallel.recompute import Recomputation


def open_recomputation(run: RunContext, module: nn.Module, config: RecomputeConfig) -> Recomputation | None:
    """Find the blocks to recompute; ``None`` for mode ``off``. Every rank calls it.

    Raises:
        ConfigError: There are no blocks, or they cannot be measured although the mode is ``budget``.
    """
    if config.mode == "off":
        return None

    def agree(numbers: list[int]) -> list[int]:
        largest = torch.tensor(numbers, dtype=torch.int64, device=run.device)
        if run.cluster.world_size > 1:
            with run.operation("agreement on the blocks to recompute"):
                dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [int(number) for number in largest.tolist()]

    return Recomputation(module, config, agree=agree)
