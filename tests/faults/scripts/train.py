"""Trains until something breaks; run one process a rank, as torchrun would start it: ``train.py NUMBER_OF_HOSTS``."""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

import lightning_dist  # noqa: F401 - registers the strategy
from lightning_dist import HierDistStrategy
from tests.distributed.lightning_runs import PoolEnvironment


class Endless(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 5:
            print("under way", flush=True)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    num_hosts = int(sys.argv[1])
    Trainer(
        strategy=HierDistStrategy(sync={"timeout_s": 5.0}),
        accelerator="cpu",
        devices=2 // num_hosts,
        num_nodes=num_hosts,
        plugins=[PoolEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Endless(), DataLoader(torch.ones(10_000_000, 8), batch_size=4))
