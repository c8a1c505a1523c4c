"""What outlives the run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.errors import CombinationError
from lightning_dist.run_config.checks import check_choice, check_number

CHECKPOINT_MODES = ("full", "off")


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
        check_choice("checkpoint.mode", self.mode, CHECKPOINT_MODES)
        check_number("checkpoint.every_n_steps", self.every_n_steps, low=1, whole=True)
        check_number("checkpoint.save_top_k", self.save_top_k, low=-1, whole=True)
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise CombinationError(
                f"checkpoint.save_top_k={self.save_top_k} needs checkpoint.monitor, e.g. val_loss; "
                "without it: 0 (none), 1 (the newest) or -1 (all)"
            )
