"""The samples of one replica, step by step: an order, its steps and their dealing put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dist.data.dealing import Dealing
from lightning_dist.data.index import Numbers
from lightning_dist.data.order import Located, SampleOrder
from lightning_dist.data.steps import Place, Steps


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

    def each(self, places: Sequence[Place]) -> list[Located]:
        """Its samples of the steps at several places, none of them the end of an epoch; much faster than one by one."""
        first = places[0].epoch
        found = []
        for place in places:
            positions = self.positions(place)
            assert positions is not None, "not the end"
            found.append(positions + (place.epoch - first) * self.order.num_samples)
        located = self.order.locate(first, np.concatenate(found))
        ends = np.cumsum([len(positions) for positions in found])[:-1]
        return [Located(*columns) for columns in zip(*(np.split(column, ends) for column in located), strict=True)]

    def at(self, place: Place) -> Located | None:
        """Its samples of the step at a place; ``None`` at the end of an epoch."""
        positions = self.positions(place)
        return None if positions is None else self.order.locate(place.epoch, positions)

    def positions(self, place: Place) -> Numbers | None:
        """Their positions in the epoch of the place, as the order locates them."""
        step = self.steps.next(place.consumed)
        if step is None:
            return None
        first = place.epoch * self.order.num_samples  # see Note [Numbers of samples] in order
        numbers = self.dealing.take(self.replica, first + step.start, first + step.stop)
        return self.steps.positions(numbers - first)
