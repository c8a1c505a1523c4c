"""Stepping rows apart from the training loop: by a twin of the user's optimizer, or by one of its class elsewhere."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.sparse.rows import Rows, Table, to_sparse

Options = Mapping[str, Any]
"""What an optimizer's group says of a step, as JSON has it: ``lr``, ``betas``, ``eps``, ..."""

RowStep = Callable[[Rows, Options], None]
"""Steps rows by their gradients; called by one thread at a time."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's present options, those that JSON can carry: numbers, words and lists of them."""
    plain = {name: _plain(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def group_of(
    optimizers: Sequence[torch.optim.Optimizer], parameter: Tensor
) -> tuple[torch.optim.Optimizer, int] | None:
    """The optimizer that steps a parameter, and the number of its group; ``None`` where none does."""
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            if any(each is parameter for each in group["params"]):
                return optimizer, index
    return None


def refuse_wide_steps(optimizer: torch.optim.Optimizer, options: Options, why: str) -> None:
    """Refuse an optimizer whose step changes other rows than those of the gradient.

    Args:
        optimizer: Which steps a table.
        options: Of the table's group.
        why: The option for which it must be known which rows a step changes.

    Raises:
        CombinationError: It does.
    """
    wide = [each for each in ("momentum", "weight_decay") if options.get(each)]
    if wide:
        raise CombinationError(
            f"{type(optimizer).__name__}({wide[0]}={options[wide[0]]}) with {why}: a step would change rows that no "
            f"rank has used; write {wide[0]}=0, or use SparseAdam, Adagrad or lightning_dist.RowWiseAdagrad"
        )


class RowOptimizer:
    """Makes steps on rows by an optimizer whose options come with each step.

    Args:
        rows: [k, ...], stepped in place.
        make: Makes the optimizer of one parameter.
        state: What the optimizer keeps for the rows, where that is kept elsewhere; asked for at each step.
    """

    def __init__(
        self,
        rows: Tensor,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        state: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        # A parameter of its own on the same memory: no other optimizer sees the gradient that is meant for this one.
        self._parameter = nn.Parameter(rows.detach())
        self._table = Table(tuple(rows.shape), rows.dtype)
        self._optimizer = make([self._parameter])
        self._state_elsewhere = state

    def __call__(self, rows: Rows, options: Options) -> None:
        """Make a step."""
        if self._state_elsewhere is not None:
            self._optimizer.state[self._parameter] = self._state_elsewhere()
        self._optimizer.param_groups[0].update(options)
        self._parameter.grad = to_sparse(rows, self._table)
        self._optimizer.step()
        self._parameter.grad = None

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for the rows, by name; to be read and changed while no step is being made."""
        state: dict[str, Any] = self._optimizer.state[self._parameter]
        return state


def twin_of(optimizer: torch.optim.Optimizer, parameter: Tensor, group: int) -> RowOptimizer:
    """Steps a parameter's rows as an optimizer would, and shares with it what it keeps for them.

    Args:
        optimizer: The user's.
        parameter: One of its parameters.
        group: The number of the parameter's group.
    """

    def make(alias: list[nn.Parameter]) -> torch.optim.Optimizer:
        twin: torch.optim.Optimizer = object.__new__(type(optimizer))
        # Learning rate schedules put a ``step`` into the object that counts the user's steps.
        twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        twin.param_groups = [{**optimizer.param_groups[group], "params": alias}]
        twin.state = defaultdict(dict)
        return twin

    return RowOptimizer(parameter, make, state=lambda: optimizer.state[parameter])


def made_of(
    kind: type[torch.optim.Optimizer], options: Options
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Makes an optimizer of a class from its group's options, of which those count that the class takes."""
    taken = {name: options[name] for name in inspect.signature(kind).parameters if name in options}
    return lambda parameters: kind(parameters, **taken)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
