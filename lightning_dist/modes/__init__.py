"""The parallel modes as a Trainer's call meets them: each connects a module to other ranks, trains and evaluates it."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_dist import build
from lightning_dist.modes.data_parallel import DataParallelMode
from lightning_dist.modes.mode import Mode, Setting
from lightning_dist.modes.pipeline import PipelineMode
from lightning_dist.modes.sharded import ShardedMode
from lightning_dist.modes.tensor import TensorMode

MODES: dict[str, type[Mode]] = {
    "ddp": DataParallelMode,
    "zero1": ShardedMode,
    "zero2": ShardedMode,
    "zero3": ShardedMode,
    "hsdp": ShardedMode,
    "tensor": TensorMode,
    "pipeline": PipelineMode,
}


def open_mode(setting: Setting, module: pl.LightningModule) -> Mode:
    """The mode that ``setting.parallel`` asks for, not yet connected; where layers are split, the one that splits.

    A pipeline of one stage is no pipeline: its ranks train as under ``ddp``, or as under ``tensor``.
    """
    parallel = setting.parallel
    mode = parallel.mode
    if parallel.stages and build.pipeline_size(setting.run.cluster, parallel) == 1:
        mode = "ddp"
    if parallel.splits and mode != "pipeline":
        mode = "tensor"
    return MODES[mode](setting, module)


__all__ = ["MODES", "Mode", "PipelineMode", "Setting", "open_mode"]
