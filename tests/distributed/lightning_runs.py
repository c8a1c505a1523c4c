"""Lightning runs on the ranks of a pool: modules, data and a Trainer that takes the ranks as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dist import HierDistStrategy
from tests.support.tasks import RankContext


class PoolEnvironment(TorchElasticEnvironment):
    """Ranks exist already, and each knows its number."""

    @staticmethod
    def detect() -> bool:
        """Chosen by hand only."""
        return False

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Hosts may differ in size."""


def odd_model() -> nn.Sequential:
    """7 -> 13 -> 5 -> 3: no size divides another."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


Batch = tuple[torch.Tensor, torch.Tensor]


def make_batches(world_size: int, count: int, size: int = 4, seed: int = 1) -> list[list[Batch]]:
    """``[rank][i]``: inputs [size, 7] and targets [size, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(size, 7, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)]
        for _ in range(world_size)
    ]


def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class ListDataset(Dataset[Any]):
    """Ready batches."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def loader_of(batches: list[Any]) -> DataLoader[Any]:
    """A loader of ready batches."""
    return DataLoader(ListDataset(batches), batch_size=None)


class OddModule(pl.LightningModule):
    """Trains :func:`odd_model` and keeps what each step left.

    Args:
        make_optimizer: Makes the optimizer of the trainable parameters.
        make_model: Makes the network.
    """

    def __init__(
        self,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        make_model: Callable[[], nn.Module] = odd_model,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_model()
        self._make_optimizer = make_optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = mse(self.net, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = mse(self.net, batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer([p for p in self.net.parameters() if p.requires_grad])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that a step depends on all before it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A large epsilon keeps the first steps from amplifying rounding."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def trainer_on_pool(context: RankContext, strategy: Any, **arguments: Any) -> pl.Trainer:
    """A quiet Trainer for the ranks of a pool."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": context.local_world_size,
        "num_nodes": len(context.placement.hosts),
        "plugins": [PoolEnvironment()],
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **arguments})


def strategy_of(**arguments: Any) -> HierDistStrategy:
    """Ours, with a deadline fit for tests."""
    sync = arguments.pop("sync", {})
    return HierDistStrategy(sync={"timeout_s": 20.0, **sync}, **arguments)
