"""How long, on what, how often things happen: arguments of Lightning's ``Trainer``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.run_config.checks import check_amount, check_choice, check_number

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true")
CLIP_ALGORITHMS = ("norm", "value")


@dataclass(frozen=True)
class TrainerConfig:
    """Arguments of Lightning's ``Trainer``, under their own names.

    Attributes:
        max_steps: Optimizer steps; -1 means no limit.
        max_epochs: Passes over the data; ``None`` means no limit.
        max_time: Wall-clock limit as ``DD:HH:MM:SS``; ``None`` means no limit.
        accelerator: ``auto``, ``cpu``, ``gpu`` or ``cuda``.
        devices: Processes a host: a number, a list of device indices, or ``auto`` (one a GPU, or 2 on CPU).
        num_nodes: Hosts: a number, or ``auto``: as many as a launcher outside has started, else 1.
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
    num_nodes: Any = "auto"
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
        check_choice("trainer.accelerator", self.accelerator, ACCELERATORS)
        check_choice("trainer.precision", self.precision, PRECISIONS)
        check_choice("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, CLIP_ALGORITHMS)
        check_number("trainer.max_steps", self.max_steps, low=-1, whole=True)
        if self.max_epochs is not None:
            check_number("trainer.max_epochs", self.max_epochs, low=0, whole=True)
        if self.max_steps == -1 and self.max_epochs is None and self.max_time is None:
            raise CombinationError(
                "the run would never end: give trainer.max_steps, trainer.max_epochs or trainer.max_time"
            )
        if self.num_nodes != "auto":
            check_number("trainer.num_nodes", self.num_nodes, low=1, whole=True)
        for name in ("accumulate_grad_batches", "log_every_n_steps"):
            check_number(f"trainer.{name}", getattr(self, name), low=1, whole=True)
        check_number("trainer.num_sanity_val_steps", self.num_sanity_val_steps, low=0, whole=True)
        if self.gradient_clip_val is not None:
            check_number("trainer.gradient_clip_val", self.gradient_clip_val, low=0)
        _check_devices(self.devices)
        check_amount("trainer.val_check_interval", self.val_check_interval, low=0)
        check_amount("trainer.limit_train_batches", self.limit_train_batches, low=0)
        check_amount("trainer.limit_val_batches", self.limit_val_batches, low=0)
        if self.check_val_every_n_epoch is not None:
            check_number("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, low=1, whole=True)
        elif isinstance(self.val_check_interval, float):
            raise CombinationError(
                f"trainer.val_check_interval={self.val_check_interval:g} is part of an epoch, which needs "
                "trainer.check_val_every_n_epoch=1; write a whole number to count micro-batches over epochs"
            )


def _check_devices(devices: object) -> None:
    whole = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
    indices = isinstance(devices, list) and devices and all(isinstance(d, int) and d >= 0 for d in devices)
    if not (devices == "auto" or whole or indices):
        raise ConfigError(
            f"trainer.devices={devices!r}: must be a number of processes a host (1 or more), "
            "a list of device indices such as [0, 1], or auto"
        )
