"""The options of a whole training run around the strategy: model, data, optimizer, trainer, checkpoint.

:mod:`lightning_dist.config` holds the options of the library itself; these are the schema of the other Hydra groups in
``conf/``, which the examples use and an application may. Plain frozen dataclasses like those: no torch, no hydra, and a
bad value is refused before any process starts.
"""

from lightning_dist.run_config.checkpoint import RunCheckpointConfig
from lightning_dist.run_config.data import DATA_KINDS, ShardedDataConfig, SyntheticDataConfig, TextDataConfig
from lightning_dist.run_config.model import MODEL_KINDS, GPTConfig, MLPConfig
from lightning_dist.run_config.optimizer import OPTIMIZER_KINDS, SCHEDULES, AdamWConfig, SGDConfig
from lightning_dist.run_config.run import RunConfig
from lightning_dist.run_config.trainer import ACCELERATORS, CLIP_ALGORITHMS, PRECISIONS, TrainerConfig

__all__ = [
    "ACCELERATORS",
    "CLIP_ALGORITHMS",
    "DATA_KINDS",
    "MODEL_KINDS",
    "OPTIMIZER_KINDS",
    "PRECISIONS",
    "SCHEDULES",
    "AdamWConfig",
    "GPTConfig",
    "MLPConfig",
    "RunCheckpointConfig",
    "RunConfig",
    "SGDConfig",
    "ShardedDataConfig",
    "SyntheticDataConfig",
    "TextDataConfig",
    "TrainerConfig",
]
