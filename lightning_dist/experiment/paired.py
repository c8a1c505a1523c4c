"""What pairs of runs say of a difference: its mean, and how sure that is. Pure.

Two intervals are given. Student's t takes the differences of pairs for normally distributed, which means of many steps
nearly are. The bootstrap-t (Efron, "Nonparametric standard errors and confidence intervals", Canadian Journal of
Statistics 1981; Hall, "The bootstrap and Edgeworth expansion", 1992) takes their own distribution instead. Where the
two disagree, the differences are skewed or have an outlier, and more pairs are needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dist.experiment.student import t_quantile

LEVEL = 0.95
BOOTSTRAP_AT_LEAST = 5  # of fewer pairs, too many resamples are one pair over and over
_RESAMPLES = 10_000
_SEED = 20_230_501  # the same intervals from the same values


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A mean of differences, each of one pair.

    Attributes:
        mean: Of them.
        spread: Their standard deviation; ``None``: of one pair there is none.
        pairs: How many.
        t: The interval that has the true mean with a chance of 95 %, by Student's t; ``None``: one pair.
        bootstrap: Likewise, by the bootstrap-t; ``None``: fewer than :data:`BOOTSTRAP_AT_LEAST` pairs.
    """

    mean: float
    spread: float | None
    pairs: int
    t: Interval | None = None
    bootstrap: Interval | None = None

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.spread is None else self.spread / math.sqrt(self.pairs)


def estimate(differences: Sequence[float], *, level: float = LEVEL, with_bootstrap: bool = True) -> Estimate:
    """The mean of differences, with its intervals.

    Args:
        differences: One a pair, all finite, at least one.
        level: Of the intervals.
        with_bootstrap: Whether to spend a millisecond on the second one.
    """
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return Estimate(mean, None, count)
    spread = statistics.stdev(differences)
    half = t_quantile((1 + level) / 2, count - 1) * spread / math.sqrt(count)
    second = _bootstrap(differences, level) if with_bootstrap else None
    return Estimate(mean, spread, count, Interval(mean - half, mean + half), second)


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, level: float = LEVEL) -> Estimate | None:
    """The geometric mean of ratios, one a pair, with its intervals; ``None`` where a value is not above 0.

    ``spread`` is that of the ratios' logarithms.
    """
    if not numerators or any(not 0 < value < math.inf for value in (*numerators, *denominators)):
        return None
    logs = estimate([math.log(over / under) for over, under in zip(numerators, denominators, strict=True)], level=level)
    return Estimate(math.exp(logs.mean), logs.spread, logs.pairs, _exp(logs.t), _exp(logs.bootstrap))


def _exp(interval: Interval | None) -> Interval | None:
    return None if interval is None else Interval(_bounded_exp(interval.low), _bounded_exp(interval.high))


def _bounded_exp(value: float) -> float:
    """Of few pairs that lie far apart an end may be beyond what a number holds."""
    return math.exp(value) if value < 700 else math.inf


def _bootstrap(differences: Sequence[float], level: float) -> Interval | None:
    count = len(differences)
    if count < BOOTSTRAP_AT_LEAST:
        return None
    values = np.asarray(differences, dtype=np.float64)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count)
    drawn = values[np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    usable = errors > 1e-12 * (error + abs(mean))
    if not usable.any():
        return Interval(mean, mean)
    distances = (drawn.mean(axis=1)[usable] - mean) / errors[usable]
    low, high = np.quantile(distances, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean - float(high) * error, mean - float(low) * error)
