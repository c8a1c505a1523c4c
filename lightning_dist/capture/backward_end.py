"""When a backward has computed its last gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle


class EndOfCompute:
    """The moment of one backward; ``at_ns`` is ``None`` until it has come.

    Args:
        loss: Whose backward comes now; of what has no graph, the moment never comes.
        clock_ns: Of the events.
    """

    def __init__(self, loss: Any, clock_ns: Callable[[], int]) -> None:
        self.at_ns: int | None = None
        self._clock_ns = clock_ns
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
        self.at_ns = self._clock_ns()
