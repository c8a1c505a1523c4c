"""The parallel modes as a Trainer's call meets them: each connects a module to other ranks, trains and evaluates it."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_dist.modes.data_parallel import DataParallelMode
from lightning_dist.modes.mode import Mode, Setting
from lightning_dist.modes.sharded import ShardedMode

MODES: dict[str, type[Mode]] = {
    "ddp": DataParallelMode,
    "zero1": ShardedMode,
    "zero2": ShardedMode,
    "zero3": ShardedMode,
    "hsdp": ShardedMode,
}


def open_mode(setting: Setting, module: pl.LightningModule) -> Mode:
    """The mode that ``setting.parallel`` names, not yet connected."""
    return MODES[setting.parallel.mode](setting, module)


__all__ = ["MODES", "Mode", "Setting", "open_mode"]
