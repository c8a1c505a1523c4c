"""When a backward has computed its last gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from lightning_dist.events import Mark


class EndOfCompute:
    """The moment of one backward; ``at`` is ``None`` until it has come.

    Args:
        loss: Whose backward comes now; of what has no graph, the moment never comes.
        mark: Of the events: this moment.
    """

    def __init__(self, loss: Any, mark: Callable[[], Mark]) -> None:
        self.at: Mark = None
        self._mark = mark
        self._handle: RemovableHandle | None = None
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            self._handle = loss.register_hook(self._enter)

    def release(self) -> None:
        """The backward is over: another one of the same loss is not this one's business."""
        if self._handle is not None:
            self._handle.remove()

    def _enter(self, gradient: torch.Tensor) -> None:
        """The loss has its gradient: what is queued now runs before what a reducer queues at its last bucket."""
        Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self.at = self._mark()
