"""How weights travel where hosts train apart and meet now and then."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_choice, check_count, check_flags, check_range
from lightning_dist.errors import ConfigError

WORKERS = ("hosts", "ranks")


@dataclass(frozen=True)
class LocalSGDConfig:
    """Options of ``sync.algorithm=local_sgd``.

    A worker makes optimizer steps of its own. Each ``every`` steps workers average how far they have gone from the
    weights they had in common (the outer weights), and an outer optimizer, SGD with momentum, steps these so far.

    Attributes:
        every: Optimizer steps between two synchronisations of a parameter.
        warmup_steps: So many first optimizer steps average gradients over all ranks, exact.
        outer_lr: Learning rate of the outer optimizer; 1 with ``outer_momentum=0`` averages weights.
        outer_momentum: Its momentum, in [0, 1).
        nesterov: Whether that is Nesterov's.
        fragments: The parameters are dealt to so many fragments of about equal bytes, which synchronise one after
            another, each ``every`` steps.
        overlap_steps: So many optimizer steps are made while a fragment is on its way, less than ``every``; 0: training
            waits for it.
        mixing: What a parameter keeps of the worker's own value when the outer one arrives, in [0, 1). ``None``: 0.5
            with ``overlap_steps``, and nothing without.
        workers: ``hosts`` (the ranks of a host average their gradients each step, exact) or ``ranks`` (each rank is a
            worker of its own; with ``parallel=ddp``).
    """

    every: int = 32
    warmup_steps: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    workers: str = "hosts"

    def __post_init__(self) -> None:
        check_count("sync.local_sgd.every", self.every, low=1, unit="optimizer steps")
        check_count("sync.local_sgd.warmup_steps", self.warmup_steps, low=0, unit="optimizer steps")
        check_range("sync.local_sgd.outer_lr", self.outer_lr, low=1e-6, high=10.0, unit="per step")
        check_range("sync.local_sgd.outer_momentum", self.outer_momentum, low=0.0, high=0.9999, unit="of the last step")
        check_flags("sync.local_sgd", self)
        check_count("sync.local_sgd.fragments", self.fragments, low=1, unit="fragments")
        check_count("sync.local_sgd.overlap_steps", self.overlap_steps, low=0, unit="optimizer steps")
        if self.mixing is not None:
            check_range("sync.local_sgd.mixing", self.mixing, low=0.0, high=0.9999, unit="of a worker's own value")
        check_choice("sync.local_sgd.workers", self.workers, WORKERS)
        if self.fragments > self.every:
            raise ConfigError(
                f"sync.local_sgd.fragments={self.fragments} with every={self.every}: of {self.every} steps each can "
                f"have one fragment; write fragments={self.every} or less"
            )
        if self.overlap_steps >= self.every:
            raise ConfigError(
                f"sync.local_sgd.overlap_steps={self.overlap_steps} with every={self.every}: a fragment is to arrive "
                f"before it is sent again; write overlap_steps={self.every - 1} or less"
            )

    @property
    def kept(self) -> float:
        """The mixing that applies."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.overlap_steps else 0.0
