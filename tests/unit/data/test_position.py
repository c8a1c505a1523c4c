"""Where training is in the data: how it moves, what is saved, and what it is refused with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.order.identity import MOST_GROUPS, DataIdentity, DataSummary
from lightning_dist.data.order.mixture import Mixture
from lightning_dist.data.order.position import Position, begun, done, from_state, given, to_state
from lightning_dist.data.order.sample_order import Order, OrderOptions, SampleOrder
from lightning_dist.data.order.steps import EndlessSteps, ExactSteps, Place, Steps
from lightning_dist.errors import ChangedDataError, ForeignDataError


def exact(last_batch: str = "short", *, replicas: int = 1, batch: int = 4) -> ExactSteps:
    return ExactSteps(num_samples=10, num_replicas=replicas, batch_size=batch, last_batch=last_batch)


def endless() -> EndlessSteps:
    return EndlessSteps(num_samples=10, num_replicas=1, batch_size=4)


def at(epoch: int, consumed: int, taken: int = 0) -> Position:
    return Position(Place(epoch, consumed), taken)


def saved_and_loaded(position: Position) -> Position:
    order = Order(np.array([10]), OrderOptions(seed=0))
    index = index_of([10])
    identity = DataIdentity(order.describe(), (DataSummary.of(index),))
    return from_state(json.loads(json.dumps(to_state(position, identity))), identity, [index])


def after(steps: Steps, position: Position, count: int) -> Position:
    for _ in range(count):
        position = given(position, steps)
    return position


@pytest.mark.parametrize("steps", [exact(), exact("drop"), exact("pad"), endless()])
def test_iterating_twice_before_a_batch_changes_nothing(steps: Steps) -> None:
    for position in (Position(), at(3, 4, 4), at(2, -2)):
        assert begun(begun(position, steps), steps) == position
    loaded = saved_and_loaded(after(steps, Position(), 1))
    assert begun(begun(loaded, steps), steps) == at(0, 4, 4)


@pytest.mark.parametrize(("last_batch", "count"), [("short", 3), ("pad", 3), ("drop", 2)])
def test_an_exact_epoch_and_the_next(last_batch: str, count: int) -> None:
    steps = exact(last_batch)
    position = after(steps, begun(Position(), steps), count)
    taken = {"short": 10, "pad": 12, "drop": 8}[last_batch]
    assert position == Position(Place(0, 10), taken, is_started=True)  # also what was dropped is done
    assert done(position, steps) == count
    assert steps.next(position.place.consumed) is None
    assert begun(position, steps) == at(1, 0)
    loaded = saved_and_loaded(position)
    assert loaded == at(0, 10, taken)
    assert begun(loaded, steps) == at(1, 0)
    assert begun(loaded, exact(last_batch, batch=1)) == at(1, 0)


def test_an_exact_epoch_that_is_cut_short() -> None:
    steps = exact()
    position = after(steps, begun(Position(), steps), 2)
    assert position.place == Place(0, 8)
    assert begun(position, steps) == at(1, 0)
    loaded = saved_and_loaded(position)
    assert begun(loaded, steps) == at(0, 8, 8)
    assert begun(after(steps, begun(loaded, steps), 1), steps) == at(1, 0)


def test_endless_goes_on_whenever_it_is_begun() -> None:
    steps = endless()  # passes of two steps
    position = after(steps, begun(Position(), steps), 1)
    assert begun(position, steps) == at(0, 4)
    assert begun(saved_and_loaded(position), steps) == at(0, 4, 4)
    position = after(steps, position, 1)
    assert begun(position, steps) == at(0, 8)
    assert begun(saved_and_loaded(position), steps) == at(0, 8)
    assert after(steps, begun(position, steps), 1).place == Place(1, 2)


def test_what_is_left_for_more_replicas_than_samples() -> None:
    loaded = saved_and_loaded(after(exact(), Position(), 2))
    assert begun(loaded, exact(replicas=2)) == at(0, 8, 8)
    assert begun(loaded, exact(replicas=4)) == at(1, -2)
    assert begun(saved_and_loaded(at(1, -2)), exact()) == at(1, -2)


def test_what_was_done_at_another_size_counts_as_steps_of_the_present_one() -> None:
    position, steps = after(exact(), Position(), 1), exact(batch=2)
    assert (done(position, steps), steps.length) == (2, 5)


def index_of(samples: list[int], **changes: Any) -> DatasetIndex:
    """A data set of shards with two chunks each."""
    count = len(samples)
    columns = {
        "format": "tokens",
        "shards": tuple(f"shard-{number:05}.bin" for number in range(count)),
        "shard_of": np.repeat(np.arange(count), 2),
        "starts": np.tile([0, 1000], count),
        "sizes": np.repeat(np.array(samples) * 10, 2),
        "samples": np.repeat(samples, 2),
        "properties": {"seq_len": 512, "dtype": "uint16"},
    }
    return DatasetIndex(**{**columns, **changes})


def identity_of(order: SampleOrder, *indexes: DatasetIndex) -> DataIdentity:
    return DataIdentity(order.describe(), tuple(DataSummary.of(index) for index in indexes))


def single(index: DatasetIndex, **options: Any) -> DataIdentity:
    return identity_of(Order(index.samples, OrderOptions(**{"seed": 1, **options})), index)


WAS = index_of([5] * 1000)


def refusal(identity: DataIdentity, *indexes: DatasetIndex, saved: DataIdentity | None = None) -> str:
    state = json.loads(json.dumps(to_state(at(2, 40, 3), saved or single(WAS))))
    with pytest.raises(ChangedDataError, match=r"Give what the run began with, or start an epoch anew") as caught:
        from_state(state, identity, indexes)
    return "\n".join(line for line in str(caught.value).splitlines() if line.startswith("-"))


def test_the_same_data_are_taken() -> None:
    state = json.loads(json.dumps(to_state(at(2, 40, 3), single(WAS))))
    assert from_state(state, single(index_of([5] * 1000)), [WAS]) == at(2, 40, 3)
    assert len(json.dumps(state)) < 16_000


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"seed": 2}, "- order: seed was 1, is 2"),
        ({"lanes": 12}, "- order: lanes was 24, is 12"),
        (
            {"shuffle_block": 8, "shuffle": False},
            "- order: shuffle_block was 1024, is 8\n- order: shuffle was True, is False",
        ),
    ],
)
def test_another_order(options: dict[str, Any], change: str) -> None:
    assert refusal(single(WAS, **options), WAS) == change


def renamed(number: int) -> DatasetIndex:
    shards = list(WAS.shards)
    shards[number] = "other.bin"
    return replace(WAS, shards=tuple(shards))


def recounted(*numbers: int) -> DatasetIndex:
    samples = WAS.samples.copy()
    samples[[2 * number for number in numbers]] += 1
    return replace(WAS, samples=samples)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (
            index_of([5] * 1000, properties={"seq_len": 1024, "dtype": "uint16"}),
            "- data: property seq_len was 512, is 1024",
        ),
        (index_of([5] * 1000, format="mds", properties=WAS.properties), "- data: format was 'tokens', is 'mds'"),
        (
            index_of([5] * 1001),
            "- data: shards was 1000, is 1001\n- data: samples was 10000, is 10010\n"
            "- data: bytes was 100000, is 100100\n- data: the first 1000 shards are what they were",
        ),
        (
            index_of([5] * 998),
            "- data: shards was 1000, is 998\n- data: samples was 10000, is 9980\n- data: bytes was 100000, is 99800\n"
            "- data: 1 of 250 groups of shards differ in names, sizes or samples: of shards 996 to 999, from "
            "'shard-00996.bin' on",
        ),
        (
            renamed(5),
            "- data: 1 of 250 groups of shards differ in names, sizes or samples: of shards 4 to 7, from "
            "'shard-00004.bin' on",
        ),
        (
            recounted(17, 18, 900),
            "- data: samples was 10000, is 10003\n- data: 2 of 250 groups of shards differ in names, sizes or samples: "
            "of shards 16 to 903, from 'shard-00016.bin' on",
        ),
        (replace(WAS, crc32=np.zeros(2000, dtype=np.int64)), "- data: 250 of 250 groups of shards differ"),
    ],
)
def test_other_data(index: DatasetIndex, change: str) -> None:
    found = refusal(single(index), index)
    assert found.startswith(change)
    assert found.count("\n") == change.count("\n")


def test_shards_that_were_added_to_a_group_that_was_not_full() -> None:
    was, now = index_of([5] * 1001), index_of([5] * 1003)
    assert refusal(single(now), now, saved=single(was)).endswith("- data: the first 1001 shards are what they were")


def test_chunks_may_be_listed_in_any_order() -> None:
    by_chance = np.random.default_rng(0).permutation(2000)
    was = replace(WAS, **{name: getattr(WAS, name)[by_chance] for name in ("shard_of", "starts", "sizes", "samples")})
    samples = was.samples.copy()
    samples[np.flatnonzero(was.shard_of == 17)[0]] -= 1
    now = replace(was, samples=samples)
    found = refusal(single(now), now, saved=single(was))
    assert "1 of 250 groups of shards differ in names, sizes or samples: of shards 16 to 19" in found


def test_mixtures() -> None:
    indexes = [index_of([5] * 3), index_of([7] * 2)]
    orders = [Order(index.samples, OrderOptions(seed=1), source=source) for source, index in enumerate(indexes)]
    saved = identity_of(Mixture(orders, [1, 2]), *indexes)
    assert (
        refusal(identity_of(Mixture(orders, [1, 3]), *indexes), *indexes, saved=saved)
        == "- order: weights.1 was 2.0, is 3.0"
    )
    one = identity_of(Mixture(orders[:1], [1]), indexes[0])
    assert "- there were 2 data sets, there are 1" in refusal(one, indexes[0], saved=saved)
    swapped = indexes[::-1]
    found = refusal(DataIdentity(saved.order, saved.sources[::-1]), *swapped, saved=saved)
    assert found.startswith("- data set 0: shards was 3, is 2\n")
    assert "\n- data set 1: shards was 2, is 3\n" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": None}, "this is no position of the data: TypeError"),
        ({"data": None}, "a position of the data is of version 'NoneType'; this library reads 1"),
        ({"data": {"version": 2}}, "a position of the data is of version 2; this library reads 1"),
        ({"data": {"version": 1}}, "a position of the data is damaged: KeyError: 'sources'"),
        (
            {"data": {"version": 1, "order": {}, "sources": [{"groups": []}]}},
            "a position of the data is damaged: TypeError",
        ),
    ],
)
def test_what_is_no_position(change: dict[str, Any], message: str) -> None:
    state = {**to_state(at(0, 1), single(WAS)), **change}
    with pytest.raises(ForeignDataError, match=message):
        from_state(state, single(WAS), [WAS])
    with pytest.raises(ForeignDataError, match="this is no position of the data: KeyError: 'epoch'"):
        from_state({}, single(WAS), [WAS])


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000, 100_000])
def test_a_summary_is_small_whatever_the_data(count: int) -> None:
    index = DatasetIndex(
        format="tokens",
        shards=tuple(map(str, range(count))),
        shard_of=np.arange(count)[::-1],  # chunks may come in any order
        starts=np.zeros(count, dtype=np.int64),
        sizes=np.ones(count, dtype=np.int64),
        samples=np.ones(count, dtype=np.int64),
    )
    summary = DataSummary.of(index)
    assert 1 <= len(summary.groups) <= MOST_GROUPS
    assert len(summary.groups) == -(-count // summary.group_size)
    assert summary.groups[-1].first == str((len(summary.groups) - 1) * summary.group_size)
    assert (summary.shards, summary.samples, summary.size_bytes) == (count, count, count)
