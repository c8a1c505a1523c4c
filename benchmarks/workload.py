"""What the benchmarks train: blocks of MLPs whose gradients are large and whose compute is as long as one likes."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, HIDDEN, BLOCKS = 768, 3072, 6


class Nap(torch.autograd.Function):
    """Sleeps in forward and in backward: compute that takes no core, as on an accelerator."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Block(nn.Module):
    """768 -> 3072 -> 768.

    Args:
        compute_s: Seconds of pretended compute of a forward and a backward together, a third of it in the forward.
    """

    def __init__(self, compute_s: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.compute_s = compute_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self._nap(self.down(self._nap(torch.relu(self.up(values)))))

    def _nap(self, values: torch.Tensor) -> torch.Tensor:
        """Half of the block's pretended compute, beside one of its two layers."""
        if not self.compute_s:
            return values
        napped: torch.Tensor = Nap.apply(values, self.compute_s / 6, self.compute_s / 3)
        return napped


def make_model(compute_s: float = 0.0) -> nn.Sequential:
    """6 blocks, 28.3M parameters, 113 MB of fp32 gradients.

    Args:
        compute_s: Seconds of pretended compute a step.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(Block(compute_s / BLOCKS) for _ in range(BLOCKS)))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class _Noise(Dataset[torch.Tensor]):
    """Batches that cost nothing to make."""

    def __init__(self, batch: int, count: int) -> None:
        self._batch = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(0))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


def make_loader(batch: int, count: int) -> DataLoader[torch.Tensor]:
    """``count`` batches [batch, 768]."""
    return DataLoader(_Noise(batch, count), batch_size=None)


class Module(pl.LightningModule):
    """The user's module; nothing in it knows who trains it."""

    def __init__(self, compute_s: float = 0.0) -> None:
        super().__init__()
        self.model = make_model(compute_s)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
