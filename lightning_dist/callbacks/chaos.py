"""A rank of any Trainer lets the plan of ``hierdist chaos`` happen; added by ``hierdist_chaos_hook``, not by users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_dist.build.injections import fill_disk
from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.injector import Injector, place_of


class ChaosCallback(pl.Callback):
    """Before each optimizer step, lets what the plan has for this rank and step happen.

    Args:
        folder: Of the chaos.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = ChaosFolder(Path(folder))
        self._injector: Injector | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Each fit anew: the rank may be another one."""
        if stage == "fit":
            place = place_of(os.environ, trainer.global_rank)
            self._injector = Injector(self._folder, place, acts={"enospc": fill_disk})

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Micro-batches of one step count once."""
        if self._injector is not None:
            self._injector.at_step(trainer.global_step, checkpoints=lambda: _saves_to(trainer))


def _saves_to(trainer: pl.Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    folder = getattr(callback, "dirpath", None)
    return None if folder is None else os.fspath(folder)
