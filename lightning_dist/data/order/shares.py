"""The samples of one replica, step by step: an order, its steps and their dealing put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order.dealing import Dealing
from lightning_dist.data.order.sample_order import Located, SampleOrder
from lightning_dist.data.order.steps import Place, Steps


class Taken(NamedTuple):
    """What one replica takes in a step. Numbers are those of Note [Numbers of samples] in sample_order.

    Attributes:
        start: Number of the step's first sample, whoever takes it.
        numbers: (samples,) of the replica's.
        located: Where these are.
    """

    start: int
    numbers: Numbers
    located: Located


@dataclass(frozen=True)
class ReplicaShare:
    """What one replica takes.

    Attributes:
        order: Of the samples.
        steps: What all replicas take together.
        dealing: Who takes what of it.
        replica: Which one.
    """

    order: SampleOrder
    steps: Steps
    dealing: Dealing
    replica: int

    def each(self, places: Sequence[Place]) -> list[Taken]:
        """Its samples of the steps at several places, none of them the end of an epoch; much faster than one by one."""
        numbers = []
        for place in places:
            positions = self.positions(place)
            assert positions is not None, "not the end"
            numbers.append(place.epoch * self.order.num_samples + positions)
        located = self.order.locate(0, np.concatenate(numbers))
        ends = np.cumsum([len(own) for own in numbers])[:-1]
        rows = [Located(*columns) for columns in zip(*(np.split(column, ends) for column in located), strict=True)]
        starts = [place.epoch * self.order.num_samples + place.consumed for place in places]
        return [Taken(*each) for each in zip(starts, numbers, rows, strict=True)]

    def at(self, place: Place) -> Taken | None:
        """Its samples of the step at a place; ``None`` at the end of an epoch."""
        return None if self.steps.next(place.consumed) is None else self.each([place])[0]

    def positions(self, place: Place) -> Numbers | None:
        """Their positions in the epoch of the place, as the order locates them."""
        step = self.steps.next(place.consumed)
        if step is None:
            return None
        first = place.epoch * self.order.num_samples  # see Note [Numbers of samples] in sample_order
        numbers = self.dealing.take(self.replica, first + step.start, first + step.stop)
        return self.steps.positions(numbers - first)
