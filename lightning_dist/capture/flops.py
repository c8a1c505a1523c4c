"""How many floating point operations a sample takes, counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class FlopCount:
    """Counts those of a first batch's forward and backward, what is recomputed included."""

    def __init__(self) -> None:
        self.total = 0
        self.is_counting = True
        self._is_inside = False

    def counted(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives; one inside another, as under manual optimization, is counted with it."""
        if self._is_inside:
            return call()
        self._is_inside = True
        try:
            with FlopCounterMode(display=False) as counter:
                given = call()
        finally:
            self._is_inside = False
        self.total += counter.get_total_flops()
        return given

    def per_sample(self, samples: int | None) -> float | None:
        """Of the batch that was counted; ``None``: nobody knows how many samples it had."""
        return self.total / samples if samples and self.total else None
