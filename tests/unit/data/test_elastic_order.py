"""Runs that are killed and go on with another number of ranks train on each sample once an epoch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_dist.data.order.dealing import Dealing
from lightning_dist.data.order.mixture import Mixture
from lightning_dist.data.order.position import Position, begun, given
from lightning_dist.data.order.sample_order import Order, OrderOptions, SampleOrder
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.data.order.steps import EndlessSteps, ExactSteps

SAMPLES = 10_000
WORLDS = (1, 3, 2, 4)
EPOCHS = 2


class Run:
    """Training whose processes may end at any time; what has been trained on is what the last save knows of."""

    def __init__(self, order: SampleOrder, *, is_endless: bool) -> None:
        self._order = order
        self._is_endless = is_endless
        self._saved = Position()
        self.trained: list[tuple[int, np.ndarray]] = []  # epoch and positions, of the history that survived

    @property
    def is_done(self) -> bool:
        return self._saved.place.epoch >= EPOCHS and self._saved.place.consumed >= 0

    def train(self, world: int, per_replica: int, draw: random.Random, *, kill_after: int | None) -> None:
        """Go on from the last save until killed after some steps, or to the end."""
        kind = EndlessSteps if self._is_endless else ExactSteps
        steps = kind(num_samples=SAMPLES, num_replicas=world, batch_size=world * per_replica)
        hosts = tuple(draw.randrange(2) for _ in range(world))
        shares = [ReplicaShare(self._order, steps, Dealing(hosts, self._order.lanes), rank) for rank in range(world)]
        position, unsaved = begun(self._saved, steps), []
        while not self.is_done and kill_after != 0:
            if steps.next(position.place.consumed) is None:
                position = begun(position, steps)
            taken = [share.positions(position.place) for share in shares]
            unsaved += [(position.place.epoch, each) for each in taken if each is not None]
            position = given(position, steps)
            if draw.random() < 0.2 or kill_after is None:
                self._saved = Position(position.place, position.taken)
                self.trained += unsaved
                unsaved = []
            kill_after = None if kill_after is None else kill_after - 1


@pytest.mark.parametrize("kind", ["exact", "endless", "mixture"])
def test_a_hundred_runs(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(100 if kind == "exact" else 20):
        counts = np.random.default_rng(draw.randrange(2**32)).multinomial(SAMPLES, np.full(150, 1 / 150))
        options = OrderOptions(seed=draw.randrange(2**32), shuffle_block=64)
        order: SampleOrder = Order(counts, options)
        if kind == "mixture":
            sources = [Order(counts, options), Order(np.full(100, 10), options, source=1)]
            order = Mixture(sources, [3, 1], epoch_samples=SAMPLES)
        run = Run(order, is_endless=kind == "endless")
        for world in WORLDS:
            run.train(world, draw.randint(16, 64), draw, kill_after=draw.randint(1, 150))
        run.train(WORLDS[-1], draw.randint(16, 64), draw, kill_after=None)
        numbers = np.concatenate([epoch * SAMPLES + positions for epoch, positions in run.trained])
        numbers = np.sort(numbers[numbers < EPOCHS * SAMPLES])
        assert np.array_equal(numbers, np.arange(EPOCHS * SAMPLES))
        if isinstance(order, Order):
            located = order.locate(0, numbers)
            ids = (np.cumsum(counts) - counts)[located.chunks] + located.samples
            assert (np.bincount(ids, minlength=SAMPLES) == EPOCHS).all()
            assert len(np.unique(ids[:SAMPLES])) == SAMPLES
