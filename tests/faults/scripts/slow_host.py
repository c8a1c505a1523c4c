"""Trains until there is a file ``enough`` in the working directory; host b works a tenth of a second more each step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dist import HierDistStrategy

MORE_S = 0.1 if os.environ["HIERDIST_HOST"] == "b" else 0.0


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        end_s = time.thread_time() + MORE_S
        while time.thread_time() < end_s:
            self.layer(batch)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class UntilEnough(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.strategy.reduce_boolean_decision(Path("enough").exists(), all=False):
            trainer.should_stop = True


if __name__ == "__main__":
    trainer = Trainer(
        strategy=HierDistStrategy(elastic="degrade"),
        accelerator="cpu",
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=-1,
        callbacks=[UntilEnough()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.ones(1000, 8), batch_size=4))
    print(f"rank {trainer.global_rank} of {trainer.world_size} is done in round {os.environ['HIERDIST_ROUND']}")
