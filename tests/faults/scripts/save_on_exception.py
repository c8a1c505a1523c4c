"""Rank 1 fails while a callback saves on exceptions; run one process a rank, as torchrun would start it."""

from __future__ import annotations

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_dist import HierDistStrategy
from tests.distributed.lightning_runs import PoolEnvironment


class Failing(LightningModule):
    """Fails in the third batch of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if (self.global_rank, batch_idx) == (1, 2):
            raise OSError("the disk of this rank is full")
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    mode, timeout_s = sys.argv[1:]
    Trainer(
        strategy=HierDistStrategy(mode, sync={"timeout_s": float(timeout_s)}),
        accelerator="cpu",
        devices=2,
        plugins=[PoolEnvironment()],
        callbacks=[OnExceptionCheckpoint(os.getcwd())],
        max_epochs=1,
        default_root_dir=os.getcwd(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Failing(), DataLoader(torch.ones(64, 8), batch_size=4))
