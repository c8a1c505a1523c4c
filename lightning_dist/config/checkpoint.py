"""How checkpoints are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dist.config.checks import MIB, check_choice, check_range

WHEN_BUSY = ("wait", "skip")
ON_FAILURE = ("stop", "warn")


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written.

    Attributes:
        mode: ``full`` (Lightning's own: one file with everything, written by rank 0 while training waits), ``sharded``
            (a folder into which each rank writes its part, while training waits) or ``async_sharded`` (the same, while
            training goes on: it waits for a copy only).
        when_busy: What becomes of an ``async_sharded`` checkpoint while the one before is being written: ``wait`` or
            ``skip``.
        on_failure: What a checkpoint that could not be written does to the run, on all ranks: ``stop`` or ``warn``.
            With ``async_sharded`` that is found out at the next checkpoint, or at the end of the fit.
        chunk_bytes: Tensors are written, checked and read in chunks of at most this size, in bytes.
        timeout_s: How long a checkpoint may take to be written, in seconds.
    """

    MODES: ClassVar[tuple[str, ...]] = ("full", "sharded", "async_sharded")

    mode: str = "full"
    when_busy: str = "wait"
    on_failure: str = "stop"
    chunk_bytes: int = 16 * MIB
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_choice("checkpoint.mode", self.mode, self.MODES)
        check_choice("checkpoint.when_busy", self.when_busy, WHEN_BUSY)
        check_choice("checkpoint.on_failure", self.on_failure, ON_FAILURE)
        check_range("checkpoint.chunk_bytes", self.chunk_bytes, low=4096, unit="bytes")
        check_range("checkpoint.timeout_s", self.timeout_s, low=0.1, unit="seconds")

    @property
    def is_sharded(self) -> bool:
        """Whether a checkpoint is a folder into which each rank writes."""
        return self.mode in ("sharded", "async_sharded")


CHECKPOINT_PRESETS: dict[str, CheckpointConfig] = {name: CheckpointConfig(mode=name) for name in CheckpointConfig.MODES}
