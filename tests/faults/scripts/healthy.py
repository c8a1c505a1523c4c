"""Trains well, with saves, validation and pauses in the user's code; ``healthy.py STRATEGY FOLDER STEPS PAUSE_S``."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, Heartbeat, HierDistStrategy


class Module(pl.LightningModule):
    """Waits once in each third of training, on one rank, so that the other waits for it."""

    def __init__(self, num_steps: int, pause_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._pauses = {num_steps // 3: (1, pause_s), 2 * num_steps // 3: (0, pause_s)}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rank, pause_s = self._pauses.get(self.global_step, (-1, 0.0))
        if rank == self.global_rank:
            time.sleep(pause_s)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Slow(Callback):
    """Waits on all ranks between two steps, once."""

    def __init__(self, at_step: int, pause_s: float) -> None:
        self._at_step, self._pause_s = at_step, pause_s

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == self._at_step:
            time.sleep(self._pause_s)


def main(strategy: str, folder: str, num_steps: int, pause_s: float) -> None:
    interval = num_steps // 40
    made: Any = HierDistStrategy(sync={"timeout_s": 60.0})
    if strategy == "ddp":
        made = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    saving = AsyncShardedCheckpoint(folder, every_n_train_steps=interval, save_top_k=1)
    loader = DataLoader(torch.ones(8 * num_steps, 8), batch_size=4)
    trainer = pl.Trainer(
        strategy=made,
        accelerator="cpu",
        devices=2,
        max_steps=num_steps,
        val_check_interval=interval,
        limit_val_batches=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, Slow(20 * interval, pause_s), *([Heartbeat()] if strategy == "ddp" else [])],
    )
    trainer.fit(Module(num_steps, pause_s), loader, loader)
    print(f"did {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
