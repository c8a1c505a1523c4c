"""The samples of one replica, step by step: an order, its steps and their dealing put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_dist.data.dealing import Dealing
from lightning_dist.data.index import Numbers
from lightning_dist.data.order import Located, SampleOrder
from lightning_dist.data.steps import Place, Steps


class Taken(NamedTuple):
    """What one replica takes in a step. Numbers are those of Note [Numbers of samples] in order.

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

    def at(self, place: Place) -> Taken | None:
        """Its samples of the step at a place; ``None`` at the end of an epoch."""
        positions = self.positions(place)
        if positions is None:
            return None
        first = place.epoch * self.order.num_samples
        return Taken(first + place.consumed, first + positions, self.order.locate(place.epoch, positions))

    def positions(self, place: Place) -> Numbers | None:
        """Where they stand in the order of the place's epoch; as in :meth:`~lightning_dist.data.order.SampleOrder.locate`."""
        step = self.steps.next(place.consumed)
        if step is None:
            return None
        first = place.epoch * self.order.num_samples  # see Note [Numbers of samples] in order
        numbers = self.dealing.take(self.replica, first + step.start, first + step.stop)
        return self.steps.positions(numbers - first)
