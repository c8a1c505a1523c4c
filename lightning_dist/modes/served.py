"""Under ``parallel=ddp``: tables that are dealt to the ranks, as users and checkpoints see them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.build import TableService
from lightning_dist.gradsync.parameter_server import ServedTables
from lightning_dist.gradsync.parameter_server.client import ServedTable
from lightning_dist.gradsync.parameter_server.processes.remote import RemoteShard
from lightning_dist.parallel.boxes import Spread, boxes_along
from lightning_dist.parallel.full_tensors import without_memory
from lightning_dist.parallel.held_state import HeldState, HeldTensor, Stored, TensorToFill
from lightning_dist.parallel.state_hooks import StateHooks
from lightning_dist.topology.layout import Layout

_AXIS = "dp_replicate"


class ServedState(StateHooks):
    """Makes ``state_dict`` and ``load_state_dict``, and the states of optimizers, speak of whole tables.

    Args:
        module: The user's.
        service: Its tables.
        rank: This one.
    """

    def __init__(self, module: nn.Module, service: TableService, rank: int) -> None:
        super().__init__(module)
        self._service = service
        self._rank = rank
        self._loading: set[Tensor] = set()
        for each in module.modules():
            self._handles.append(each.register_load_state_dict_post_hook(self._send_loaded))

    def complete(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        served = self._service.tables.by_parameter
        for name, parameter in module.named_parameters():
            value = state_dict.get(prefix + name)
            if parameter in served and isinstance(value, Tensor):
                own = served[parameter].own
                here = own.read() if own.is_elsewhere else value
                state_dict[prefix + name] = self._whole(served[parameter], here, everywhere=not self.on_cpu)

    def keep_as_held(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Rows that are in a process of their own are read from there."""
        served = self._service.tables.by_parameter
        for name, parameter in module.named_parameters():
            if parameter in served and served[parameter].own.is_elsewhere and prefix + name in state_dict:
                state_dict[prefix + name] = served[parameter].own.read()

    def cut(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See :class:`~lightning_dist.parallel.state_hooks.StateHooks`."""
        served = self._service.tables.by_parameter
        for name, parameter in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if (
                parameter in served
                and isinstance(value, Tensor)
                and tuple(value.shape) == served[parameter].table.shape
            ):
                state_dict[prefix + name] = self._cut(served[parameter], value)
                if served[parameter].own.is_elsewhere:
                    parameter.data = torch.empty_like(state_dict[prefix + name], dtype=parameter.dtype)
                    self._loading.add(parameter)

    def _send_loaded(self, module: nn.Module, incompatible: Any) -> None:
        """What was loaded of rows that are in a process of their own goes there, and does not stay here."""
        served = self._service.tables.by_parameter
        for parameter in module.parameters(recurse=False):
            if parameter in self._loading:
                self._loading.discard(parameter)
                own = served[parameter].own
                assert isinstance(own, RemoteShard), "other shards are here"
                own.write_values(parameter.data)
                parameter.data = own.values

    def optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state with whole tensors on rank 0, and without values on the others; collective."""
        return self._of_entries(optimizer, state, functools.partial(self._whole, everywhere=False), is_cut=True)

    def optimizer_state_to_load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of a whole state what this rank's optimizer holds."""
        return self._of_entries(optimizer, state, self._cut, is_cut=False)

    def _of_entries(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        change: Callable[[ServedTable, Tensor], Tensor],
        *,
        is_cut: bool,
    ) -> dict[str, Any]:
        """The state with ``change`` applied to what has a row for each row of a table: this rank's, or all."""
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        tables = self._service.tables.by_parameter
        changed = dict(state["state"])
        for index, entries in changed.items():
            served = tables.get(owners[index])
            if served is not None:
                rows = len(owners[index]) if is_cut else served.table.num_rows
                changed[index] = {
                    name: change(served, value) if _has_rows(value, rows) else value for name, value in entries.items()
                }
        return {**state, "state": changed}

    def _whole(self, served: ServedTable, value: Tensor, *, everywhere: bool) -> Tensor:
        whole = self._service.whole(served, value, everywhere=everywhere)
        if whole is None:
            return without_memory(value.new_empty((1,)).expand((served.table.num_rows, *value.shape[1:])))
        return whole

    def _cut(self, served: ServedTable, value: Tensor) -> Tensor:
        return value[served.placement.rows_of(self._rank)]


class ServedHeld(HeldState):
    """What this rank holds where tables are dealt: of each its rows, and of all that is kept beside them.

    Args:
        module: The user's.
        layout: Which rank stands where.
        rank: This one.
        tables: Those of the module.
    """

    def __init__(self, module: nn.Module, layout: Layout, rank: int, tables: ServedTables) -> None:
        super().__init__(module, layout, rank)
        self._tables = tables.by_parameter
        self._step_themselves = tables.step_themselves

    def _held(
        self, names: tuple[str, ...], owner: Tensor | None, value: Tensor, steady: tuple[Tensor, ...] = ()
    ) -> HeldTensor:
        if self._step_themselves and owner is not None and owner in self._tables:
            steady = ()  # the next step may be made before the optimizer's
        return super()._held(names, owner, value, steady)

    def _spread_of(self, owner: Tensor | None, value: Tensor) -> Spread:
        served = None if owner is None else self._tables.get(owner)
        if served is None or owner is None or not _has_rows(value, len(owner)):
            return super()._spread_of(owner, value)
        return self._spread_over(served, (served.table.num_rows, *value.shape[1:]))

    def _to_fill(self, name: str, owner: Tensor | None, stored: Stored) -> TensorToFill:
        served = None if owner is None else self._tables.get(owner)
        whole = super()._to_fill(name, None, stored)
        if served is None or owner is None or stored.shape[:1] != (served.table.num_rows,):
            return super()._to_fill(name, owner, stored)
        part = torch.empty((len(owner), *stored.shape[1:]), dtype=stored.dtype)
        return TensorToFill(name, part, self._spread_over(served, stored.shape), whole.place)

    def _spread_over(self, served: ServedTable, shape: tuple[int, ...]) -> Spread:
        ranges = served.placement.ranges_of(self._rank)
        return Spread(tuple(shape), boxes_along(shape, 0, ranges), frozenset({_AXIS}))


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
