"""The heartbeat for Trainers with another strategy than ours."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from lightning_dist.heartbeat import Beats
from lightning_dist.restarting import GoingOn, go_on_elsewhere


class Heartbeat(Beats):
    """Tells the agent of ``hierdist launch`` how far this rank is, and lets a run that was started again go on.

    :class:`~lightning_dist.strategy.HierDistStrategy` does both by itself. Add it to a Trainer with another strategy,
    such as Lightning's ``ddp``: else a rank that hangs there looks healthy, and each start begins where the script
    says. It goes on from the newest checkpoint in storage, after torchrun's restarts as well. What counts as a hang is
    said by the options ``elastic.start_s``, ``hang_floor_s``, ``hang_factor``, ``save_s`` and ``validation_s``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._going_on: GoingOn | None = None  # where the strategy does not see to it

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The ranks have met."""
        if stage == "fit" and self._going_on is None:
            self._going_on = go_on_elsewhere(trainer, os.environ)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All callbacks are set up: where their checkpoints go is left for the next start."""
        if self._going_on is not None:
            self._going_on.leave_trail()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave word of what has happened; Lightning calls no teardown then."""
        self._going_on = None
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """What the script does now is its own affair. Safe to call twice."""
        self._going_on = None
        super().teardown(trainer, pl_module, stage)
