"""Calls of a sharded module outside of its steps, such as ``self(x)`` in ``on_validation_epoch_end``.

A step runs inside the forward of the wrapper that has the shards, which gathers. A call of the module, or of a part of
it, from anywhere else gathers by hooks of its own, and lets go when it is over: whoever changes weights changes the
shards. Gathering needs all ranks, so all of them must make the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.parallel.fsdp_groups import (
    ParamGroup,
    groups_of,
    in_backward,
    sharded_modules,
    show_gathered,
    show_shards,
    shows_shards,
    state_of,
)


class OutsideCalls:
    """Hooks on the modules that can be called from outside: those that are not parts of a unit of sharding.

    Args:
        root: The wrapper, whose own calls need nothing of this.
    """

    def __init__(self, root: nn.Module) -> None:
        self.is_step = False  # whether the wrapper's own forward goes on
        self._groups = groups_of(root)
        units = set(sharded_modules(root))
        self._rest: list[ParamGroup] = state_of(root)._fsdp_param_groups if root in units else []
        self._units = units
        self._called: nn.Module | None = None
        self._gathered: list[ParamGroup] = []  # by the call, not before it
        self._hidden: list[ParamGroup] = []  # gathered before it, but modules had their shards
        self._handles: list[RemovableHandle] = []
        for module in dict.fromkeys(_outside_of(units, root)):
            self._handles += [
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.is_step or self._called is not None or in_backward():
            return
        self._called = module
        self._gathered = [group for group in self._groups if not group.is_unsharded]
        self._hidden = [group for group in self._groups if group.is_unsharded and shows_shards(group)]
        show_gathered(self._groups)
        if module not in self._units:
            for group in self._rest:
                group.unshard()
                group.wait_for_unshard()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self._called:
            return
        self._called = None
        for group in self._gathered:
            group.wait_for_unshard()
            group.reshard()
        show_shards(self._hidden)


def _outside_of(units: set[nn.Module], root: nn.Module) -> Iterator[nn.Module]:
    """The modules below the root that are units, or are in none but the root."""
    for child in root.children():
        yield child
        if child not in units:
            yield from _outside_of(units, child)
