"""What workers have in common beside what each has of its own: outer weights, momentum, averaged buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class OuterWeights:
    """Copies of the values that all workers had when they last met, the same on all that hold the same parameters.

    A parameter has one from the first step on in which it trains; so long nobody has changed it.

    Args:
        module: Whose parameters and buffers.
        values_of: A parameter or buffer -> this rank's values of it, as memory that may be written.
        start_of: A parameter -> where this rank's values begin in the whole, in its flat order.
        has_momentum: Whether the outer optimizer keeps one.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        values_of: Callable[[Tensor], Tensor],
        start_of: Callable[[nn.Parameter], int],
        has_momentum: bool,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.buffers: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self._module = module
        self._values_of = values_of
        self._start_of = start_of
        self._has_momentum = has_momentum
        self._copies: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] | None = None
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether workers train apart."""
        return self._has_begun

    @property
    def copies(self) -> Mapping[str, Tensor]:
        """Name -> outer values, of parameters that train or have trained, and of buffers."""
        return self._copies

    def begin(self) -> None:
        """What is there now is what workers have in common; anew each time."""
        self._has_begun = True
        self._copies, self.momentum = {}, {}
        self.buffers = {name: buffer for name, buffer in self._module.named_buffers() if _has_mean(buffer)}
        self._copies.update({name: buffer.detach().clone() for name, buffer in self.buffers.items()})
        self.note_trained()

    def note_trained(self) -> None:
        """Parameters that want gradients get a copy; to be called before a step changes them."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in self._copies:
                self.copy(name)

    def copy(self, name: str) -> Tensor:
        """The outer values of a parameter, copied from what is there if there are none yet."""
        found = self._copies.get(name)
        if found is None:
            found = self._copies[name] = self.own(name).clone()
            if self._has_momentum:
                self.momentum[name] = torch.zeros_like(found)
        return found

    def own(self, name: str) -> Tensor:
        """What the module holds, as memory that may be written: a worker's own values unless outer ones are shown."""
        tensor = self.parameters.get(name)
        return self._values_of(self.buffers[name] if tensor is None else tensor)

    def start(self, name: str) -> int:
        """Where :meth:`own` of a parameter begins in the whole; of a buffer, which is whole, 0."""
        parameter = self.parameters.get(name)
        return 0 if parameter is None else self._start_of(parameter)

    def kept(self, name: str) -> Tensor:
        """A worker's own values, also while others are shown."""
        return self.own(name) if self._aside is None or name not in self._aside else self._aside[name]

    @torch.no_grad()
    def show(self) -> None:
        """Put outer values into the module, until :meth:`hide`. Safe to call twice."""
        if self._aside is not None:
            return
        self._aside = {}
        for name, outer in self._copies.items():
            own = self.own(name)
            if not torch.equal(own, outer):
                self._aside[name] = own.clone()
                own.copy_(outer)

    @torch.no_grad()
    def hide(self) -> None:
        """Put back what was there. Safe to call twice."""
        aside, self._aside = self._aside, None
        for name, values in (aside or {}).items():
            self.own(name).copy_(values)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Inside, outer values are shown."""
        was_shown = self._aside is not None
        self.show()
        try:
            yield
        finally:
            if not was_shown:
                self.hide()

    def forget(self) -> None:
        """Workers have nothing in common beside what is in the module; what is shown stays."""
        self._aside = None
        self._has_begun = False
        self._copies, self.momentum = {}, {}

    @torch.no_grad()
    def take(self, own: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        """Go on where a checkpoint was saved: what is in the module is outer.

        Args:
            own: Name -> this worker's values; those named have trained, or are buffers.
            momentum: Name -> of the outer optimizer.
        """
        self.begin()
        for name, values in own.items():
            if name in self.parameters:
                self.copy(name)
            if name in self.parameters or name in self.buffers:
                self.own(name).copy_(values)
        for name, values in momentum.items():
            if name in self.parameters and self._has_momentum:
                self.copy(name)
                self.momentum[name].copy_(values)


def _has_mean(buffer: Tensor) -> bool:
    return not buffer.is_complex() and buffer.dtype is not torch.bool and buffer.layout is torch.strided
