"""Rows of a tensor on their way to the ranks they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Segments:
    """Segments on their way.

    Attributes:
        destinations: Whose they are, ascending.
        rows: [len(destinations), columns], contiguous.
        attributes: What events should say.
        tag: Only segments of one tag meet, where the backend looks at it (Gloo does).
    """

    destinations: tuple[int, ...]
    rows: torch.Tensor
    attributes: dict[str, int]
    tag: int = 0

    def of(self, destinations: Sequence[int]) -> torch.Tensor:
        """[len(destinations), columns]: a copy of some rows, or all of them as they are."""
        if tuple(destinations) == self.destinations:
            return self.rows
        place = {d: row for row, d in enumerate(self.destinations)}
        if not destinations:
            return self.rows[:0]
        return torch.stack([self.rows[place[d]] for d in destinations])  # an index list would synchronise on CUDA

    def hold(self, parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Hold these rows from now on."""
        order = sorted((d, part, row) for part, (owned, _) in enumerate(parts) for row, d in enumerate(owned))
        self.destinations = tuple(d for d, _, _ in order)
        if len(parts) == 1 and self.destinations == tuple(parts[0][0]):
            self.rows = parts[0][1]
        elif order:
            self.rows = torch.stack([parts[part][1][row] for _, part, row in order])
        else:
            self.rows = self.rows[:0]
