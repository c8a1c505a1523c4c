"""Several data sets in one order."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order.mixture import Mixture
from lightning_dist.data.order.sample_order import Order, OrderOptions
from lightning_dist.errors import CombinationError, ConfigError

all_weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


def sources_of(sizes: list[int], *, lanes: int = 24) -> list[Order]:
    options = OrderOptions(seed=11, lanes=lanes, shuffle_block=50)
    return [Order(np.full(size, 1), options, source=source) for source, size in enumerate(sizes)]


def mixed(weights: list[float], *, lanes: int = 24, size: int = 1000) -> Mixture:
    return Mixture(sources_of([size] * len(weights), lanes=lanes), weights)


def sources_at(mixture: Mixture, count: int) -> Numbers:
    return mixture.locate(0, np.arange(count)).sources


def off_by(sources: Numbers, source: int, share: float) -> float:
    """The most that a source's count is off its share in any prefix."""
    counts = np.cumsum(sources == source)
    return float(np.abs(counts - share * np.arange(1, len(sources) + 1)).max())


@settings(deadline=None, max_examples=50)
@given(weights=all_weights, lanes=st.sampled_from([1, 5, 24]))
def test_each_source_has_its_share_of_any_prefix(weights: list[float], lanes: int) -> None:
    sources = sources_at(mixed(weights, lanes=lanes), 300 * lanes)
    in_lane = 1 if len(weights) <= 2 else 4
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert off_by(sources, source, share) <= in_lane * lanes
        for lane in range(lanes):
            assert off_by(sources[lane::lanes], source, share) <= in_lane


@pytest.mark.parametrize(
    "weights", [[1, 1], [7, 3], [9, 1], [5, 3, 2], [1, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 1], [95, 4, 1]]
)
def test_most_of_what_lanes_are_off_cancels(weights: list[float]) -> None:
    sources = sources_at(mixed(weights), 24_000)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert off_by(sources, source, share) < 9
        for replica in range(4):
            assert off_by(sources[replica::4], source, share) < 9


def test_shares_hold_after_long() -> None:
    weights = np.array([0.3, 1e-4, 0.25, 0.2])
    sources = mixed(weights.tolist()).locate(0, 10**15 + np.arange(240_000)).sources
    counts = np.bincount(sources, minlength=4)
    assert np.abs(counts - weights / weights.sum() * len(sources)).max() < 2 * 4 * 24  # two prefixes, see the Note


@settings(deadline=None, max_examples=20)
@given(
    weights=all_weights,
    sizes=st.lists(st.integers(1, 200), min_size=12, max_size=12),
    lanes=st.integers(1, 30),
    epoch_samples=st.one_of(st.none(), st.integers(1, 500)),
)
def test_each_lane_takes_a_source_s_own_lane_in_turn(
    weights: list[float], sizes: list[int], lanes: int, epoch_samples: int | None
) -> None:
    orders = sources_of(sizes[: len(weights)], lanes=lanes)
    mixture = Mixture(orders, weights, epoch_samples=epoch_samples)
    count = 40 * lanes
    located = mixture.locate(0, np.arange(count))
    taken: Counter[tuple[int, int]] = Counter()
    for place, (source, chunk, sample) in enumerate(zip(*(column.tolist() for column in located), strict=True)):
        lane = place % lanes
        number = taken[source, lane] * lanes + lane
        assert (chunk, sample) == tuple(
            int(column[0]) for column in orders[source].locate_numbers(np.array([number]))[1:]
        )
        taken[source, lane] += 1


