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
        check: Called with the arguments of the first forward.
    """

    def __init__(self, module: nn.Module, split: TensorParallel, check: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self._split = split
        self._check: Callable[[Any], None] | None = check

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self._check is not None:
            self._check((args, kwargs))
            self._check = None
        with self._split.running():
            return gathered(self.module(*args, **kwargs))
