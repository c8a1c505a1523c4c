"""Every option of the library: its meaning, unit, default and validation.

The dataclasses are the schema of the Hydra groups in ``conf/`` and the arguments behind
:class:`~lightning_dist.strategy.HierDistStrategy`. They hold plain values only (no torch), are frozen, and check
themselves when made, so that a bad value is refused before any process starts.
"""

from lightning_dist.config.checkpoint import CHECKPOINT_PRESETS, ON_FAILURE, WHEN_BUSY, CheckpointConfig
from lightning_dist.config.checks import BYTE_UNITS, MIB, parse_bytes
from lightning_dist.config.data import EPOCHS, LAST_BATCHES, ON_UNREADABLE, READERS, DataConfig
from lightning_dist.config.elastic import BATCHES, ELASTIC_PRESETS, RATES, ElasticConfig
from lightning_dist.config.local_sgd import WORKERS, LocalSGDConfig
from lightning_dist.config.monitor import MONITOR_PRESETS, MonitorConfig
from lightning_dist.config.parallel import (
    PARALLEL_MODES,
    PARALLEL_PRESETS,
    SECONDARY_SHARDS,
    SHARD_DTYPES,
    SHARDING_MODES,
    START_METHODS,
    TENSOR_PLANS,
    UNEVEN_INPUTS,
    ParallelConfig,
    TensorConfig,
)
from lightning_dist.config.parameter_server import ParameterServerConfig
from lightning_dist.config.pipeline import (
    LOSS_REDUCTIONS,
    PIPELINE_SCHEDULES,
    STAGE_BALANCES,
    STAGE_PLACEMENTS,
    PipelineConfig,
)
from lightning_dist.config.powersgd import PowerSGDConfig
from lightning_dist.config.recompute import RECOMPUTE_MODES, RECOMPUTE_PRESETS, RecomputeConfig
from lightning_dist.config.resolve import from_mapping, resolve, resolve_options
from lightning_dist.config.sparse import SparseConfig
from lightning_dist.config.sync import (
    CODECS,
    GATHERS,
    ROUNDINGS,
    SHARED_MEMORY_CHOICES,
    SYNC_ALGORITHMS,
    SYNC_PRESETS,
    SyncConfig,
)
from lightning_dist.config.topology import TIER_CHOICES, TOPOLOGY_PRESETS, ProbeConfig, TopologyConfig

__all__ = [
    "BATCHES",
    "BYTE_UNITS",
    "CHECKPOINT_PRESETS",
    "CODECS",
    "CheckpointConfig",
    "DataConfig",
    "ELASTIC_PRESETS",
    "EPOCHS",
    "ElasticConfig",
    "GATHERS",
    "LAST_BATCHES",
    "LOSS_REDUCTIONS",
    "LocalSGDConfig",
    "MIB",
    "MONITOR_PRESETS",
    "MonitorConfig",
    "ON_FAILURE",
    "ON_UNREADABLE",
    "PARALLEL_MODES",
    "PARALLEL_PRESETS",
    "PIPELINE_SCHEDULES",
    "ParallelConfig",
    "ParameterServerConfig",
    "PipelineConfig",
    "ProbeConfig",
    "RATES",
    "READERS",
    "RECOMPUTE_MODES",
    "ROUNDINGS",
    "RECOMPUTE_PRESETS",
    "RecomputeConfig",
    "SECONDARY_SHARDS",
    "SHARDING_MODES",
    "SHARD_DTYPES",
    "SHARED_MEMORY_CHOICES",
    "STAGE_BALANCES",
    "STAGE_PLACEMENTS",
    "START_METHODS",
    "SYNC_ALGORITHMS",
    "SYNC_PRESETS",
    "PowerSGDConfig",
    "SparseConfig",
    "SyncConfig",
    "TENSOR_PLANS",
    "TIER_CHOICES",
    "TOPOLOGY_PRESETS",
    "TensorConfig",
    "TopologyConfig",
    "UNEVEN_INPUTS",
    "WHEN_BUSY",
    "WORKERS",
    "from_mapping",
    "parse_bytes",
    "resolve",
    "resolve_options",
]
