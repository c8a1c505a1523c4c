"""Checkpoints that go to memory only: often, and without waiting for one that is still being written."""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl


class KeepsInMemory(Protocol):
    """What :class:`MemorySnapshots` needs of a strategy; every rank gets the same answers."""

    @property
    def is_anyone_writing(self) -> bool:
        """Whether a rank was writing a checkpoint a batch ago."""

    @property
    def kept_step(self) -> int | None:
        """The optimizer step of the newest checkpoint that goes to memory."""

    def keep_in_memory(self, trainer: pl.Trainer) -> None:
        """Begin to write one."""


class MemorySnapshots(pl.Callback):
    """Keeps a checkpoint in memory every so many optimizer steps; while one is being written, a step later.

    It comes after all other callbacks, so that what they change is in it.

    Args:
        strategy: The Trainer's.
        every_n_steps: How often.
    """

    def __init__(self, strategy: KeepsInMemory, every_n_steps: int) -> None:
        self._strategy = strategy
        self._every_n_steps = every_n_steps
        self._looked_at = 0
        self._kept = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What training begins with need not be kept."""
        self._looked_at = self._kept = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep one, if it is time to."""
        step, every = trainer.global_step, self._every_n_steps
        if step == self._looked_at:  # gradients are being accumulated
            return
        self._looked_at = step
        if self._strategy.kept_step == step:  # it has just gone to storage and to memory
            self._kept = step
        elif step // every > self._kept // every and not self._strategy.is_anyone_writing:
            self._kept = step
            self._strategy.keep_in_memory(trainer)
