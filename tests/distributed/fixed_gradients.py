"""A model whose gradients are known before, so that what became of them can be counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class FixedGradients(pl.LightningModule):
    """A loss whose gradients are the batch, whatever the weights: weights are minus the sum of what was applied.

    ``late`` trains only from some step on.

    Args:
        shapes: Of its parameters.
        uses: Those that take part in the loss while they train.
        unfrozen_at: From which step on ``late`` trains.

    Attributes:
        owed: What this rank owes of each parameter when training has ended.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, uses: Sequence[str], unfrozen_at: int) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
        self.late.requires_grad_(False)
        self.owed: dict[str, torch.Tensor] = {}
        self._shapes, self._uses, self._unfrozen_at = shapes, uses, unfrozen_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._unfrozen_at:
            self.late.requires_grad_(True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        used = [name for name in self._uses if getattr(self, name).requires_grad]
        return torch.stack([(getattr(self, name) * batch[name]).sum() for name in used]).sum()

    def on_train_end(self) -> None:
        feedback = self.trainer.strategy._mode.feedback  # type: ignore[attr-defined]
        self.owed = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        for name, pieces in ({} if feedback is None else feedback.owed()).items():
            for low, values in pieces:
                self.owed[name].view(-1)[low : low + len(values)] += values

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)
