"""What outlives the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import CombinationError
from lightning_dist.run_config.checks import check_choice, check_number

EVERY = ("steps", "auto")


@dataclass(frozen=True)
class RunCheckpointConfig(CheckpointConfig):
    """What outlives the run.

    Attributes:
        mode: ``full`` (Lightning's own: one file with everything, written by rank 0 while training waits), ``sharded``
            (a folder into which each rank writes its part, while training waits), ``async_sharded`` (the same, while
            training goes on: it waits for a copy only) or ``off``.
        folder: Folder or URL in which they are; ``null`` means ``checkpoints`` in the run's own folder.
        every: ``steps`` (``every_n_steps``) or ``auto``: as often as loses the least time, by what checkpoints and
            steps are measured to take; for sharded checkpoints, with ``mtbf_h``.
        every_n_steps: Optimizer steps between two checkpoints, with ``every=steps``.
        mtbf_h: Mean time between failures of the whole job, in hours: that of a host over the number of hosts. For
            ``every=auto``.
        save_top_k: Checkpoints kept: the best by ``monitor``; without ``monitor`` 0 (none), 1 (the newest) or -1 (all).
        save_last: Also keep the newest under the name ``last.ckpt``.
        monitor: Metric to rank checkpoints by (lower is better); ``None`` means by age.
    """

    MODES: ClassVar[tuple[str, ...]] = (*CheckpointConfig.MODES, "off")

    folder: str | None = None
    every: str = "steps"
    every_n_steps: int = 100
    mtbf_h: float | None = None
    save_top_k: int = 1
    save_last: bool = True
    monitor: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("checkpoint.every", self.every, EVERY)
        check_number("checkpoint.every_n_steps", self.every_n_steps, low=1, whole=True)
        check_number("checkpoint.save_top_k", self.save_top_k, low=-1, whole=True)
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise CombinationError(
                f"checkpoint.save_top_k={self.save_top_k} needs checkpoint.monitor, e.g. val_loss; "
                "without it: 0 (none), 1 (the newest) or -1 (all)"
            )

        self._check_auto()

    def _check_auto(self) -> None:
        if self.mtbf_h is not None:
            check_number("checkpoint.mtbf_h", self.mtbf_h, low=1e-3)
        if self.every != "auto":
            if self.mtbf_h is not None:
                raise CombinationError(
                    f"checkpoint.mtbf_h={self.mtbf_h:g} with checkpoint.every={self.every}: write "
                    "checkpoint.every=auto, or leave it out"
                )
            return
        if self.mtbf_h is None:
            raise CombinationError(
                "checkpoint.every=auto needs checkpoint.mtbf_h, the mean time between failures of the whole job in "
                "hours, e.g. 200"
            )
        if not self.is_sharded:
            raise CombinationError(
                f"checkpoint.every=auto with checkpoint.mode={self.mode}: write checkpoint.mode=async_sharded, or "
                "checkpoint.every=steps"
            )
        if self.monitor is not None:
            raise CombinationError(
                f"checkpoint.every=auto with checkpoint.monitor={self.monitor}: it keeps the newest; write "
                "checkpoint.monitor=null, or checkpoint.every=steps"
            )

    @property
    def of_strategy(self) -> CheckpointConfig:
        """How it is written, which is the strategy's; the rest says when."""
        mode = "full" if self.mode == "off" else self.mode
        own = {field.name: getattr(self, field.name) for field in fields(CheckpointConfig)}
        return CheckpointConfig(**{**own, "mode": mode})
