"""Steps of an epoch: how many, which samples, and how they go on at another size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.data.order.dealing import Dealing
from lightning_dist.data.order.sample_order import Order, OrderOptions
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.data.order.steps import EndlessSteps, ExactSteps, Place, Step, Steps
from lightning_dist.errors import ConfigError


def exact(num_samples: int, replicas: int, per_replica: int, last_batch: str = "short") -> ExactSteps:
    return ExactSteps(
        num_samples=num_samples, num_replicas=replicas, batch_size=replicas * per_replica, last_batch=last_batch
    )


def endless(num_samples: int, replicas: int, per_replica: int) -> EndlessSteps:
    return EndlessSteps(num_samples=num_samples, num_replicas=replicas, batch_size=replicas * per_replica)


def walked(steps: Steps, place: Place) -> list[Step]:
    """All steps of a pass from a place on."""
    found = []
    while (step := steps.next(place.consumed)) is not None:
        found.append(step)
        place = steps.after(place)
    return found


def shares(steps: ExactSteps | EndlessSteps, *, lanes: int = 24, hosts: int = 1) -> list[ReplicaShare]:
    order = Order(np.full(steps.num_samples, 1), OrderOptions(seed=1, lanes=lanes, shuffle_block=8))
    dealing = Dealing(tuple(replica % hosts for replica in range(steps.num_replicas)), lanes)
    return [ReplicaShare(order, steps, dealing, replica) for replica in range(steps.num_replicas)]


sizes = {"replicas": st.integers(1, 9), "per_replica": st.integers(1, 9), "num_samples": st.integers(1, 300)}


@settings(deadline=None)
@given(**sizes, hosts=st.integers(1, 3))
def test_short_takes_each_sample_once_and_leaves_no_replica_empty(
    replicas: int, per_replica: int, num_samples: int, hosts: int
) -> None:
    num_samples = max(num_samples, replicas)
    steps = exact(num_samples, replicas, per_replica)
    place, seen, count = Place(2, 0), [], 0
    while steps.next(place.consumed) is not None:
        found = [taken and taken.located for share in shares(steps, hosts=hosts) for taken in [share.at(place)]]
        batches = [located.chunks.tolist() for located in found if located is not None]
        assert len(batches) == replicas
        lengths = [len(batch) for batch in batches]
        assert min(lengths) > 0
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= per_replica + 1
        seen += [sample for batch in batches for sample in batch]
        place, count = steps.after(place), count + 1
        order = shares(steps)[0].order
        assert sorted(seen) == sorted(order.locate(2, np.arange(place.consumed)).chunks.tolist())  # a prefix
    assert sorted(seen) == list(range(num_samples))
    assert place == Place(2, num_samples)
    assert count == steps.length
    assert all(share.at(place) is None for share in shares(steps))


@settings(deadline=None)
@given(**sizes, last_batch=st.sampled_from(["drop", "pad"]))
def test_whole_batches(replicas: int, per_replica: int, num_samples: int, last_batch: str) -> None:
    batch = replicas * per_replica
    num_samples = max(num_samples, batch) if last_batch == "drop" else num_samples
    steps = exact(num_samples, replicas, per_replica, last_batch)
    found = walked(steps, Place(0, 0))
    assert [step.start for step in found] == list(range(0, len(found) * batch, batch))
    assert {step.stop - step.start for step in found} == {batch}
    assert len(found) == (num_samples // batch if last_batch == "drop" else -(-num_samples // batch))
    positions = [steps.positions(np.arange(*step)) for step in found]
    assert {len(each) for each in positions} == {batch}
    counts = np.bincount(np.concatenate(positions), minlength=num_samples)
    if last_batch == "drop":
        assert counts.tolist() == [1] * (len(found) * batch) + [0] * (num_samples % batch)
    else:
        assert counts.min() >= 1
        assert (np.diff(counts) <= 0).all()  # what is repeated is of the start


@settings(deadline=None)
@given(**sizes, last_batch=st.sampled_from(["drop", "pad", "short"]), start=st.integers(0, 300))
def test_the_length_is_the_number_of_steps_from_anywhere(
    replicas: int, per_replica: int, num_samples: int, last_batch: str, start: int
) -> None:
    num_samples = max(num_samples, replicas * per_replica)
    steps, start = exact(num_samples, replicas, per_replica, last_batch), min(start, num_samples)
    assert len(walked(steps, Place(0, start))) == steps.length - steps.done(Place(0, start), start)


@settings(deadline=None, max_examples=300)
@given(
    num_samples=st.integers(9, 60),
    phases=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=8),
)
def test_another_size_goes_on_where_the_last_one_was(num_samples: int, phases: list[tuple[int, int, int]]) -> None:
    place, numbers = Place(0, 0), []
    for replicas, per_replica, count in [*phases, (1, 1, num_samples + 1)]:
        steps = exact(num_samples, replicas, per_replica)
        for _ in range(count):
            if steps.next(place.consumed) is None:
                place = steps.next_pass(place)
            taken = [share.positions(place) for share in shares(steps, lanes=6)]
            lengths = [len(each) for each in taken if each is not None]
            assert len(lengths) == replicas
            assert min(lengths) > 0
            numbers += [
                place.epoch * num_samples + int(each) for each in np.concatenate([t for t in taken if t is not None])
            ]
            place = steps.after(place)
    assert sorted(numbers) == list(range(place.epoch * num_samples + place.consumed))


def test_what_is_too_little_for_more_replicas_comes_first_in_the_next_epoch() -> None:
    steps = exact(10, 4, 1)
    assert steps.next(8) is None
    place = steps.next_pass(Place(3, 8))
    assert place == Place(4, -2)
    assert steps.next(place.consumed) == Step(-2, 4)  # on top of a whole one, so that an epoch has one length
    share = shares(steps)[0]
    before, after = share.order.locate(3, np.array([8, 9])), share.order.locate(4, np.arange(4))
    taken = [each.at(place) for each in shares(steps)]
    found = [chunk for each in taken if each is not None for chunk in each.located.chunks]
    assert sorted(found) == sorted([*before.chunks, *after.chunks])
    assert steps.done(place, 0) == 0
    assert len(walked(steps, place)) == steps.length == 2
    assert exact(10, 4, 1, "drop").next_pass(Place(3, 8)) == Place(4, 0)
    assert exact(10, 4, 1, "pad").next(8) == Step(8, 12)


@settings(deadline=None)
@given(**sizes, count=st.integers(1, 40))
def test_endless_goes_across_epochs(replicas: int, per_replica: int, num_samples: int, count: int) -> None:
    steps = endless(num_samples, replicas, per_replica)
    order = shares(steps)[0].order
    assert isinstance(order, Order)
    place, seen = Place(1, num_samples // 2), []
    first = num_samples + num_samples // 2
    for _ in range(count):
        batches = [taken.located.chunks.tolist() for share in shares(steps) if (taken := share.at(place)) is not None]
        assert [len(batch) for batch in batches] == [per_replica] * replicas
        seen.append(sorted(sample for batch in batches for sample in batch))
        place = steps.after(place)
        assert 0 <= place.consumed < num_samples
    for number, samples in enumerate(seen):
        start = first + number * replicas * per_replica
        expected = order.locate_numbers(np.arange(start, start + replicas * per_replica))
        assert samples == sorted(expected.chunks.tolist())
    assert place.epoch * num_samples + place.consumed == first + count * replicas * per_replica
    assert steps.length == max(1, num_samples // (replicas * per_replica))
    assert steps.next_pass(place) == place


def test_evaluation_has_no_padding() -> None:
    steps = exact(5, 2, 2)
    taken = [[each and each.located] for share in shares(steps, lanes=1) for each in [share.at(Place(0, 0))]]
    assert [[len(located.chunks) for located in each if located is not None] for each in taken] == [[3], [2]]
    assert steps.length == 1
    assert walked(exact(10, 2, 2), Place(0, 0)) == [Step(0, 4), Step(4, 8), Step(8, 10)]
    assert walked(exact(9, 2, 2), Place(0, 0)) == [Step(0, 4), Step(4, 9)]


@pytest.mark.parametrize(
    ("num_samples", "replicas", "batch", "last_batch", "message"),
    [
        (
            3,
            4,
            8,
            "short",
            "3 samples are too few for 4 replicas, each of which needs one: use at most 3 replicas, or last",
        ),
        (7, 2, 8, "drop", "7 samples are less than one batch of 8 of all 2 replicas, and last_batch=drop leaves out"),
        (0, 1, 1, "pad", "there are no samples to make batches of"),
        (9, 4, 10, "short", "a batch of 10 samples of all 4 replicas gives them different numbers: write 8 or 12"),
        (9, 4, 2, "short", "gives them different numbers: write 4"),
        (9, 4, 4, "shorter", "last_batch='shorter' is unknown; allowed: drop, pad, short. Did you mean short?"),
        (9, 0, 4, "short", "num_replicas=0 replicas: must be at least 1"),
        (9, 1, 0, "short", "batch_size=0 samples: must be at least 1"),
    ],
)
def test_what_makes_no_steps(num_samples: int, replicas: int, batch: int, last_batch: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        ExactSteps(num_samples=num_samples, num_replicas=replicas, batch_size=batch, last_batch=last_batch)
    if last_batch not in ("drop", "shorter") and num_samples != 3:
        with pytest.raises(ConfigError, match=message):
            EndlessSteps(num_samples=num_samples, num_replicas=replicas, batch_size=batch)


def test_few_samples_that_do_make_steps() -> None:
    steps = exact(3, 4, 2, "pad")
    assert steps.positions(np.arange(8)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert walked(steps, Place(0, 0)) == [Step(0, 8)]
    assert walked(exact(3, 3, 5), Place(0, 0)) == [Step(0, 3)]
    assert endless(3, 4, 2).after(Place(0, 0)) == Place(2, 2)
