"""What this rank holds of the state of a model and of its optimizers, and who holds the same; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.parallel.boxes import Spread, whole_box
from lightning_dist.parallel.full_tensors import FullTensors
from lightning_dist.topology.layout import AXIS_NAMES, Layout


@dataclass(frozen=True)
class HeldTensor:
    """This rank's part of a tensor.

    Attributes:
        names: The tensor's names, several if it is tied; the first is the one it is kept under.
        local: This rank's values.
        spread: Where they are in the whole tensor.
        holders: The ranks that hold the same values, this one among them.
    """

    names: tuple[str, ...]
    local: Tensor
    spread: Spread
    holders: tuple[int, ...]


class HeldState:
    """Looks at a module as it is on this rank.

    Args:
        module: The user's.
        layout: Which rank stands where.
        rank: This one.
        full: Of what is spread; ``None`` where every tensor that is here is whole.
        axes: Of the layout, along which ranks hold different tensors altogether: ``pp`` where there are stages.
        counts: Whether this rank is to speak for a parameter or buffer; of several stages that hold it one does.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        rank: int,
        *,
        full: FullTensors | None = None,
        axes: frozenset[str] = frozenset(),
        counts: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._module = module
        self._full = full
        self._counts = counts
        self._axes = axes
        self._layout = layout
        self._rank = rank
        self._holders: dict[frozenset[str], tuple[int, ...]] = {}

    def of_model(self, state: Mapping[str, Any]) -> Iterator[HeldTensor]:
        """The tensors of a state of the module, each once, as its names have them there.

        Args:
            state: ``state_dict()`` of the module, as this rank holds it.
        """
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors():
            if isinstance(state.get(name), Tensor):
                names.setdefault(tensor, []).append(name)
        for tensor, known in names.items():
            if self._counts(tensor):
                yield from self._alike_or_first(self._held(tuple(known), tensor, state[known[0]]), tensor)
        found = {name for known in names.values() for name in known}
        for name, value in state.items():
            if name not in found and isinstance(value, Tensor):  # put there by a hook of the user's
                yield from self._alike_or_first(self._held((name,), None, value), value)

    def of_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[HeldTensor]:
        """The tensors of an optimizer's state, by the names of their parameters.

        Args:
            optimizer: Of parameters of the module.
            state: Its ``state_dict()``.
        """
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        for index, entries in state["state"].items():
            owner = owners[index]
            if not isinstance(entries, Mapping) or not self._counts(owner):
                continue
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    yield self._held((f"{names.get(id(owner), f'#{index}')}.{entry}",), owner, value)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=False)
        yield from self._module.named_buffers(remove_duplicate=False)

    def _alike_or_first(self, held: HeldTensor, tensor: Tensor) -> Iterator[HeldTensor]:
        """Parameters are alike on all ranks that hold them; of what may differ, statistics, the first.s counts."""
        if isinstance(tensor, nn.Parameter):
            yield held
        elif self._rank == held.holders[0]:
            yield replace(held, holders=(self._rank,))

    def _held(self, names: tuple[str, ...], owner: Tensor | None, value: Tensor) -> HeldTensor:
        spread = self._spread_of(owner, value)
        local = value._local_tensor if isinstance(value, DTensor) else value
        return HeldTensor(names, local.detach(), spread, self._holders_along(spread.axes | self._axes))

    def _spread_of(self, owner: Tensor | None, value: Tensor) -> Spread:
        if isinstance(value, DTensor) and self._full is not None and isinstance(owner, nn.Parameter):
            return self._full.spread_of_entry(owner, value)
        return Spread(tuple(value.shape), (whole_box(value.shape),), frozenset())

    def _holders_along(self, axes: frozenset[str]) -> tuple[int, ...]:
        if axes not in self._holders:
            same = [axis for axis in AXIS_NAMES if axis not in axes]
            self._holders[axes] = self._layout.group_of(self._rank, *same)
        return self._holders[axes]
