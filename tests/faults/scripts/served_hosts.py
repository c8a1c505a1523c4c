"""Trains a table that is dealt to servers, on several hosts: ``served_hosts.py FOLDER SERVERS WHOM``.

In the first round something is hit before a step: WHOM is ``rank`` (the last one is killed), ``server`` (the server
process of the first host), or ``host`` (the ranks wait there, until who tests has killed the last one).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, HierDistStrategy

NUM_ROWS, WIDTH, HIT_AT, STEPS, IDS = 200, 8, 13, 20, 48


def ids_of(step: int) -> torch.Tensor:
    """Of all ranks."""
    return torch.randint(NUM_ROWS, (IDS,), generator=torch.Generator().manual_seed(step))


def new_table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(NUM_ROWS, WIDTH, sparse=True)


class Table(pl.LightningModule):
    def __init__(self, whom: str) -> None:
        super().__init__()
        self.table = new_table()
        self.whom = whom

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} of {self.trainer.world_size} begins at step {self.global_step}", flush=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == HIT_AT and os.environ["HIERDIST_ROUND"] == "1":
            self.hit()
        ids = ids_of(self.global_step)[self.global_rank :: self.trainer.world_size]
        return self.table(ids).square().mean()

    def hit(self) -> None:
        if self.whom == "rank" and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.whom == "server" and self.global_rank == 0:
            for child in psutil.Process().children(recursive=True):
                if any("parameter_server/processes" in part for part in child.cmdline()):
                    child.kill()
        if self.whom == "host":
            print("waits to be hit", flush=True)
            signal.pause()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


if __name__ == "__main__":
    folder, servers, whom = sys.argv[1:]
    module = Table(whom)
    trainer = pl.Trainer(
        strategy=HierDistStrategy(
            sync={"sparse": {"exchange": "parameter_server"}, "parameter_server": {"servers": servers}},
            checkpoint={"mode": "async_sharded", "replica": "buddy", "memory_every_n_steps": 2},
            elastic="degrade",
        ),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[AsyncShardedCheckpoint(Path(folder), every_n_train_steps=1000)],
    )
    trainer.fit(module, DataLoader(torch.arange(STEPS), batch_size=1))
    print(f"rank {trainer.global_rank} ends, sum {float(module.table.weight.detach().double().sum()):.9f}", flush=True)
