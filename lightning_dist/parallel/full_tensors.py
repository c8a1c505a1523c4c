"""Between spread and whole: what users see of a model that is spread over ranks is whole, and so is what they load.

``state_dict()`` of any module that holds parts gathers them, so that it holds whole tensors under the original names;
all ranks must call it. ``load_state_dict()`` takes whole tensors and keeps this rank's part. The same for the states of
optimizers, whose tensors follow their parameters.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.boxes import Spread
from lightning_dist.parallel.state_hooks import StateHooks


class FullTensors(abc.ABC):
    """Gathers and cuts the tensors of one model, parameter by parameter. Every rank makes it."""

    @abc.abstractmethod
    def shape_of(self, parameter: nn.Parameter) -> torch.Size | None:
        """The shape of the whole parameter; ``None`` if it is whole on each rank."""

    @abc.abstractmethod
    def spread_of(self, parameter: nn.Parameter) -> Spread:
        """How a spread parameter is spread, and tensors of its shape that belong to it."""

    @abc.abstractmethod
    def whole(self, parameter: nn.Parameter, value: DTensor, *, keep: bool = True) -> torch.Tensor:
        """A tensor that is spread as a parameter is, as a whole one; collective.

        Args:
            parameter: Spread.
            value: The parameter, or a tensor of its shape that belongs to it.
            keep: Otherwise the result has its shape and type, but no memory.
        """

    @abc.abstractmethod
    def cut(self, parameter: nn.Parameter, whole: torch.Tensor) -> DTensor:
        """This rank's part of a whole tensor of the parameter's shape, spread as it is."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors; collective.

        Args:
            optimizer: Of parameters of this model.
            keep: Whether this rank wants the values; the others get tensors of the same shape without memory.
        """
        state = optimizer.state_dict()
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        whole = {index: self._whole(owners[index], entries, keep) for index, entries in state["state"].items()}
        return {**state, "state": whole}

    def cut_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole optimizer state as this rank's optimizer holds it."""
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        return {
            **state,
            "state": {index: self._cut(owners[index], entries) for index, entries in state["state"].items()},
        }

    @abc.abstractmethod
    def spread_of_entry(self, parameter: nn.Parameter, value: DTensor) -> Spread:
        """How an entry of an optimizer's state is spread, which may be of another shape than the parameter."""

    @abc.abstractmethod
    def placed(self, parameter: nn.Parameter, part: torch.Tensor) -> DTensor:
        """This rank's part of a tensor of a spread parameter's shape, as the DTensor it is a part of."""

    def whole_entry(self, parameter: nn.Parameter, value: DTensor, *, keep: bool) -> torch.Tensor:
        """An entry of an optimizer's state, as a whole tensor; collective. See :meth:`whole`."""
        return self.whole(parameter, value, keep=keep)

    def cut_entry(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of an entry of an optimizer's state, which may be of another shape than the parameter."""
        return self.cut(parameter, value) if value.shape == self.shape_of(parameter) else value

    def _whole(self, parameter: nn.Parameter, entries: Any, keep: bool) -> Any:
        if self.shape_of(parameter) is None or not isinstance(entries, Mapping):
            return entries
        return {
            name: self.whole_entry(parameter, v, keep=keep).cpu() if isinstance(v, DTensor) else v
            for name, v in entries.items()
        }

    def _cut(self, parameter: nn.Parameter, entries: Any) -> Any:
        if self.shape_of(parameter) is None or not isinstance(entries, Mapping):
            return entries
        return {
            name: self.cut_entry(parameter, v) if isinstance(v, torch.Tensor) and not isinstance(v, DTensor) else v
            for name, v in entries.items()
        }


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type that holds one value only."""
    return tensor.new_zeros(()).expand(tensor.shape)


class StateDictHooks(StateHooks):
    """Makes ``state_dict`` and ``load_state_dict`` of a spread model, and of its modules, speak of whole tensors.

    Args:
        root: The module that is spread.
        full: Its tensors.
    """

    def __init__(self, root: nn.Module, full: FullTensors) -> None:
        super().__init__(root)
        self._full = full

    def complete(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        done: dict[int, torch.Tensor] = {}  # tied weights stay tied
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if not isinstance(value, DTensor) or self._full.shape_of(parameter) is None:
                continue
            if id(parameter) not in done:
                whole = self._full.whole(parameter, value, keep=self.keep)
                done[id(parameter)] = whole.cpu() if self.on_cpu else whole
            state_dict[prefix + name] = done[id(parameter)]

    def cut(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        for name, parameter in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == self._full.shape_of(parameter):  # otherwise load_state_dict says what does not fit
                state_dict[prefix + name] = self._full.cut(parameter, value)
