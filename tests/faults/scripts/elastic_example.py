"""The example, with a callback by which each host says which step is done: ``elastic_example.py OVERRIDE...``.

It trains until there is a file ``enough`` in the working directory, or as many steps as a file ``stop_at`` there says.
Where ``hold_at`` names a step and a number of ranks, fewer ranks than that wait before that step until they are told to
stop. What each rank trains on goes into ``ledger-*.jsonl``, see ``tests/support/ledger.py``, and the weights at the end
into ``weights.pt``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_dist.elastic.detect.phases import Order
from lightning_dist.heartbeat import pulse_of

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train.py"


class Narrator(Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.said_step = trainer.global_step
        print(f"pid {os.getpid()}, round {os.environ['HIERDIST_ROUND']}, after step {trainer.global_step}")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        pulse, hold_at = pulse_of(trainer), Path("hold_at")
        assert pulse is not None
        while hold_at.exists() and pulse.order() == Order.NONE:
            step, ranks = map(int, hold_at.read_text().split())
            if trainer.global_step < step or trainer.world_size >= ranks:
                break
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.local_rank == 0 and trainer.global_step > self.said_step:  # not after each micro-batch
            self.said_step = trainer.global_step
            print(f"step {trainer.global_step} of {trainer.world_size} ranks")
        if trainer.strategy.reduce_boolean_decision(self.has_enough(trainer.global_step), all=False):
            trainer.should_stop = True

    def has_enough(self, step: int) -> bool:
        stop_at = Path("stop_at")
        return Path("enough").exists() or (stop_at.exists() and step >= int(stop_at.read_text()))


class Ledger(Callback):
    """A line before each micro-batch, with its bytes, and one after it, with its loss."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.round = int(os.environ["HIERDIST_ROUND"])
        path = Path(f"ledger-{self.round}-{trainer.global_rank}.jsonl")
        self.file = path.open("w", buffering=1)  # until training ends

    def write(self, trainer: pl.Trainer, **what: Any) -> None:
        place = {
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "of_host": int(os.environ["LOCAL_WORLD_SIZE"]),
        }
        self.file.write(json.dumps({"round": self.round, "step": self.step, **place, **what}) + "\n")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        self.step = trainer.global_step
        self.write(trainer, samples=[bytes(tokens.tolist()).decode("latin1") for tokens in batch[0]])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.write(trainer, loss=float(outputs["loss"]), rate=rate)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.file.close()


class NarratedTrainer(pl.Trainer):
    def __init__(self, *, callbacks: list[Callback], **arguments: Any) -> None:
        super().__init__(callbacks=[*callbacks, Ledger(), Narrator()], **arguments)

    def fit(self, model: pl.LightningModule, *arguments: Any, **others: Any) -> None:
        super().fit(model, *arguments, **others)
        weights = model.state_dict()
        if self.is_global_zero:
            torch.save({name: value.detach().clone() for name, value in weights.items()}, "weights.pt")


if __name__ == "__main__":
    pl.Trainer = NarratedTrainer  # type: ignore[misc]
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
