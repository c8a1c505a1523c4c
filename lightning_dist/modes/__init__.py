"""The parallel modes as a Trainer's call meets them: each connects a module to other ranks, trains and evaluates it."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist import build
from lightning_dist.modes.data_parallel import DataParallelMode
from lightning_dist.modes.local_sgd import LocalDataParallelMode, LocalShardedMode
from lightning_dist.modes.mode import Mode, Setting
from lightning_dist.modes.pipeline import PipelineMode
from lightning_dist.modes.sharded import ShardedMode
from lightning_dist.modes.sharded_pipeline import ShardedPipelineMode
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

    A pipeline of one stage is no pipeline: its ranks train as under ``ddp``, or as under ``tensor``. Stages are sharded
    where several ranks hold the same ones.
    """
    parallel = setting.parallel
    if setting.sync.algorithm == "local_sgd" and len(build.workers_of(setting.run, setting.sync).parts) > 1:
        return (LocalDataParallelMode if parallel.mode == "ddp" else LocalShardedMode)(setting, module)
    if not parallel.stages:
        return MODES["tensor" if parallel.splits else parallel.mode](setting, module)
    size, world_size = build.pipeline_size(setting.run.cluster, parallel), setting.run.cluster.world_size
    if size == 1:
        return MODES["tensor" if parallel.splits else "ddp"](setting, module)
    if parallel.shards and world_size > size:
        return ShardedPipelineMode(setting, module)
    if parallel.shards:
        rank_zero_warn(
            f"parallel.mode={parallel.mode} has no effect with parallel.pipeline.size={size} on {world_size} "
            "ranks, of which no two hold the same stages; write parallel=pipeline, or a smaller size"
        )
    return PipelineMode(setting, module)


__all__ = ["MODES", "Mode", "PipelineMode", "Setting", "open_mode"]
