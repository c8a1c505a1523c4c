"""Trains eight steps, saves each other one, and kills rank 1 after the fifth if it is the first start.

``killed_once.py FOLDER [HOW]``; HOW is a strategy of ours (``hierdist``), or what lets Lightning's ddp go on:
``sharded``, the callback ``AsyncShardedCheckpoint``, or ``heartbeat``, ``Heartbeat`` beside Lightning's own callback.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, Heartbeat, HierDistStrategy

START = os.environ["TORCHELASTIC_RESTART_COUNT"]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class KillOnce(Callback):
    """Also says where a start begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"start {START} begins at {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1 and START == "0":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "hierdist"
    folder_of_saves = folder / "checkpoints"
    saves = (
        ModelCheckpoint(folder_of_saves, every_n_train_steps=2)
        if how == "heartbeat"
        else AsyncShardedCheckpoint(folder_of_saves, checkpoint="sharded", every_n_train_steps=2)
    )
    trainer = Trainer(
        strategy=HierDistStrategy(checkpoint="sharded") if how == "hierdist" else "ddp",
        accelerator="cpu",
        devices=2,
        max_steps=8,
        default_root_dir=folder,
        callbacks=[saves, KillOnce(), *([Heartbeat()] if how == "heartbeat" else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.ones(1000, 8), batch_size=4))
    print(f"ended at {trainer.global_step}", flush=True)
