"""Hooks by which ``state_dict`` and ``load_state_dict`` of a module, and of those in it, speak of whole tensors."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class StateHooks(abc.ABC):
    """The hooks of one model that is spread over ranks.

    Args:
        root: The module that is spread.
    """

    def __init__(self, root: nn.Module) -> None:
        self.keep = True  # whether this rank wants the values of a state_dict
        self.on_cpu = False  # whether a state_dict goes to CPU memory, tensor by tensor
        self._as_held = False
        self._entered: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        for module in root.modules():
            self._handles += [
                module.register_state_dict_pre_hook(self._enter),
                module.register_state_dict_post_hook(functools.partial(self._leave)),  # torch sets an attribute on it
                module.register_load_state_dict_pre_hook(self._load),
            ]

    @abc.abstractmethod
    def complete(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Put whole tensors into the state of a module and all in it; collective."""

    def keep_as_held(  # noqa: B027  # most have nothing to do here
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str
    ) -> None:
        """The same where the state is to have what this rank holds: nothing, unless that is kept elsewhere."""

    @abc.abstractmethod
    def cut(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Leave of the tensors to be loaded into a module, without those in it, what this rank holds."""

    def state_dict_of(self, make: Callable[[], dict[str, Any]], *, keep: bool) -> dict[str, Any]:
        """A state for a checkpoint: whole tensors in CPU memory; collective.

        Args:
            make: Makes it, by ``state_dict()``.
            keep: Whether this rank wants the values.
        """
        self.keep, self.on_cpu = keep, True
        try:
            return make()
        finally:
            self.keep, self.on_cpu = True, False

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Inside, a state has what this rank holds; nothing is sent."""
        self._as_held = True
        try:
            yield
        finally:
            self._as_held = False

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module in self._entered:  # an earlier call did not come to its end
            self._entered.clear()
        self._entered.append(module)

    def _leave(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        while self._entered and self._entered.pop() is not module:
            pass
        if not self._entered:
            (self.keep_as_held if self._as_held else self.complete)(module, state_dict, prefix)

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self.cut(module, state_dict, prefix)
