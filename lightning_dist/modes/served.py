"""Tables that are dealt to the ranks: what a mode does about them in a fit, and how users and checkpoints see them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist import build
from lightning_dist.build import TableService
from lightning_dist.config import SyncConfig
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.parameter_server import ServedTables, tables_to_serve
from lightning_dist.gradsync.parameter_server.client import ServedTable
from lightning_dist.gradsync.parameter_server.processes.remote import RemoteShard
from lightning_dist.modes.look_ahead import look_ahead, next_batch, rows_of_batch
from lightning_dist.modes.mode import Setting, unwrapped
from lightning_dist.parallel.boxes import Spread, boxes_along
from lightning_dist.parallel.full_tensors import FullTensors, without_memory
from lightning_dist.parallel.held_state import HeldState, HeldTensor, Stored, TensorToFill
from lightning_dist.parallel.materialize import is_on_meta
from lightning_dist.parallel.state_hooks import StateHooks
from lightning_dist.topology.layout import DATA_AXES, Layout


class DealtTables:
    """The tables of a fit, from before the optimizers are made to :meth:`close`.

    The sequence of calls, on every rank: :meth:`watch` with the optimizers; :meth:`begin_training`; before each
    training step :meth:`begin_step`, after each backward :meth:`after_backward`; :meth:`publish` where a step is over;
    at last :meth:`release` and :meth:`close`.

    Args:
        setting: Of the mode.
        module: The user's.
        service: Its tables.
    """

    def __init__(self, setting: Setting, module: nn.Module, service: TableService) -> None:
        self._setting = setting
        self._module = module
        self._service = service
        self._step_hooks: list[RemovableHandle] = []
        self._state: ServedState | None = ServedState(module, service, setting.run.rank)

    @property
    def service(self) -> TableService:
        """Their servers."""
        return self._service

    @property
    def by_parameter(self) -> dict[Tensor, ServedTable]:
        """By what is left of the weight."""
        return self._service.tables.by_parameter

    def watch(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Once an optimizer has made its step, other ranks may look at what it has made of this rank's rows."""
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        self._service.tables.step_by(inner, prefetch=self._looks_ahead)
        self._service.hand_over(inner)

        def publish(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._service.tables.publish({p for group in optimizer.param_groups for p in group["params"]})

        for optimizer in inner:
            self._step_hooks.append(optimizer.register_step_post_hook(publish))

    @property
    def _looks_ahead(self) -> bool:
        return self._setting.sync.parameter_server.prefetch and rows_of_batch(self._module) is not None

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Have the batch after the present one at hand, where its rows can be asked for."""
        if self._looks_ahead:
            look_ahead(trainer)

    def begin_step(self, trainer: pl.Trainer, batch: Any, *, is_last: bool) -> None:
        """Look up what the module says that it needs of a batch, and begin with the next one's.

        Args:
            trainer: Of the fit.
            batch: The present one.
            is_last: Whether a window of accumulated gradients ends with it.
        """
        rows_of = rows_of_batch(self._module)
        if rows_of is not None:
            following = next_batch(trainer) if self._looks_ahead else None
            rows_ahead = None if following is None else rows_of(following.batch)
            self._service.tables.begin_step(rows_of(batch), rows_ahead, is_last_of_window=is_last)

    def after_backward(self, *, is_last: bool) -> None:
        """Exchange gradients at the end of a window.

        Args:
            is_last: Whether it is.
        """
        if is_last:
            self._service.tables.exchange()
        else:
            self._service.tables.settle()

    def publish(self) -> None:
        """The step before is over, also one that was skipped."""
        self._service.tables.publish()

    def abort(self, reason: str) -> None:
        """Free who waits here for other ranks' gradients."""
        self._service.abort(reason)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict_of(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state as ``make`` makes it, with values of tables on rank 0 only."""
        return make() if self._state is None else self._state.state_dict_of(make, keep=True)

    def optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The same of what an optimizer keeps beside them."""
        return state if self._state is None else self._state.optimizer_state(unwrapped(optimizer), state)

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What belongs to this rank's rows."""
        state = self._state
        if state is None:
            return states
        pairs = zip(map(unwrapped, optimizers), states, strict=False)
        return [state.optimizer_state_to_load(optimizer, whole) for optimizer, whole in pairs]

    def as_held(self) -> AbstractContextManager[None]:
        """Inside, a state has this rank's rows, with all steps so far."""
        if self._state is None:
            return nullcontext()
        self._service.tables.drain()
        return self._state.as_held()

    def held_state(self, layout: Layout, full: FullTensors | None = None) -> HeldState:
        """Rows of tables, and all else as it is.

        Args:
            layout: Which rank stands where.
            full: Of what is spread otherwise.
        """
        return ServedHeld(self._module, layout, self._setting.run.rank, self._service.tables, full=full)

    # -- ending -------------------------------------------------------------------------------------------------------

    def release(self, *, failed: bool) -> None:
        """Gather tables on each rank, unless others may be gone. Safe to call twice."""
        while self._step_hooks:
            self._step_hooks.pop().remove()
        state, self._state = self._state, None
        if state is not None:
            self.publish()
            state.release()
            self._service.release(failed=failed)

    def close(self) -> None:
        """End servers and connections. Safe to call twice."""
        self._service.close()


def deal_tables(setting: Setting, module: nn.Module, trainer: pl.Trainer) -> DealtTables | None:
    """Deal large tables to the ranks, before the optimizers are made, which then step what a rank has of them.

    Args:
        setting: Of the mode.
        module: The user's.
        trainer: Of the fit.

    Returns:
        ``None`` where there is none to be dealt.

    Raises:
        CombinationError: They do not go with the device, or with a callback.
    """
    above_bytes = setting.sync.sparse.serves_above_bytes
    if above_bytes is not None and is_on_meta(module) and tables_to_serve(module, above_bytes=above_bytes):
        raise CombinationError(
            f"sync.sparse.exchange={setting.sync.sparse.exchange} deals rows of tables that have values, and the model "
            "was made on the meta device: make its embeddings in __init__, or write sync.sparse.exchange=rows"
        )
    service = build.open_tables(setting.run, module, setting.sync)
    if service is None:
        return None
    why = _why_not(setting.sync, service, trainer)
    if why is not None:
        service.release(failed=False)
        service.close()
        raise CombinationError(why)
    rank_zero_info(build.describe_tables(service, setting.sync))
    return DealtTables(setting, module, service)


def _why_not(sync: SyncConfig, service: TableService, trainer: pl.Trainer) -> str | None:
    """What of a fit needs whole tables, or their gradients before they are stepped."""
    averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, WeightAveraging)]  # type: ignore[attr-defined]
    if averaging:
        return (
            f"{averaging[0]} averages whole tables, and sync.sparse.exchange={sync.sparse.exchange} deals them to "
            "ranks: write sync.sparse.exchange=rows"
        )
    needs = {
        f"gradient_clip_val={trainer.gradient_clip_val}": trainer.gradient_clip_val,
        "precision=16-mixed": trainer.precision == "16-mixed",
    }
    asked = [said for said, is_asked in needs.items() if is_asked]
    if service.tables.step_themselves and asked:
        return (
            f"{asked[0]} with sync.parameter_server.staleness={sync.parameter_server.staleness}: rows are stepped as "
            "their gradients come, before those of all ranks are known; write sync.parameter_server.staleness=0"
        )
    return None


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
        self._service.tables.forget()
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
        full: Of what is spread otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        rank: int,
        tables: ServedTables,
        *,
        full: FullTensors | None = None,
    ) -> None:
        super().__init__(module, layout, rank, full=full)
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
        return Spread(tuple(shape), boxes_along(shape, 0, ranges), frozenset(DATA_AXES))


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
