"""The whole tensors of a model whose layers are split, and nothing else is spread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.parallel.boxes import Spread, whole_box
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

    def spread_of(self, parameter: nn.Parameter) -> Spread:
        """See :class:`FullTensors`."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        return self._split.spread_of(entry)

    def spread_of_entry(self, parameter: nn.Parameter, value: DTensor) -> Spread:
        """One that is not of the parameter's shape (a value a row, a value a column) is spread as torch likes."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        (placement,), shape = value.placements, value.shape
        if shape == entry.shape:
            return self.spread_of(parameter)
        if not isinstance(placement, Shard):
            return Spread(tuple(shape), (whole_box(shape),), frozenset())
        return self._split.spread_along(entry, shape, placement.dim)

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

    def placed(self, parameter: nn.Parameter, part: torch.Tensor) -> DTensor:
        """See :class:`FullTensors`."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        return self._split.placed(entry, part.to(parameter.device))

    def whole_entry(self, parameter: nn.Parameter, value: DTensor, *, keep: bool) -> torch.Tensor:
        """One that is not of the parameter's shape (a value a row, a value a column) is spread as torch likes."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        if value.shape == entry.shape and value.placements == (entry.placement,):
            return self.whole(parameter, value, keep=keep)
        with self._operation("gather of split layers"):
            gathered = value.full_tensor()
        if entry.fused > 1 and value.dim() and value.shape[0] == entry.shape[0]:
            gathered = self._split.in_own_order(entry, gathered)
        return gathered if keep else without_memory(gathered)

    def cut_entry(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Of one that is not of the parameter's shape: its part along the parameter's dim if it is as long there."""
        entry = self._entry_of(parameter)
        assert entry is not None, "asked for split parameters only"
        if value.shape == entry.shape:
            return self.cut(parameter, value)
        if value.dim() == 0:  # a count of steps
            return value
        return self._split.spread(entry, value.to(parameter.device))

    def _entry_of(self, parameter: nn.Parameter) -> SplitParameter | None:
        for entry in self._split.entries:
            module, own, _ = entry.places[0]
            if module._parameters[own] is parameter:
                return entry
        return None
