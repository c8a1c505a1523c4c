"""How checkpoints are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dist.config.checks import MIB, check_choice, check_count, check_range, parse_bytes
from lightning_dist.errors import CombinationError

WHEN_BUSY = ("wait", "skip")
ON_FAILURE = ("stop", "warn")
SNAPSHOTS = ("at_once", "overlapped")
REPLICAS = ("off", "memory", "buddy")


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written.

    Attributes:
        mode: ``full`` (Lightning's own: one file with everything, written by rank 0 while training waits), ``sharded``
            (a folder into which each rank writes its part, while training waits) or ``async_sharded`` (the same, while
            training goes on: it waits for a copy only).
        snapshot: When an ``async_sharded`` checkpoint is copied: while training waits (``at_once``), or, as for
            parameters and optimizer state, while the next forward and backward run, so that training waits only before
            the optimizer's step, for what is missing (``overlapped``). Nothing but that step may then change them:
            changes in place make the checkpoint fail, but changes of ``parameter.data``, and of shards by
            ``torch._foreach_...``, are not seen.
        when_busy: What becomes of an ``async_sharded`` checkpoint while the one before is being written: ``wait`` or
            ``skip``.
        on_failure: What a checkpoint that could not be written does to the run, on all ranks: ``stop`` or ``warn``.
            With ``async_sharded`` that is found out at the next checkpoint, or at the end of the fit.
        chunk_bytes: Tensors are written, checked and read in chunks of at most this size, in bytes.
        timeout_s: How long a checkpoint may take to be written, in seconds.
        replica: Where else the newest checkpoint is kept: nowhere (``off``), in the memory of a process on each host
            that outlives the ranks (``memory``), or there and in that of another host (``buddy``). A run that is
            started again resumes from there.
        replica_limit: What such a process may keep, in bytes, as a number or with a unit (``8GB``, ``512MiB``).
        replica_rate: With ``buddy``: what a rank sends to the other host a second, at most, as a number of bytes or
            with a unit (``100MB``); ``None`` sends as fast as it can.
        memory_every_n_steps: Optimizer steps between two checkpoints that go to such processes only, beside those that
            go to storage as well; with ``replica``. ``None``: there are none.
    """

    MODES: ClassVar[tuple[str, ...]] = ("full", "sharded", "async_sharded")

    mode: str = "full"
    snapshot: str = "at_once"
    when_busy: str = "wait"
    on_failure: str = "stop"
    chunk_bytes: int = 16 * MIB
    timeout_s: float = 1800.0
    replica: str = "off"
    replica_limit: int | str = "8GB"
    replica_rate: int | str | None = None
    memory_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        check_choice("checkpoint.mode", self.mode, self.MODES)
        check_choice("checkpoint.snapshot", self.snapshot, SNAPSHOTS)
        check_choice("checkpoint.when_busy", self.when_busy, WHEN_BUSY)
        check_choice("checkpoint.on_failure", self.on_failure, ON_FAILURE)
        check_range("checkpoint.chunk_bytes", self.chunk_bytes, low=4096, unit="bytes")
        check_range("checkpoint.timeout_s", self.timeout_s, low=0.1, unit="seconds")
        check_choice("checkpoint.replica", self.replica, REPLICAS)
        check_range("checkpoint.replica_limit", self.replica_limit_bytes, low=MIB, unit="bytes")
        if self.replica_rate is not None:
            check_range("checkpoint.replica_rate", self.replica_bytes_per_s or 0, low=1024, unit="bytes a second")
        if self.replica != "off" and not self.is_sharded:
            raise CombinationError(
                f"checkpoint.replica={self.replica} with checkpoint.mode={self.mode}: write checkpoint=async_sharded "
                "or sharded, or replica=off"
            )

        if self.memory_every_n_steps is not None:
            check_count("checkpoint.memory_every_n_steps", self.memory_every_n_steps, low=1, unit="optimizer steps")
            if self.replica == "off":
                raise CombinationError(
                    f"checkpoint.memory_every_n_steps={self.memory_every_n_steps} with checkpoint.replica=off: write "
                    "checkpoint.replica=buddy, or memory"
                )
        if self.snapshot != "at_once" and self.mode != "async_sharded":
            raise CombinationError(
                f"checkpoint.snapshot={self.snapshot} with checkpoint.mode={self.mode}, which holds training until all "
                "is written: write checkpoint=async_sharded, or snapshot=at_once"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether a checkpoint is a folder into which each rank writes."""
        return self.mode in ("sharded", "async_sharded")

    @property
    def replica_limit_bytes(self) -> int:
        """What the process of a host may keep."""
        return parse_bytes("checkpoint.replica_limit", self.replica_limit)

    @property
    def replica_bytes_per_s(self) -> int | None:
        """The cap on what a rank sends; ``None``: there is none."""
        return None if self.replica_rate is None else parse_bytes("checkpoint.replica_rate", self.replica_rate)


CHECKPOINT_PRESETS: dict[str, CheckpointConfig] = {name: CheckpointConfig(mode=name) for name in CheckpointConfig.MODES}
