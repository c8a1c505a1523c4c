"""The example, with a callback that says which rank has done which step: ``elastic_example.py OVERRIDE...``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train.py"


class Narrator(Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"pid {os.getpid()}")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            print(f"step {trainer.global_step} of {trainer.world_size} ranks")


class NarratedTrainer(pl.Trainer):
    def __init__(self, *, callbacks: list[Callback], **arguments: Any) -> None:
        super().__init__(callbacks=[*callbacks, Narrator()], **arguments)


if __name__ == "__main__":
    pl.Trainer = NarratedTrainer  # type: ignore[misc]
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
