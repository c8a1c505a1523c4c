"""Rows of a tensor on their way to the ranks they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dist.comm.feedback import Account, Place


@dataclass(frozen=True)
class Trace:
    """Where rows come from.

    Attributes:
        account: What is owed of the tensor that they are a piece of.
        length: Elements of each destination in the tensor.
        first: Of each destination: the first column.
        unit: Elements of the tensor that one of a row is worth.
    """

    account: Account
    length: int
    first: int
    unit: float

    def place(self, kind: str, destinations: Sequence[int]) -> Place:
        """Where rows of some destinations are, in the tensor."""
        starts = tuple(destination * self.length + self.first for destination in destinations)
        return Place(kind, starts, starts[-1] + self.length, self.unit)


@dataclass
class Segments:
    """Segments on their way.

    Attributes:
        destinations: Whose they are, ascending.
        rows: [len(destinations), columns], of any strides.
        attributes: What events should say.
        tag: Only segments of one tag meet, where the way looks at it (Gloo and shared memory do).
        goal: [len(final), columns]: where the rows of ``final`` are wanted in the end.
        final: The destinations of ``goal``, ascending.
        sequence: Number of the operation, counted alike on all ranks.
        trace: Where the rows come from; ``None``: nothing is kept of them.
        piece: [len(final), values]: where ``goal`` is wanted in the end, decoded; ``None``: it is no code.
    """

    destinations: tuple[int, ...]
    rows: torch.Tensor
    attributes: dict[str, int]
    tag: int = 0
    goal: torch.Tensor | None = None
    final: tuple[int, ...] = ()
    sequence: int = 0
    trace: Trace | None = None
    piece: torch.Tensor | None = None

    def of(self, destinations: Sequence[int]) -> torch.Tensor:
        """[len(destinations), columns]: some rows, as they lie where they lie evenly, else copied."""
        if tuple(destinations) == self.destinations:
            return self.rows
        place = {d: row for row, d in enumerate(self.destinations)}
        places = [place[d] for d in destinations]
        if not places:
            return self.rows[:0]
        step = places[1] - places[0] if len(places) > 1 else 1
        if step > 0 and places == list(range(places[0], places[-1] + 1, step)):
            return self.rows[places[0] : places[-1] + 1 : step]
        return torch.stack([self.rows[row] for row in places])  # an index list would synchronise on CUDA

    def room_for(self, destinations: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[len(destinations), columns] to be written: the goal if it is for these and not what is read, else new."""
        goal = self.goal
        if goal is not None and tuple(destinations) == self.final and goal.dtype == dtype and self.rows is not goal:
            return goal
        return self.rows.new_empty(len(destinations), self.rows.shape[1], dtype=dtype)

    def hold(self, parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Hold these rows from now on: as they are if the first part has them all, else copied together."""
        order = sorted((d, part, row) for part, (owned, _) in enumerate(parts) for row, d in enumerate(owned))
        destinations = tuple(d for d, _, _ in order)
        if destinations == tuple(parts[0][0]):
            rows = parts[0][1]
        else:
            rows = self.room_for(destinations, parts[0][1].dtype)
            for target, (_, part, row) in zip(rows, order, strict=True):
                source = parts[part][1][row]
                if source.data_ptr() != target.data_ptr():  # what is gathered may lie in its place already
                    target.copy_(source)
        self.destinations, self.rows = destinations, rows

    def arrive(self) -> None:
        """All rows have come: bring them to the goal, unless they were written there."""
        if self.goal is not None and self.rows is not self.goal:
            self.goal.copy_(self.rows)
