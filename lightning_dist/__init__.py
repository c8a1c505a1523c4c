"""Distributed training for PyTorch Lightning that knows the machine's topology.

Importing this package registers the strategy names ``hierdist``, ``hierdist_zero1``, ``hierdist_zero2``,
``hierdist_zero3`` and ``hierdist_hsdp``, each also with ``_spawn``, ``_fork`` and ``_notebook``, and each of these with
``_find_unused_parameters_true`` and ``_false``; nothing else happens.
"""

import sys

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.callbacks import (
    AsyncShardedCheckpoint,
    ClusterMonitor,
    Heartbeat,
    MonitorOutputs,
    PipelinePicture,
    StepTimeline,
    monitor_callbacks,
)
from lightning_dist.config import (
    CheckpointConfig,
    DataConfig,
    MonitorConfig,
    ParallelConfig,
    ProbeConfig,
    SyncConfig,
    TopologyConfig,
)
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.data.loading.source import Source
from lightning_dist.data.writing.token_writer import TokenSettings, write_tokens
from lightning_dist.data_module import ShardedDataModule
from lightning_dist.folder_io import load_from_checkpoint
from lightning_dist.gradsync.sparse.row_wise_adagrad import RowWiseAdagrad
from lightning_dist.parallel.pipeline import PipelineLayer
from lightning_dist.registration import refuse_in_other_package, register_strategies
from lightning_dist.resized import ScaledRate
from lightning_dist.resuming import ResumeData
from lightning_dist.strategy import HierDistStrategy

__version__ = "0.1.0"

__all__ = [
    "AsyncShardedCheckpoint",
    "CheckpointConfig",
    "ClusterMonitor",
    "DataConfig",
    "Heartbeat",
    "HierDistStrategy",
    "MonitorConfig",
    "MonitorOutputs",
    "ParallelConfig",
    "PipelineLayer",
    "PipelinePicture",
    "ProbeConfig",
    "ResumeData",
    "RowWiseAdagrad",
    "ScaledRate",
    "ShardedDataModule",
    "ShardedLoader",
    "Source",
    "StepTimeline",
    "SyncConfig",
    "TokenSettings",
    "TopologyConfig",
    "__version__",
    "load_from_checkpoint",
    "monitor_callbacks",
    "write_tokens",
]

register_strategies(StrategyRegistry)
refuse_in_other_package(sys.modules)
