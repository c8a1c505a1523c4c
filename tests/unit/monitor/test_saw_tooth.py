"""How much a curve is a saw: known shapes, and what must hold for any."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.monitor.saw_tooth import saw_tooth


def curve(*stretches: tuple[int, float], times: int = 1) -> tuple[list[float], list[float]]:
    """Stretches of (seconds, value), again and again, a value a second; the first value opens the first second."""
    values = [value for seconds, value in stretches * times for _ in range(seconds)]
    return [float(second) for second in range(len(values) + 1)], [values[0], *values]


def test_a_regular_swing_to_nothing_is_one() -> None:
    shape = saw_tooth(*curve((3, 1.0), (2, 0.0), times=6))
    assert shape is not None
    assert shape.score == 1.0
    assert shape.period_s == 5.0
    assert shape.cycles == 5
    assert shape.low_share == pytest.approx(0.4)
    assert shape.mean == pytest.approx(0.6)


@pytest.mark.parametrize("level", [0.0, 0.01, 0.3, 1.0, 2.5])
def test_a_flat_curve_is_none_whatever_its_level(level: float) -> None:
    shape = saw_tooth(*curve((40, level)))
    assert shape is not None
    assert (shape.score, shape.cycles, shape.low_share) == (0.0, 0, 0.0)
    assert shape.mean == pytest.approx(level)


def test_noise_around_a_level_is_no_saw() -> None:
    rng = random.Random(3)
    times = [0.25 * n for n in range(200)]
    shape = saw_tooth(times, [0.8 + rng.uniform(-0.2, 0.2) for _ in times])
    assert shape is not None
    assert shape.score == 0.0


def test_what_wavers_between_the_thresholds_is_no_cycle() -> None:
    shape = saw_tooth(*curve((1, 1.0), (1, 0.5), times=10))
    assert shape is not None
    assert shape.cycles == 0


def test_a_shallow_swing_counts_by_its_depth() -> None:
    shape = saw_tooth(*curve((2, 1.0), (2, 0.3), times=6))
    assert shape is not None
    assert shape.score == pytest.approx(0.7)


def test_falls_at_random_times_are_hardly_regular() -> None:
    rng = random.Random(5)
    stretches = [
        stretch
        for _ in range(200)
        for stretch in ((1 + int(rng.expovariate(0.1)), 1.0), (1 + int(rng.expovariate(0.1)), 0.0))
    ]
    shape = saw_tooth(*curve(*stretches))
    assert shape is not None
    assert shape.depth == 1.0
    assert shape.score < 0.3


def test_two_cycles_are_too_few() -> None:
    shape = saw_tooth(*curve((3, 1.0), (2, 0.0), times=3))
    assert shape is not None
    assert shape.cycles == 2
    assert shape.score == 0.0


def test_one_long_stall_is_low_and_no_saw() -> None:
    shape = saw_tooth(*curve((30, 1.0), (10, 0.0), (30, 1.0)))
    assert shape is not None
    assert shape.score == 0.0
    assert shape.low_share == pytest.approx(10 / 70)


def test_values_count_by_how_long_they_hold() -> None:
    times = [0.0, 9.0, 10.0, 19.0, 20.0, 29.0, 30.0, 39.0, 40.0]
    shape = saw_tooth(times, [1.0, *[1.0, 0.0] * 4])
    assert shape is not None
    assert shape.mean == pytest.approx(0.9)
    assert shape.low_share == pytest.approx(0.1)


def test_nothing_can_be_said_of_one_value() -> None:
    assert saw_tooth([], []) is None
    assert saw_tooth([1.0], [0.5]) is None
    assert saw_tooth([1.0, 1.0], [0.5, 0.5]) is None
    assert saw_tooth([0.0, 1.0], [0.5, math.nan]) is None
    with pytest.raises(ValueError, match="there is one for each"):
        saw_tooth([1.0], [])


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0, 4)), min_size=2, max_size=60), st.floats(0.1, 10))
def test_shares_are_shares_and_the_unit_of_time_does_not_matter(steps: list[tuple[float, float]], unit: float) -> None:
    times = [sum(seconds for seconds, _ in steps[: n + 1]) for n in range(len(steps))]
    values = [value for _, value in steps]
    shape, other = saw_tooth(times, values), saw_tooth([unit * each for each in times], values)
    assert shape is not None
    assert other is not None
    for share in (shape.low_share, shape.regularity, shape.depth, shape.score):
        assert 0.0 <= share <= 1.0 + 1e-9
    assert min(values) <= shape.mean * (1 + 1e-9) + 1e-9
    assert shape.cycles == other.cycles
    assert shape.score == pytest.approx(other.score, abs=1e-6)
