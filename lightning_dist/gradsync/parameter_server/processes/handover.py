"""Hands to server processes what the user's optimizer would do to tables here.

The optimizer stays the user's: schedules change its groups, gradients are clipped, and what is logged of it is true. In
its step the gradients of tables are taken away once they are final, so that it steps all else, and go to the
processes with the options of the group that the table is in. States of tables are read from there, and put there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dist.gradsync.parameter_server.processes import optimizers
from lightning_dist.gradsync.parameter_server.processes.kept import Stepper
from lightning_dist.gradsync.parameter_server.processes.remote import RemoteShard
from lightning_dist.gradsync.parameter_server.stepping import options_of
from lightning_dist.gradsync.sparse.rows import rows_of


class Handover:
    """For the optimizers of one model.

    Args:
        shards: By what is left of the weight.
        version: The number of the step that is being made.
    """

    def __init__(self, shards: Mapping[Tensor, RemoteShard], *, version: Callable[[], int]) -> None:
        self._shards = shards
        self._version = version
        self._taken: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the tables of an optimizer that has not stepped yet.

        Raises:
            CombinationError: It has a table, and is of a class that the processes do not have.
        """
        own = self._own(optimizer)
        if not own:
            return
        name = optimizers.name_of(optimizer)
        for parameter, group in own.values():
            optimizer.state.pop(parameter, None)
            self._shards[parameter].prepare(Stepper(name, options_of(group)))
            parameter.data = self._shards[parameter].values
        self._handles += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_post_hook(self._take_over),
        ]

    def release(self) -> None:
        """Take the hooks away. Safe to call twice."""
        while self._handles:
            self._handles.pop().remove()

    def _own(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """Number in the optimizer -> the parameter and its group, of the tables."""
        listed = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        return {index: each for index, each in enumerate(listed) if each[0] in self._shards}

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Gradients are final when the closure is over, which clips them; without one they are final now."""
        in_place = len(args) > 1
        closure = args[1] if in_place else kwargs.get("closure")
        if closure is None:
            self._take_away(optimizer)
            return None

        @functools.wraps(closure)
        def closed() -> Any:
            loss = closure()
            self._take_away(optimizer)
            return loss

        return ((args[0], closed, *args[2:]), kwargs) if in_place else (args, {**kwargs, "closure": closed})

    def _take_away(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, _ in self._own(optimizer).values():
            if parameter.grad is not None:
                self._taken[parameter], parameter.grad = parameter.grad, None

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = optimizers.name_of(optimizer)
        for parameter, group in self._own(optimizer).values():
            gradient = self._taken.pop(parameter, None)
            if gradient is not None:
                stepper = Stepper(name, options_of(group))
                self._shards[parameter].step(self._version(), rows_of(gradient), stepper)

    def _complete(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A ``state_dict()`` of the optimizer has this rank's part of what the processes keep."""
        for index, (parameter, _) in self._own(optimizer).items():
            found = self._shards[parameter].read_state()
            if found:
                state["state"][index] = found

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded of tables goes to the processes, and does not stay here."""
        name = optimizers.name_of(optimizer)
        for parameter, group in self._own(optimizer).values():
            state = optimizer.state.pop(parameter, None)
            if state:
                self._shards[parameter].write_state(state, Stepper(name, options_of(group)))
