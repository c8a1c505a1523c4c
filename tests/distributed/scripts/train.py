"""A user's script: trains a small model and prints what each rank ends with.

python train.py [--strategy hierdist] [--devices 2] [--nodes 1] [--fail setup|training|validation|sigterm --rank 1]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist  # noqa: F401  # registers the names


class Stops(pl.Callback):
    """Prints where a run that does not come to its end stops."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        sys.stdout.write(f"rank {trainer.global_rank} stops at {trainer.global_step} by {type(exception).__name__}\n")
        sys.stdout.flush()


class Model(pl.LightningModule):
    def __init__(self, fail: str = "", rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
        self.fail = fail
        self.rank = rank

    def fail_in(self, phase: str) -> None:
        if phase == self.fail and self.global_rank == self.rank:
            raise ValueError(f"no luck in {phase}")

    def terminate(self) -> None:
        if self.fail == "sigterm" and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def setup(self, stage: str) -> None:
        self.fail_in("setup")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.fail_in("training")
            self.terminate()
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.fail_in("validation")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Stops()]

    def on_train_end(self) -> None:
        total = sum(float(p.detach().double().sum()) for p in self.net.parameters())
        name = type(self.trainer.strategy).__name__
        sys.stdout.write(f"rank {self.global_rank} of {self.trainer.world_size} {name} ends with {total:.6f}\n")
        sys.stdout.flush()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="hierdist")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--fail", default="")
    parser.add_argument("--rank", type=int, default=1)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 7, generator=generator), torch.randn(24, 3, generator=generator))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(arguments.fail, arguments.rank)
    loader: DataLoader[Any] = DataLoader(data, batch_size=3)
    trainer.fit(model, loader, loader)
    total = sum(float(p.detach().double().sum()) for p in model.net.parameters())
    sys.stdout.write(f"main of rank {trainer.global_rank} has {total:.6f}\n")


if __name__ == "__main__":
    main()
