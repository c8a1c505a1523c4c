"""The wrapper through which a split module is called in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_dist.parallel.tensor.logits import gathered
from lightning_dist.parallel.tensor.model import TensorParallel


class SplitModule(nn.Module):
    """Runs a split module; what it returns is plain.

    Args:
        module: Split, and perhaps wrapped for the data axes.
        split: What has split it.
        check: Called with the arguments of the first forward, and of the first after each :meth:`check_next`.
    """

    def __init__(self, module: nn.Module, split: TensorParallel, check: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self._split = split
        self._check = check
        self._is_due = True

    def check_next(self) -> None:
        """Look at the arguments of the next forward too."""
        self._is_due = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self._is_due:
            self._is_due = False
            self._check((args, kwargs))
        with self._split.running():
            return gathered(self.module(*args, **kwargs))
