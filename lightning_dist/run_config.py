"""The options of a whole training run around the strategy: model, data, optimizer, trainer, checkpoint.

:mod:`lightning_dist.config` holds the options of the library itself; these are the schema of the other Hydra groups in
``conf/``, which the examples use and an application may. Plain frozen dataclasses like those: no torch, no hydra, and a
bad value is refused before any process starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.config import ParallelConfig, SyncConfig, TopologyConfig
from lightning_dist.errors import CombinationError, ConfigError, unknown_option

MODEL_KINDS = ("gpt", "mlp")
DATA_KINDS = ("synthetic", "naive", "sharded")
OPTIMIZER_KINDS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
CHECKPOINT_MODES = ("full", "off")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true")
CLIP_ALGORITHMS = ("norm", "value")


@dataclass(frozen=True)
class GPTConfig:
    """A GPT over bytes.

    Attributes:
        kind: ``gpt``.
        vocab_size: Number of tokens; 256 for bytes.
        block_size: Longest context, in tokens.
        n_layer: Transformer blocks.
        n_head: Attention heads; must divide ``n_embd``.
        n_embd: Width.
        dropout: Probability, 0 up to but not including 1.
    """

    kind: str = "gpt"
    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("model.kind", self.kind, ("gpt",))
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            _check_number(f"model.{name}", getattr(self, name), low=1, whole=True)
        _check_number("model.dropout", self.dropout, low=0, below=1)
        if self.n_embd % self.n_head:
            heads = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            raise ConfigError(
                f"model.n_head={self.n_head} must divide model.n_embd={self.n_embd}; "
                f"the closest that does is model.n_head={min(heads, key=lambda n: abs(n - self.n_head))}"
            )


@dataclass(frozen=True)
class MLPConfig:
    """A stack of ``[n_features -> n_hidden -> n_features]`` blocks.

    Attributes:
        kind: ``mlp``.
        n_layer: Blocks.
        n_features: Width of input and output.
        n_hidden: Width inside a block.
    """

    kind: str = "mlp"
    n_layer: int = 6
    n_features: int = 768
    n_hidden: int = 3072

    def __post_init__(self) -> None:
        _check_choice("model.kind", self.kind, ("mlp",))
        for name in ("n_layer", "n_features", "n_hidden"):
            _check_number(f"model.{name}", getattr(self, name), low=1, whole=True)


@dataclass(frozen=True)
class TextDataConfig:
    """Text, read as bytes.

    Attributes:
        kind: ``sharded`` (split by rank by the data module itself) or ``naive`` (a plain dataset; Lightning injects its
            distributed sampler).
        path: A text file, or a folder whose files are read; ``None`` means the documentation that ships with Python.
        batch_size: Sequences a rank and micro-batch.
        seq_len: Bytes a sequence; ``None`` means the model's ``block_size``.
        val_fraction: Part of the text, from its end, kept for validation (0 to 0.5).
        workers: Loader processes a rank; 0 reads in the training process.
    """

    kind: str = "sharded"
    path: str | None = None
    batch_size: int = 4
    seq_len: int | None = None
    val_fraction: float = 0.1
    workers: int = 0

    def __post_init__(self) -> None:
        _check_choice("data.kind", self.kind, ("naive", "sharded"))
        _check_number("data.batch_size", self.batch_size, low=1, whole=True)
        if self.seq_len is not None:
            _check_number("data.seq_len", self.seq_len, low=1, whole=True)
        _check_number("data.val_fraction", self.val_fraction, low=0, high=0.5)
        _check_number("data.workers", self.workers, low=0, whole=True)


@dataclass(frozen=True)
class SyntheticDataConfig:
    """Random samples made in memory, in the shape the model takes.

    Attributes:
        kind: ``synthetic``.
        num_samples: Training samples an epoch, over all ranks.
        num_val_samples: Validation samples, over all ranks.
        batch_size: Samples a rank and micro-batch.
        seq_len: Tokens a sequence (GPT only); ``None`` means the model's ``block_size``.
        workers: Loader processes a rank; 0 makes samples in the training process.
    """

    kind: str = "synthetic"
    num_samples: int = 4096
    num_val_samples: int = 128
    batch_size: int = 4
    seq_len: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        _check_choice("data.kind", self.kind, ("synthetic",))
        _check_number("data.num_samples", self.num_samples, low=1, whole=True)
        _check_number("data.num_val_samples", self.num_val_samples, low=0, whole=True)
        _check_number("data.batch_size", self.batch_size, low=1, whole=True)
        if self.seq_len is not None:
            _check_number("data.seq_len", self.seq_len, low=1, whole=True)
        _check_number("data.workers", self.workers, low=0, whole=True)


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW.

    Attributes:
        kind: ``adamw``.
        lr: Peak learning rate.
        weight_decay: Decay of matrices; biases, norms and embeddings have none.
        beta1: Decay of the mean of gradients, 0 up to but not including 1.
        beta2: Decay of the mean of squared gradients, 0 up to but not including 1.
        eps: Added to the denominator.
        schedule: After the warm-up: ``cosine`` (down to ``min_lr_ratio`` at ``trainer.max_steps``) or ``constant``.
        warmup_steps: Optimizer steps over which the rate rises linearly from 0; 0 means none.
        min_lr_ratio: Last rate of the cosine over the peak (0 to 1).
    """

    kind: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: str = "cosine"
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check_choice("optimizer.kind", self.kind, ("adamw",))
        _check_number("optimizer.beta1", self.beta1, low=0, below=1)
        _check_number("optimizer.beta2", self.beta2, low=0, below=1)
        _check_number("optimizer.eps", self.eps, low=0)
        _check_rates(self)


@dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent.

    Attributes:
        kind: ``sgd``.
        lr: Peak learning rate.
        weight_decay: Decay of all parameters.
        momentum: Part of the last step that is kept, 0 up to but not including 1.
        nesterov: Nesterov's momentum; needs ``momentum`` above 0.
        schedule: After the warm-up: ``cosine`` (down to ``min_lr_ratio`` at ``trainer.max_steps``) or ``constant``.
        warmup_steps: Optimizer steps over which the rate rises linearly from 0; 0 means none.
        min_lr_ratio: Last rate of the cosine over the peak (0 to 1).
    """

    kind: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check_choice("optimizer.kind", self.kind, ("sgd",))
        _check_number("optimizer.momentum", self.momentum, low=0, below=1)
        if self.nesterov and not self.momentum:
            raise CombinationError("optimizer.nesterov=true needs optimizer.momentum above 0, e.g. 0.9")
        _check_rates(self)


@dataclass(frozen=True)
class TrainerConfig:
    """Arguments of Lightning's ``Trainer``, under their own names.

    Attributes:
        max_steps: Optimizer steps; -1 means no limit.
        max_epochs: Passes over the data; ``None`` means no limit.
        max_time: Wall-clock limit as ``DD:HH:MM:SS``; ``None`` means no limit.
        accelerator: ``auto``, ``cpu``, ``gpu`` or ``cuda``.
        devices: Processes a host: a number, a list of device indices, or ``auto`` (one a GPU, or 2 on CPU).
        num_nodes: Hosts.
        precision: ``32-true``, ``16-mixed``, ``bf16-mixed`` or ``bf16-true``.
        accumulate_grad_batches: Micro-batches a rank and optimizer step.
        gradient_clip_val: Largest gradient norm (or value); ``None`` means no clipping.
        gradient_clip_algorithm: ``norm`` or ``value``.
        log_every_n_steps: Optimizer steps between two lines in the log.
        val_check_interval: Micro-batches between two validations, or a fraction of an epoch.
        check_val_every_n_epoch: ``None`` means that ``val_check_interval`` counts over epochs; a number, that
            validation happens every so many epochs.
        limit_train_batches: Micro-batches a rank and epoch: a number, a fraction, or ``None`` for all.
        limit_val_batches: Batches a rank and validation: a number, a fraction, or ``None`` for all; 0: no validation.
        num_sanity_val_steps: Validation batches tried before training; 0 means none.
        enable_progress_bar: Show a progress bar.
        logger: Write TensorBoard logs in the run's folder.
        use_distributed_sampler: Lightning injects its distributed sampler where the loader has none.
        deterministic: Only algorithms that give the same numbers every time; slower.
        detect_anomaly: Find the operation that makes NaN; slow.
    """

    max_steps: int = 200
    max_epochs: int | None = None
    max_time: str | None = None
    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    gradient_clip_algorithm: str = "norm"
    log_every_n_steps: int = 10
    val_check_interval: int | float = 100
    check_val_every_n_epoch: int | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = 20
    num_sanity_val_steps: int = 2
    enable_progress_bar: bool = True
    logger: bool = True
    use_distributed_sampler: bool = True
    deterministic: bool = False
    detect_anomaly: bool = False

    def __post_init__(self) -> None:
        _check_choice("trainer.accelerator", self.accelerator, ACCELERATORS)
        _check_choice("trainer.precision", self.precision, PRECISIONS)
        _check_choice("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, CLIP_ALGORITHMS)
        _check_number("trainer.max_steps", self.max_steps, low=-1, whole=True)
        if self.max_epochs is not None:
            _check_number("trainer.max_epochs", self.max_epochs, low=0, whole=True)
        if self.max_steps == -1 and self.max_epochs is None and self.max_time is None:
            raise CombinationError(
                "the run would never end: give trainer.max_steps, trainer.max_epochs or trainer.max_time"
            )
        for name in ("num_nodes", "accumulate_grad_batches", "log_every_n_steps"):
            _check_number(f"trainer.{name}", getattr(self, name), low=1, whole=True)
        _check_number("trainer.num_sanity_val_steps", self.num_sanity_val_steps, low=0, whole=True)
        if self.gradient_clip_val is not None:
            _check_number("trainer.gradient_clip_val", self.gradient_clip_val, low=0)
        _check_devices(self.devices)
        _check_amount("trainer.val_check_interval", self.val_check_interval, low=0)
        _check_amount("trainer.limit_train_batches", self.limit_train_batches, low=0)
        _check_amount("trainer.limit_val_batches", self.limit_val_batches, low=0)
        if self.check_val_every_n_epoch is not None:
            _check_number("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, low=1, whole=True)
        elif isinstance(self.val_check_interval, float):
            raise CombinationError(
                f"trainer.val_check_interval={self.val_check_interval:g} is part of an epoch, which needs "
                "trainer.check_val_every_n_epoch=1; write a whole number to count micro-batches over epochs"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """What outlives the run.

    Attributes:
        mode: ``full`` (Lightning's own checkpoints) or ``off``.
        every_n_steps: Optimizer steps between two checkpoints.
        save_top_k: Checkpoints kept: the best by ``monitor``; without ``monitor`` 0 (none), 1 (the newest) or -1 (all).
        save_last: Also keep the newest under the name ``last.ckpt``.
        monitor: Metric to rank checkpoints by (lower is better); ``None`` means by age.
    """

    mode: str = "full"
    every_n_steps: int = 100
    save_top_k: int = 1
    save_last: bool = True
    monitor: str | None = None

    def __post_init__(self) -> None:
        _check_choice("checkpoint.mode", self.mode, CHECKPOINT_MODES)
        _check_number("checkpoint.every_n_steps", self.every_n_steps, low=1, whole=True)
        _check_number("checkpoint.save_top_k", self.save_top_k, low=-1, whole=True)
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise CombinationError(
                f"checkpoint.save_top_k={self.save_top_k} needs checkpoint.monitor, e.g. val_loss; "
                "without it: 0 (none), 1 (the newest) or -1 (all)"
            )


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        name: First folder under ``outputs/``; the run's own folder is below it.
        seed: Of weights, order of samples and dropout; the same on all ranks.
        ckpt_path: Checkpoint to go on from: a path, ``last`` or ``best``; ``None`` starts anew.
        sample_prompt: Text the trained model continues at the end of the run (GPT models only).
        sample_bytes: Length of that continuation, in bytes; 0 makes none.
        sample_temperature: Of sampling; 0 always takes the likeliest byte.
        parallel: What becomes of the model.
        sync: How gradients travel.
        topology: Who sits where.
        data: What is read: a text or synthetic data config.
        model: What is trained: a GPT or MLP config.
        optimizer: How it is trained: an AdamW or SGD config.
        trainer: How long, on what, how often things happen.
        checkpoint: What outlives the run.
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
    data: Any = field(default_factory=TextDataConfig)
    model: Any = field(default_factory=GPTConfig)
    optimizer: Any = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _check_number("seed", self.seed, low=0, whole=True)
        _check_number("sample_bytes", self.sample_bytes, low=0, whole=True)
        _check_number("sample_temperature", self.sample_temperature, low=0)
        _check_group("data", self.data, (TextDataConfig, SyntheticDataConfig), "synthetic, naive, sharded")
        _check_group("model", self.model, (GPTConfig, MLPConfig), "gpt-tiny, gpt-small, mlp")
        _check_group("optimizer", self.optimizer, (AdamWConfig, SGDConfig), "adamw, sgd")
        _check_combinations(self)


def _check_combinations(run: RunConfig) -> None:
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


def _check_rates(optimizer: AdamWConfig | SGDConfig) -> None:
    _check_choice("optimizer.schedule", optimizer.schedule, SCHEDULES)
    _check_number("optimizer.lr", optimizer.lr, low=0)
    _check_number("optimizer.weight_decay", optimizer.weight_decay, low=0)
    _check_number("optimizer.warmup_steps", optimizer.warmup_steps, low=0, whole=True)
    _check_number("optimizer.min_lr_ratio", optimizer.min_lr_ratio, low=0, high=1)


def _check_devices(devices: object) -> None:
    whole = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
    indices = isinstance(devices, list) and devices and all(isinstance(d, int) and d >= 0 for d in devices)
    if not (devices == "auto" or whole or indices):
        raise ConfigError(
            f"trainer.devices={devices!r}: must be a number of processes a host (1 or more), "
            "a list of device indices such as [0, 1], or auto"
        )


def _check_amount(what: str, given: int | float | None, *, low: int) -> None:
    """Check a number of batches, or a float that is a fraction of them."""
    if given is None:
        return
    _check_number(what, given, low=low)
    if isinstance(given, float) and given > 1:
        raise ConfigError(f"{what}={given:g}: a fraction is at most 1.0; write {math.ceil(given)} for so many batches")


def _check_choice(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise unknown_option(what, given, allowed)


def _check_number(
    what: str, given: float, *, low: float, high: float | None = None, below: float | None = None, whole: bool = False
) -> None:
    kind = "a whole number" if whole else "a number"
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float) or math.isnan(given):
        raise ConfigError(f"{what}={given!r}: must be {kind}, got {type(given).__name__}")
    too_high = (high is not None and given > high) or (below is not None and given >= below)
    if given < low or too_high:
        end = f" and at most {high:g}" if high is not None else f" and below {below:g}" if below is not None else ""
        raise ConfigError(f"{what}={given:g}: must be at least {low:g}{end}")
