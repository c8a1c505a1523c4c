"""A whole run: the groups together, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_dist.capabilities import refuse_combinations
from lightning_dist.config import (
    ElasticConfig,
    MonitorConfig,
    ParallelConfig,
    RecomputeConfig,
    SyncConfig,
    TopologyConfig,
)
from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.run_config.checkpoint import RunCheckpointConfig
from lightning_dist.run_config.checks import check_number
from lightning_dist.run_config.data import ShardedDataConfig, SyntheticDataConfig, TextDataConfig
from lightning_dist.run_config.model import GPTConfig, MLPConfig
from lightning_dist.run_config.optimizer import AdamWConfig, SGDConfig
from lightning_dist.run_config.trainer import TrainerConfig


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        name: First folder under ``outputs/``; the run's own folder is below it.
        seed: Of weights, order of samples and dropout; the same on all ranks.
        ckpt_path: Checkpoint to go on from: a path, a URL, ``last`` or ``best``; ``None`` starts anew. Weights,
            optimizer and steps go on; with ``data=sharded`` the samples do, too.
        sample_prompt: Text the trained model continues at the end of the run (GPT models only).
        sample_bytes: Length of that continuation, in bytes; 0 makes none.
        sample_temperature: Of sampling; 0 always takes the likeliest byte.
        parallel: What becomes of the model.
        sync: How gradients travel.
        topology: Who sits where.
        recompute: Which blocks run again in backward instead of keeping their activations.
        data: What is read: a sharded, text or synthetic data config.
        model: What is trained: a GPT or MLP config.
        optimizer: How it is trained: an AdamW or SGD config.
        trainer: How long, on what, how often things happen.
        checkpoint: What outlives the run.
        elastic: What becomes of it when a rank or a host fails.
        monitor: How the run is watched.
    """

    name: str = "train"
    seed: int = 0
    ckpt_path: str | None = None
    sample_prompt: str = "The "
    sample_bytes: int = 200
    sample_temperature: float = 0.8
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: Any = field(default_factory=ShardedDataConfig)
    model: Any = field(default_factory=GPTConfig)
    optimizer: Any = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: RunCheckpointConfig = field(default_factory=RunCheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        check_number("seed", self.seed, low=0, whole=True)
        check_number("sample_bytes", self.sample_bytes, low=0, whole=True)
        check_number("sample_temperature", self.sample_temperature, low=0)
        _check_group(
            "data", self.data, (ShardedDataConfig, TextDataConfig, SyntheticDataConfig), "synthetic, naive, sharded"
        )
        _check_group("model", self.model, (GPTConfig, MLPConfig), "gpt-tiny, gpt-small, mlp")
        _check_group("optimizer", self.optimizer, (AdamWConfig, SGDConfig), "adamw, sgd")
        _check_combinations(self)


def _check_combinations(run: RunConfig) -> None:
    refuse_combinations(run.parallel, run.topology, run.recompute, run.sync)
    if isinstance(run.model, MLPConfig):
        if not isinstance(run.data, SyntheticDataConfig):
            raise CombinationError(f"model=mlp takes vectors, data={run.data.kind} gives text: write data=synthetic")
    elif run.data.seq_len is not None and run.data.seq_len > run.model.block_size:
        raise CombinationError(
            f"data.seq_len={run.data.seq_len} is longer than the model's context, "
            f"model.block_size={run.model.block_size}: lower the one or raise the other"
        )
    if run.optimizer.schedule == "cosine" and run.trainer.max_steps == -1:
        raise CombinationError(
            "optimizer.schedule=cosine needs to know its end: give trainer.max_steps, "
            "or write optimizer.schedule=constant"
        )


def _check_group(what: str, given: object, types: tuple[type, ...], options: str) -> None:
    if not isinstance(given, types):
        raise ConfigError(f"{what} must be one of the options of the group ({options}), got {type(given).__name__}")
