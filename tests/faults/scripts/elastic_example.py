"""The example, with a callback by which each host says which step is done: ``elastic_example.py OVERRIDE...``.

It trains until there is a file ``enough`` in the working directory.
"""

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
        self.said_step = trainer.global_step
        print(f"pid {os.getpid()}, round {os.environ['HIERDIST_ROUND']}, after step {trainer.global_step}")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.local_rank == 0 and trainer.global_step > self.said_step:  # not after each micro-batch
            self.said_step = trainer.global_step
            print(f"step {trainer.global_step} of {trainer.world_size} ranks")
        if trainer.strategy.reduce_boolean_decision(Path("enough").exists(), all=False):
            trainer.should_stop = True


class NarratedTrainer(pl.Trainer):
    def __init__(self, *, callbacks: list[Callback], **arguments: Any) -> None:
        super().__init__(callbacks=[*callbacks, Narrator()], **arguments)


if __name__ == "__main__":
    pl.Trainer = NarratedTrainer  # type: ignore[misc]
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
