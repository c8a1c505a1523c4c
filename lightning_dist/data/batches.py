"""The samples of one replica, step by step: an order, its steps and their dealing put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.data.dealing import Dealing
from lightning_dist.data.index import Numbers
from lightning_dist.data.order import Located, SampleOrder, Upcoming
from lightning_dist.data.steps import Place, Steps


@dataclass(frozen=True)
class Batches:
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
        """The samples of the step at a place; ``None`` at the end of an epoch."""
        positions = self.positions(place)
        return None if positions is None else self.order.locate(place.epoch, positions)

    def positions(self, place: Place) -> Numbers | None:
        """Their positions in the epoch."""
        step = self.steps.next(place.consumed)
        if step is None:
            return None
        first = place.epoch * self.order.num_samples
        numbers = self.dealing.take(self.replica, first + step.start, first + step.stop)
        return self.steps.positions(numbers - first)

    def upcoming(self, place: Place, samples: int) -> Upcoming:
        """The chunks that this replica's host reads for the next ``samples`` samples of all replicas, by first use."""
        start = max(0, place.epoch * self.order.num_samples + place.consumed)
        host = self.dealing.host_of_replica[self.replica]
        return self.order.upcoming(start, start + samples, self.dealing.lanes_read_by(host))
