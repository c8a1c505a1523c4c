"""Trains a table that is dealt to the ranks; rank 1 is killed in the first round. Arguments: folder of checkpoints."""

from __future__ import annotations

import os
import signal
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, HierDistStrategy

NUM_ROWS, KILLED_AT, STEPS = 200, 12, 20


class Table(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_ROWS, 8, sparse=True)

    def on_train_start(self) -> None:
        print(
            f"rank {self.global_rank} begins at step {self.global_step} with {len(self.table.weight)} rows", flush=True
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if (self.global_rank, self.global_step, os.environ["HIERDIST_ROUND"]) == (1, KILLED_AT, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.table(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


if __name__ == "__main__":
    module = Table()
    trainer = pl.Trainer(
        strategy=HierDistStrategy(sync="parameter_server", checkpoint="sharded", elastic="restart"),
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AsyncShardedCheckpoint(sys.argv[1], every_n_train_steps=5)],
    )
    trainer.fit(module, DataLoader(torch.arange(2000) % NUM_ROWS, batch_size=16))
    print(f"rank {trainer.global_rank} ends, sum {float(module.table.weight.detach().sum()):.6f}", flush=True)
