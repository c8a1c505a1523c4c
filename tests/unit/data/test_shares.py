from __future__ import annotations

import numpy as np
import pytest

from lightning_dist.data.order.dealing import Dealing
from lightning_dist.data.order.sample_order import Order, OrderOptions
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.data.order.steps import EndlessSteps, ExactSteps, Place, Steps


@pytest.mark.parametrize("last_batch", ["drop", "pad", "short", None])
@pytest.mark.parametrize("lanes", [6, 5])
def test_samples_of_several_steps_are_those_of_each(last_batch: str | None, lanes: int) -> None:
    order = Order(np.array([20, 31, 17, 9]), OrderOptions(seed=3, lanes=lanes, shuffle_block=8))
    steps: Steps = EndlessSteps(num_samples=order.num_samples, num_replicas=3, batch_size=12)
    if last_batch is not None:
        steps = ExactSteps(num_samples=order.num_samples, num_replicas=3, batch_size=12, last_batch=last_batch)
    share = ReplicaShare(order, steps, Dealing((0, 0, 1), lanes), 2)
    places = [Place(4, 0)]
    while len(places) < 15 and steps.next(steps.after(places[-1]).consumed) is not None:
        places.append(steps.after(places[-1]))
    for place, taken in zip(places, share.each(places), strict=True):
        positions = share.positions(place)
        assert positions is not None
        assert taken.numbers.tolist() == (positions + place.epoch * order.num_samples).tolist()
        alone = order.locate(place.epoch, positions)
        assert [column.tolist() for column in taken.located] == [column.tolist() for column in alone]
