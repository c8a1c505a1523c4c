"""Trains with loader workers until it is told to stop; run one process a rank: ``preempted.py FOLDER CONTEXT [STUCK]``.

It prints the step it begins with, and that it is under way five steps later. With ``STUCK``, the step after that never
ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_dist import AsyncShardedCheckpoint, HierDistStrategy

STEPS = 5


class Numbers(Dataset[torch.Tensor]):
    """More than a test waits for."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


class Endless(LightningModule):
    def __init__(self, *, is_stuck: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.is_stuck = is_stuck

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.is_stuck and batch_idx == STEPS + 1:
            print("stuck", flush=True)
            time.sleep(3600)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Notes(Callback):
    """Says where it begins, and that it is under way."""

    first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"begins at {trainer.global_step}", flush=True)
        self.first = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.first + STEPS:
            print("under way", flush=True)


if __name__ == "__main__":
    folder, context = Path(sys.argv[1]), sys.argv[2]
    trainer = Trainer(
        strategy=HierDistStrategy(checkpoint="async_sharded", sync={"timeout_s": 20.0}),
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"]),
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[AsyncShardedCheckpoint(folder / "checkpoints", every_n_train_steps=10**9), Notes()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=context)
    trainer.fit(Endless(is_stuck="STUCK" in sys.argv), loader)