@settings(deadline=None, max_examples=30)
@given(weights=all_weights, epoch_samples=st.integers(1, 300), data=st.data())
def test_epochs_go_on_and_any_position_is_found_on_its_own(
    weights: list[float], epoch_samples: int, data: st.DataObject
) -> None:
    mixture = Mixture(sources_of([37] * len(weights)), weights, epoch_samples=epoch_samples)
    assert mixture.num_samples == epoch_samples
    whole = np.stack(mixture.locate(0, np.arange(3 * epoch_samples)))
    places = np.array(data.draw(st.lists(st.integers(0, 3 * epoch_samples - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(np.stack(mixture.locate(2, places - 2 * epoch_samples)), whole[:, places])


@pytest.mark.parametrize("weights", [[1e-9, 1e9], [5e-324, 1.0], [1e302, 1e302], [np.float32(3), np.int64(1)]])
def test_weights_may_be_as_unlike_or_as_large_as_they_like(weights: list[float]) -> None:
    heavy = max(float(weight) / 2 for weight in weights)
    light = sum(float(weight) / 2 for weight in weights) - heavy
    sources = mixed(weights).locate(0, np.arange(48_000)).sources
    rarer = min(np.bincount(sources, minlength=2))
    assert abs(rarer - 48_000 * (light / (light + heavy))) < 24


def test_weights_whose_sum_is_beyond_numbers_are_refused() -> None:
    for weight in (1.7e308, 10**400):
        with pytest.raises(ConfigError, match="is beyond 2e"):
            mixed([weight, 1.0])


def test_a_source_is_gone_through_before_it_comes_again() -> None:
    sizes, weights = [1000, 200, 2000], [2.0, 1.0, 1.0]
    mixture = Mixture(sources_of(sizes), weights)
    assert mixture.num_samples == 3200
    located = mixture.locate(0, np.arange(8000))
    for source, size in enumerate(sizes):
        counts = np.bincount(located.chunks[located.sources == source], minlength=size)
        whole_epochs = int(counts.sum()) // size
        assert counts.min() >= whole_epochs - 1
        assert counts.max() <= whole_epochs + 2
        # Up to how far lanes are apart, which is less than 8 samples each, each sample has come as often as any other.
        assert int((np.abs(counts - counts.sum() / size) >= 1).sum()) < 8 * 24


def test_one_source_is_that_source() -> None:
    (order,) = sources_of([100])
    mixture = Mixture([order], [0.1])
    for epoch in (0, 3):
        assert np.array_equal(
            np.stack(mixture.locate(epoch, np.arange(100))), np.stack(order.locate(epoch, np.arange(100)))
        )


@pytest.mark.parametrize("sizes", [[1, 1], [3, 50], [1, 1000, 23]])
def test_small_sources(sizes: list[int]) -> None:
    mixture = Mixture(sources_of(sizes), [1.0] * len(sizes))
    located = mixture.locate(0, np.arange(960))
    for source, size in enumerate(sizes):
        counts = np.bincount(located.chunks[located.sources == source], minlength=size)
        assert counts.sum() == pytest.approx(960 / len(sizes), abs=9)
        assert len(counts) == size
        if size < 100:
            assert counts.min() > 0


def test_none_and_what_is_not_there() -> None:
    mixture = mixed([1, 2])
    assert len(mixture.locate(0, np.zeros(0, dtype=np.int64)).chunks) == 0
    with pytest.raises(ValueError, match="has no sample number -1"):
        mixture.locate(0, np.array([-1]))


def test_it_can_be_sent_to_other_processes() -> None:
    mixture = mixed([1, 2, 3])
    sent = pickle.loads(pickle.dumps(mixture))
    assert np.array_equal(np.stack(sent.locate(1, np.arange(50))), np.stack(mixture.locate(1, np.arange(50))))


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([], [], "one weight for each source, got 0 for 0 sources"),
        ([1], [1, 2], "one weight for each source, got 2 for 1 sources"),
        ([1, 1], [1, 0], "source 1 of a mixture has the weight 0; weights are positive numbers: leave out"),
        ([1, 1], [1, -0.5], "has the weight -0.5"),
        ([1, 1], [float("nan"), 1], "source 0 of a mixture has the weight nan"),
        ([1, 1], [float("inf"), 1], "has the weight inf"),
        ([1, 1], [1, "2"], "has the weight '2'"),
        ([1, 0], [1, 1], "source 1 of a mixture has no samples; leave it out"),
    ],
)
def test_what_cannot_be_mixed(sizes: list[int], weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(sources_of(sizes), weights)


def test_one_number_of_lanes_and_an_epoch_of_samples() -> None:
    with pytest.raises(CombinationError, match=r"one number of lanes, got \[24, 12\]"):
        Mixture([*sources_of([1]), *sources_of([1], lanes=12)], [1, 1])
    with pytest.raises(ConfigError, match="epoch_samples=0 samples: must be at least 1 samples"):
        Mixture(sources_of([1]), [1], epoch_samples=0)


def test_it_never_changes() -> None:
    located = Mixture(sources_of([7, 20, 3], lanes=4), [5, 3, 0.2]).locate(1, np.arange(30))
    assert located.sources.tolist() == [
        0,
        1,
        2,
        1,
        1,
        0,
        0,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        2,
        0,
        0,
        1,
        0,
        1,
        1,
        0,
        1,
    ]
    assert located.chunks.tolist() == [
        0,
        18,
        0,
        7,
        17,
        4,
        5,
        1,
        5,
        1,
        3,
        0,
        9,
        6,
        0,
        8,
        2,
        4,
        3,
        6,
        0,
        1,
        5,
        1,
        9,
        6,
        16,
        6,
        2,
        19,
    ]
