"""Intervals cover and verdicts err as often as they say, in simulated experiments."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from lightning_dist.errors import ConfigError
from lightning_dist.experiment.paired import Estimate, estimate, ratio
from lightning_dist.experiment.student import t_cdf, t_quantile
from lightning_dist.experiment.verdict import Answer, Margin, judge, wanted_pairs

ABSOLUTE = Margin(1.0, is_relative=False)


@pytest.mark.parametrize(
    ("chance", "freedom", "value"),
    # Of printed tables, to their last digit.
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.95, 9, 1.833), (0.995, 30, 2.750), (0.975, 1000, 1.962)],
)
def test_quantiles_are_those_of_tables(chance: float, freedom: int, value: float) -> None:
    assert t_quantile(chance, freedom) == pytest.approx(value, abs=5e-4)
    assert t_quantile(1 - chance, freedom) == pytest.approx(-value, abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3.5, 7, 40, 2000])
def test_quantile_inverts_the_distribution(freedom: float) -> None:
    for chance in (0.001, 0.2, 0.5, 0.9, 0.9999):
        assert t_cdf(t_quantile(chance, freedom), freedom) == pytest.approx(chance, abs=1e-9)
    assert t_cdf(math.inf, freedom) == 1
    assert t_cdf(-math.inf, freedom) == 0


def test_distribution_of_one_degree_is_cauchys() -> None:
    for value in (-3.0, -0.5, 0.0, 1.0, 20.0):
        assert t_cdf(value, 1) == pytest.approx(0.5 + math.atan(value) / math.pi, abs=1e-12)


def _coverage(draws: np.ndarray) -> tuple[float, float]:
    """How often both intervals of experiments, one a row, hold 0."""
    estimates = [estimate(row.tolist()) for row in draws]
    inside = [[each.low <= 0 <= each.high for each in (e.t, e.bootstrap) if each is not None] for e in estimates]
    return tuple(statistics.fmean(column) for column in zip(*inside, strict=True))  # type: ignore[return-value]


def test_intervals_cover_normal_differences() -> None:
    t, bootstrap = _coverage(np.random.default_rng(1).normal(size=(400, 6)))
    # Of 400 experiments, 95 % give or take 3 standard errors.
    assert 0.917 <= t <= 0.983
    assert 0.917 <= bootstrap <= 0.985


def test_the_bootstrap_covers_skewed_differences_better() -> None:
    t, bootstrap = _coverage(np.random.default_rng(2).exponential(size=(400, 8)) - 1)
    assert bootstrap > t
    assert bootstrap >= 0.90


def _answers(rng: np.random.Generator, *, worse_by: float, pairs: int, trials: int = 1500) -> dict[Answer, float]:
    """Shares of verdicts where the losses of pairs rise and fall together, and differ by a normal part of 0.5."""
    counts = dict.fromkeys(Answer, 0)
    for _ in range(trials):
        common = rng.normal(10, 2, pairs)
        second = common + worse_by + rng.normal(0, 0.5, pairs)
        counts[judge(common.tolist(), second.tolist(), ABSOLUTE).answer] += 1
    return {answer: count / trials for answer, count in counts.items()}


@pytest.fixture
def without_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts do not rest on it, and it takes most of the time."""
    monkeypatch.setattr("lightning_dist.experiment.paired._bootstrap", lambda *_: None)


@pytest.mark.usefixtures("without_bootstrap")
@pytest.mark.parametrize("pairs", [3, 5, 10])
def test_at_the_margin_each_wrong_answer_has_its_chance(pairs: int) -> None:
    shares = _answers(np.random.default_rng(pairs), worse_by=1.0, pairs=pairs)
    # 2.5 % each, give or take 3 standard errors of 1500 trials.
    assert 0.013 <= shares[Answer.SAFE] <= 0.038
    assert 0.013 <= shares[Answer.NOT_SAFE] <= 0.038


@pytest.mark.usefixtures("without_bootstrap")
def test_what_is_clear_is_told() -> None:
    rng = np.random.default_rng(4)
    assert _answers(rng, worse_by=0.0, pairs=8)[Answer.SAFE] > 0.95
    assert _answers(rng, worse_by=3.0, pairs=5)[Answer.NOT_SAFE] > 0.95
    assert _answers(rng, worse_by=0.7, pairs=3)[Answer.NOT_ENOUGH] > 0.8


@pytest.mark.usefixtures("without_bootstrap")
def test_as_many_pairs_as_are_advised_tell() -> None:
    pairs = wanted_pairs(Estimate(0.6, 0.5, 2), 1.0)
    assert pairs is not None
    shares = _answers(np.random.default_rng(5), worse_by=0.6, pairs=pairs)
    assert shares[Answer.SAFE] == pytest.approx(0.8, abs=0.06)  # the sample size is rounded up


def test_no_number_of_pairs_tells_what_is_at_the_margin() -> None:
    assert wanted_pairs(Estimate(1.0, 0.5, 5), 1.0) is None
    assert wanted_pairs(Estimate(0.999, 0.5, 5), 1.0) is None, "more than a thousand"
    assert wanted_pairs(Estimate(0.0, 0.5, 7), 1.0) == 8, "more than there are"


def test_equal_losses_are_safe_at_any_margin() -> None:
    judgement = judge([2.0, 3.0], [2.0, 3.0], Margin.parse("1%"))
    assert judgement.answer is Answer.SAFE
    assert judgement.margin == pytest.approx(0.025)
    assert judgement.p_worse == 0


def test_one_pair_is_not_enough() -> None:
    judgement = judge([2.0], [2.0], ABSOLUTE)
    assert judgement.answer is Answer.NOT_ENOUGH
    assert judgement.difference is not None
    assert judgement.difference.t is None


def test_a_loss_that_is_lost_is_not_safe() -> None:
    judgement = judge([2.0, 2.0, 2.0], [2.0, math.nan, 2.0], ABSOLUTE)
    assert judgement.answer is Answer.NOT_SAFE
    assert "1 of 3 pairs" in judgement.why


def test_pairs_whose_first_loss_is_lost_say_nothing() -> None:
    judgement = judge([2.0, math.inf, 2.5], [2.0, 2.0, 2.5], ABSOLUTE)
    assert judgement.answer is Answer.SAFE
    assert judgement.difference is not None
    assert judgement.difference.pairs == 2


def test_safe_and_yet_worse_is_said() -> None:
    judgement = judge([2.0, 2.0, 2.0], [2.5, 2.5, 2.5001], ABSOLUTE)
    assert judgement.answer is Answer.SAFE
    assert "worse by more than chance" in judgement.why


@pytest.mark.parametrize(("text", "allowed"), [("1%", 0.04), ("0.5 %", 0.02), (".02abs", 0.02), ("3abs", 3.0)])
def test_margins_have_units(text: str, allowed: float) -> None:
    assert Margin.parse(text).of(-4.0) == pytest.approx(allowed)


@pytest.mark.parametrize("text", ["1", "0%", "-1%", "1pct", "", "nanabs", "1e9999abs"])
def test_margins_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write 1%"):
        Margin.parse(text)


def test_ratios_are_geometric() -> None:
    found = ratio([2.0, 8.0], [1.0, 1.0])
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    assert ratio([1.0, 0.0], [1.0, 1.0]) is None
    assert ratio([], []) is None
