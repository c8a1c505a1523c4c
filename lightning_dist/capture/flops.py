"""How many floating point operations a sample takes, counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class FlopCount:
    """Counts those of a first batch's forward and backward, what is recomputed included.

    What goes wrong in the counting ends it, and not the training: see :attr:`problem`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.is_counting = True
        self.problem: str | None = None  # why nothing is counted
        self._is_inside = False

    def counted(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives; one inside another, as under manual optimization, is counted with it."""
        if self._is_inside or self.problem is not None:
            return call()
        counter = self._guarded(self._open)
        self._is_inside = True
        try:
            return call()
        finally:
            self._is_inside = False
            if isinstance(counter, FlopCounterMode):
                self._guarded(counter.__exit__, None, None, None)
                self.total += self._guarded(counter.get_total_flops)

    def per_sample(self, samples: int | None) -> float | None:
        """Of the batch that was counted; ``None``: nobody knows how many samples it had, or not all was counted."""
        return self.total / samples if samples and self.total and self.problem is None else None

    def _open(self) -> FlopCounterMode:
        counter = FlopCounterMode(display=False)
        # A formula is called inside the user's forward, with whatever shapes that has.
        counter.flop_registry = {
            operator: functools.partial(self._guarded, formula) for operator, formula in counter.flop_registry.items()
        }
        counter.__enter__()
        return counter

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What it gives; 0, if it fails, and why is kept."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            return 0
