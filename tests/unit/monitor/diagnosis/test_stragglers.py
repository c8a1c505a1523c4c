"""Which ranks lag, in which phase, since when; and that noise makes nobody a straggler."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dist.monitor.diagnosis.changes import shift_of, without_shift
from lightning_dist.monitor.diagnosis.noise import block_error, chance_above
from lightning_dist.monitor.diagnosis.stragglers import stragglers_of
from lightning_dist.monitor.diagnosis.window import Window, window_of
from lightning_dist.monitor.record import Phase
from tests.support.monitored import Model, Slow


def _window(model: Model) -> Window:
    window = window_of(model.record())
    assert isinstance(window, Window)
    return window


@pytest.mark.parametrize("phase", [Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER])
@pytest.mark.parametrize("ranks", [(0,), (3,), (2, 3)])
def test_who_and_in_what(phase: Phase, ranks: tuple[int, ...]) -> None:
    found = stragglers_of(_window(Model(slow=(Slow(ranks, 0.012, phase),), noise=0.1)))
    assert found is not None
    assert found.ranks == ranks
    assert found.phase is phase
    assert found.lag_s == pytest.approx(0.012, abs=0.003)
    assert found.since_step is None


def test_one_of_two() -> None:
    found = stragglers_of(_window(Model(hosts=("a", "b"), slow=(Slow((1,), 0.01),))))
    assert found is not None
    assert found.ranks == (1,)


@pytest.mark.parametrize("since", [40, 60, 75])
def test_since_when(since: int) -> None:
    found = stragglers_of(_window(Model(slow=(Slow((1,), 0.02, since=since),), noise=0.1)))
    assert found is not None
    assert found.since_step is not None
    assert abs(found.since_step - since) <= 2
    assert found.lag_since_s == pytest.approx(0.02, abs=0.003)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_noise_makes_no_straggler(noise: float, ranks: int) -> None:
    hosts = ["a"] * ranks
    found = [stragglers_of(_window(Model(hosts=hosts, steps=50, noise=noise, seed=seed))) for seed in range(20)]
    assert sum(each is not None for each in found) <= 1


def test_a_single_hiccup_makes_no_straggler() -> None:
    model = Model(slow=(Slow((1,), 3.0, since=97),))
    assert stragglers_of(_window(model)) is None


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.LOGGING, Phase.VALIDATION])
def test_what_one_rank_does_for_all_makes_it_no_straggler(phase: Phase) -> None:
    assert stragglers_of(_window(Model(slow=(Slow((0,), 0.03, phase),)))) is None


def test_without_communication_nobody_is_seen_waiting() -> None:
    model = Model(slow=(Slow((1,), 0.03),), unavailable={Phase.COMMUNICATION: "no hook"})
    assert stragglers_of(_window(model)) is None


def test_change_of_level() -> None:
    noise = np.random.default_rng(0).standard_normal(80) * 0.1
    shift = shift_of(np.where(np.arange(80) < 50, 1.0, 2.0) + noise)
    assert shift is not None
    assert shift.index == 50
    assert (shift.before, shift.after) == (pytest.approx(1.0, abs=0.05), pytest.approx(2.0, abs=0.05))
    assert np.ptp(without_shift(np.where(np.arange(80) < 50, 1.0, 2.0))) == 0


def test_noise_has_no_change_of_level() -> None:
    found = [shift_of(np.random.default_rng(seed).standard_normal(60)) for seed in range(200)]
    assert sum(shift is not None for shift in found) <= 2


def test_short_and_unsound_series_have_none() -> None:
    assert shift_of(np.array([1.0, 2.0])) is None
    assert shift_of(np.full(30, np.nan)) is None
    assert shift_of(np.ones(30)) is None


def test_error_of_independent_steps_is_that_of_their_mean() -> None:
    errors = [block_error(np.random.default_rng(seed).standard_normal(400)) for seed in range(50)]
    assert np.mean(errors) == pytest.approx(1 / 20, rel=0.2)


def test_chance_of_being_above() -> None:
    assert chance_above(0.1, 0.1, 0.02) == 0.5
    assert chance_above(0.12, 0.1, 0.02) == pytest.approx(0.841, abs=0.001)
    assert chance_above(0.2, 0.1, 0.0) == 1.0
    assert chance_above(0.05, 0.1, 0.0) == 0.0
