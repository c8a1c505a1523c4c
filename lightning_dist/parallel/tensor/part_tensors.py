"""The whole tensors of a model whose layers are split, and nothing else is spread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.full_tensors import FullTensors, without_memory
from lightning_dist.parallel.tensor.model import SplitParameter, TensorParallel


class PartTensors(FullTensors):
    """Gathers parts over the ranks that share a layer.

    Args:
        split: The split model.
        operation: Opens the seam around an operation of the group, given the operation's name.
    """

    def __init__(self, split: TensorParallel, operation: Callable[[str], AbstractContextManager[None]]) -> None:
        self._split = split
        self._operation = operation

    def shape_of(self, parameter: nn.Parameter) -> torch.Size | None:
        """See :class:`FullTensors`."""
        entry = self._entry_of(parameter)
        return None if entry is None else entry.shape

    def whole(self, parameter: nn.Parameter, value: DTensor, *, keep: bool = True) -> torch.Tensor:
        """See :class:`FullTensors`."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        with self._operation("gather of split layers"):
            whole = self._split.whole(entry, value.to_local())
        return whole if keep else without_memory(whole)

    def cut(self, parameter: nn.Parameter, whole: torch.Tensor) -> DTensor:
        """See :class:`FullTensors`."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        return self._split.placed(entry, self._split.part(entry, whole).to(parameter.device))

    def _entry_of(self, parameter: nn.Parameter) -> SplitParameter | None:
        for entry in self._split.entries:
            module, own, _ = entry.places[0]
            if module._parameters[own] is parameter:
                return entry
        return None
