"""Buffers (BatchNorm statistics) follow the first rank's, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.comm.groups import broadcast_from_first


class BufferSync:
    """Brings a module's buffers to rank 0's state; every rank makes it.

    Args:
        module: Whose buffers.
        operation: Opens the seam around an operation of the group, given the operation's name.
        enabled: Whether buffers are to be kept alike.
        group: The ranks that hold the same buffers, the first of which they follow; all ranks if not given.
    """

    def __init__(
        self,
        module: nn.Module,
        operation: Callable[[str], AbstractContextManager[None]],
        *,
        enabled: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._operation = operation
        self._enabled = enabled
        self._group = group
        self._is_due = True
        self._in_window = False

    @property
    def is_needed(self) -> bool:
        """Whether there are buffers, and they are to be kept alike."""
        return self._enabled and next(self._module.buffers(), None) is not None

    def sync(self) -> None:
        """Give every rank the buffers of rank 0, if that is wanted; collective."""
        if self.is_needed and dist.get_world_size(self._group) > 1:
            with self._operation("broadcast of buffers"):
                broadcast_from_first(list(self._module.buffers()), self._group)

    def part(self, group: dist.ProcessGroup | None) -> None:
        """From now on buffers follow the first rank of a smaller group."""
        self._group = group

    def before_forward(self) -> None:
        """Sync once a window of accumulation, before its first forward that trains."""
        if torch.is_grad_enabled() and self._module.training:
            if self._is_due:
                self.sync()
            self._is_due = not self._in_window

    @contextmanager
    def window(self) -> Iterator[None]:
        """Inside, a window of accumulation goes on after the backward."""
        self._in_window = True
        try:
            yield
        finally:
            self._in_window = False


class BufferedModule(nn.Module):
    """Calls a module, its buffers synchronised first where that is due.

    Args:
        module: Called.
        buffers: Its buffers.
    """

    def __init__(self, module: nn.Module, buffers: BufferSync) -> None:
        super().__init__()
        self.module = module
        self._sync = buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        self._sync.before_forward()
        return self.module(*args, **kwargs)
