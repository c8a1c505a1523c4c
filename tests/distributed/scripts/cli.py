"""A user's LightningCLI: python cli.py fit --trainer.strategy hierdist ..."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist  # noqa: F401  # registers the names
from tests.distributed.scripts.train import Model


class WithData(Model):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(24, 7, generator=generator), torch.randn(24, 3, generator=generator))
        return DataLoader(data, batch_size=3)


if __name__ == "__main__":
    LightningCLI(WithData, seed_everything_default=0, save_config_callback=None)
