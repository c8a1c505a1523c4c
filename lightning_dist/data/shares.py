"""The samples of one replica, step by step: an order, its steps and their dealing put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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

    def at(self, place: Place) -> Located | None:
        """Its samples of the step at a place; ``None`` at the end of an epoch."""
        positions = self.positions(place)
        return None if positions is None else self.order.locate(place.epoch, positions)

    def positions(self, place: Place) -> Numbers | None:
        """Where they stand in the order of the place's epoch; as in :meth:`~lightning_dist.data.order.SampleOrder.locate`."""
        step = self.steps.next(place.consumed)
        if step is None:
            return None
        first = place.epoch * self.order.num_samples  # see Note [Numbers of samples] in order
        numbers = self.dealing.take(self.replica, first + step.start, first + step.stop)
        return self.steps.positions(numbers - first)
