"""Checkpoints that go to memory only: often, and whole before the next step is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_LIMIT_S = 2.0
_SHARE = 0.05
_VOTE_STEPS = 2
"""A vote is cast before a batch and read one batch later: what it says was so before the step before."""


class KeepsInMemory(Protocol):
    """What :class:`MemorySnapshots` needs of a strategy; but for :meth:`await_memory`, every rank gets the same."""

    @property
    def is_anyone_writing(self) -> bool:
        """Whether a rank was writing a checkpoint a batch ago."""

    def ask_who_writes(self) -> bool:
        """Whether a rank is writing one now; every rank calls it, and waits for the others."""

    @property
    def begun_step(self) -> int | None:
        """The optimizer step of the newest checkpoint that goes to memory, whatever has become of it."""

    def await_memory(self, timeout_s: float) -> bool:
        """Wait until the newest is whole in memory, or has failed; whether it has within the time."""

    def keep_in_memory(self, trainer: pl.Trainer) -> None:
        """Begin to write one."""


class Patience:
    """How long training may be held until a snapshot is whole: some time at once, and a share of the time in between.

    Where a snapshot is not whole after that, the link is too slow for them: none is waited for until one is whole by
    itself.

    Args:
        limit_s: What may be waited at once, in seconds.
        share: Of the time that goes by, what may be waited again.
        clock: Seconds, from any start.
    """

    def __init__(
        self, *, limit_s: float = _LIMIT_S, share: float = _SHARE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._share = share
        self._clock = clock
        self._left_s = limit_s
        self._seen_s = clock()
        self.has_given_up = False

    def wait(self, ends_within: Callable[[float], bool]) -> bool:
        """Wait for a snapshot as long as may be.

        Args:
            ends_within: Waits so many seconds at most; whether it is over.

        Returns:
            Whether it is.
        """
        began_s = self._clock()
        self._left_s = min(self._limit_s, self._left_s + self._share * (began_s - self._seen_s))
        is_over = ends_within(0.0 if self.has_given_up else self._left_s)
        self._seen_s = self._clock()
        self._left_s = max(0.0, self._left_s - (self._seen_s - began_s))
        self.has_given_up = not is_over
        return is_over


class MemorySnapshots(pl.Callback):
    """Keeps a checkpoint in memory every so many optimizer steps; while one is still being written, a step later.

    It is waited for before the next optimizer step, so that a failure costs one interval of steps at most, as far as
    :class:`Patience` goes. This comes after all other callbacks, so that what they change is in it.

    Args:
        strategy: The Trainer's.
        every_n_steps: How often.
    """

    def __init__(self, strategy: KeepsInMemory, every_n_steps: int) -> None:
        self._strategy = strategy
        self._every_n_steps = every_n_steps
        self._patience = Patience(limit_s=_LIMIT_S)
        self._is_awaited = False
        self._has_warned = False
        self._looked_at = 0
        self._kept = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What training begins with need not be kept."""
        self._looked_at = self._kept = trainer.global_step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the one that was begun after the step before."""
        if self._is_awaited:
            self._is_awaited = False
            if not self._patience.wait(self._strategy.await_memory):
                self._warn()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep one, if it is time to."""
        step, every = trainer.global_step, self._every_n_steps
        if step == self._looked_at:  # gradients are being accumulated
            return
        self._looked_at = step
        if self._strategy.begun_step == step:  # it goes to memory, and then to storage
            self._kept = step
            self._is_awaited = True
        elif step // every > self._kept // every and not self._is_anyone_writing():
            self._kept = step
            self._strategy.keep_in_memory(trainer)
            self._is_awaited = True

    def _is_anyone_writing(self) -> bool:
        is_vote_too_old = self._every_n_steps <= _VOTE_STEPS
        return self._strategy.ask_who_writes() if is_vote_too_old else self._strategy.is_anyone_writing

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        every = self._every_n_steps
        rank_zero_warn(
            f"a snapshot in memory takes longer than a step, and training goes on without waiting for it: a failure "
            f"may cost more than the {every} steps of checkpoint.memory_every_n_steps={every}. Write a larger number, "
            "or give the hosts a faster link"
        )
