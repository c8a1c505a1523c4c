"""The smallest model that trains, for the applications beside this file; what each rank saw goes into files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist  # noqa: F401  # registers the strategy


class Tiny(pl.LightningModule):
    def __init__(self, *, fail_on_rank: int | None = None, fail_at_step: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fail_on_rank = fail_on_rank
        self.fail_at_step = fail_at_step

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.fail_on_rank and batch_idx == self.fail_at_step:
            raise ValueError(f"planned failure of rank {self.global_rank}")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(**arguments: Any) -> pl.Trainer:
    given: dict[str, Any] = {"max_steps": 2, "devices": 2, **arguments}
    return pl.Trainer(
        strategy="hierdist",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def loader(*, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=2, num_workers=workers)


def write_down(folder: str | Path, trained: pl.Trainer, **facts: Any) -> None:
    """What this rank saw, as ``rank<r>.json`` in ``folder``."""
    facts = {"rank": trained.global_rank, "world_size": trained.world_size, "pid": os.getpid(), **facts}
    Path(folder, f"rank{trained.global_rank}.json").write_text(json.dumps(facts), encoding="utf-8")
