"""Which metric slipped over many runs, and since when. Pure.

Whether a series changes says Pettitt's test: how different the ranks before and after the deepest cut are ("A
non-parametric approach to the change-point problem", Applied Statistics 1979). Where it changes say the values, since
ranks hide by how much: at the cut that leaves the least absolute deviations from the medians of both sides. After a
change the rest is looked at again, so that the newest is found. Many metrics are looked at together: their p-values are
Bonferroni's.

Note [chance]
    Pettitt's formula for the p-value never says too little, and of short series far too much: of eight runs 0.14 where
    it is 0.03. So the series is shuffled, until so many orders were as deep that their share is known (Besag and
    Clifford, "Sequential Monte Carlo p-values", Biometrika 1991): some hundred orders where nothing changes, and many
    for what is rare. What is rarer than all of them has the formula's p-value, if that is less.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dist.monitor.history.blocks import average_ranks
from lightning_dist.monitor.history.series import KINDS, Better
from lightning_dist.monitor.history.summary import RunSummary

RUNS_AT_LEAST = 8  # of fewer, no cut is rarer than chance even of a single metric; of several: runs_needed
_MOST_NEEDED = 100
LEVEL = 0.05
_EACH_SIDE = 3  # runs before and after a change: fewer may be outliers
_MOST_SHUFFLES = 50_000
_AS_DEEP_ENOUGH = 100  # their share of all shuffles then has an error of a tenth
_AT_ONCE = 2_000_000  # values in memory
_SEED = 0  # the same history gives the same answer
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChangePoint:
    """Where a series changes.

    Attributes:
        index: The first value after the change.
        p: Chance of a cut as deep in a series that does not change, or somewhat more. See Note [chance].
    """

    index: int
    p: float


@dataclass(frozen=True)
class Drift:
    """A metric that changed over the runs.

    Attributes:
        metric: Its name.
        unit: Of ``before`` and ``after``.
        before: Median of the runs before.
        after: Of those since.
        since: When the first run after the change began, ISO 8601.
        run_id: That run.
        runs: How many there are since.
        p: Chance of it, all metrics together.
        is_worse: Whether it slipped; ``None``: neither way is better.
    """

    metric: str
    unit: str
    before: float
    after: float
    since: str
    run_id: str
    runs: int
    p: float
    is_worse: bool | None

    @property
    def change(self) -> float | None:
        """After over before, minus 1; ``None``: there was nothing before."""
        return self.after / self.before - 1 if self.before else None


def change_point(values: Sequence[float], *, level: float = LEVEL) -> ChangePoint | None:
    """The most likely place where a series changes for good; ``None``: it does not, as far as can be told.

    Args:
        values: In order of time.
        level: Chance of finding one where there is none.
    """
    if len(values) < RUNS_AT_LEAST:
        return None
    p = _chance(np.asarray(average_ranks(values)))
    return ChangePoint(_best_cut(values), p) if p < level else None


def drifts(runs: Iterable[RunSummary], *, metric: str | None = None) -> tuple[Drift, ...]:
    """The newest change of each metric that changed, the worst first.

    Args:
        runs: Alike (see :attr:`RunSummary.likeness`), in any order.
        metric: Only this one.
    """
    ordered = sorted(runs, key=lambda run: run.moment)
    names = [name for name in metrics_of(ordered) if metric in (None, name)]
    found = [_newest(name, [run for run in ordered if name in run.metrics], tests=len(names)) for name in names]
    return tuple(sorted((drift for drift in found if drift is not None), key=_badness))


def runs_needed(metrics: int) -> int:
    """About how many runs it takes to find a clear change half way, if so many metrics are looked at together.

    Of all orders of n runs, two have the deepest cut of all: those with all low values on one side. Their chance, and
    that of one in the shuffles, must be below the level for each metric.
    """
    runs = RUNS_AT_LEAST
    while 2 / math.comb(runs, runs // 2) + 1 / (_MOST_SHUFFLES + 1) >= LEVEL / max(metrics, 1) and runs < _MOST_NEEDED:
        runs += 1
    return runs


def metrics_of(runs: Iterable[RunSummary]) -> tuple[str, ...]:
    """The metrics that enough of these runs have."""
    counts = Counter(name for run in runs for name in run.metrics)
    return tuple(name for name in KINDS if counts[name] >= RUNS_AT_LEAST)


def value_of(run: RunSummary, metric: str) -> float:
    """A run's figure of a metric: its median, or mean if it comes in bursts."""
    summary = run.metrics[metric]
    return summary.mean if KINDS[metric].is_bursty else summary.median


def _newest(name: str, runs: list[RunSummary], *, tests: int) -> Drift | None:
    values = [value_of(run, name) for run in runs]
    start, found, p = 0, None, 1.0
    while (point := change_point(values[start:], level=LEVEL / tests)) is not None:
        before = values[start : start + point.index]
        start += point.index
        found, p = before, point.p
    if found is None:
        return None
    before_it, since = statistics.median(found), statistics.median(values[start:])
    better = KINDS[name].better
    is_worse = None if better is Better.NEITHER else (since > before_it) == (better is Better.LOWER)
    first = runs[start]
    return Drift(
        metric=name,
        unit=KINDS[name].unit,
        before=before_it,
        after=since,
        since=first.started,
        run_id=first.run_id,
        runs=len(runs) - start,
        p=min(p * tests, 1.0),
        is_worse=is_worse,
    )


def _badness(drift: Drift) -> tuple[bool, float]:
    return drift.is_worse is not True, -abs(drift.change or 0.0)


def _chance(ranks: Floats) -> float:
    """Of a cut as deep in these ranks in any order. See Note [chance]."""
    count, depth = len(ranks), float(_depths(ranks[np.newaxis])[0])
    by_formula = min(2 * math.exp(-24 * depth**2 / (count**3 + count**2)), 1.0)
    if by_formula * (_MOST_SHUFFLES + 1) <= 1:
        return by_formula
    generator = np.random.default_rng(_SEED)
    done, as_deep, rows = 0, 0, 1000
    while done < _MOST_SHUFFLES:
        rows = min(rows, _MOST_SHUFFLES - done, max(_AT_ONCE // count, 1))
        found = as_deep + np.cumsum(_depths(generator.permuted(np.tile(ranks, (rows, 1)), axis=1)) >= depth)
        if found[-1] >= _AS_DEEP_ENOUGH:
            return _AS_DEEP_ENOUGH / (done + int(np.argmax(found >= _AS_DEEP_ENOUGH)) + 1)
        done, as_deep, rows = done + rows, int(found[-1]), 4 * rows
    return min((as_deep + 1) / (done + 1), by_formula)


def _depths(orders: Floats) -> Floats:
    """Pettitt's statistic of each row: how far the ranks before a cut are off what they would be in the mean, at most.

    Half of his, who counts pairs twice. Sums of halves are exact, so that orders that are as deep are found equal.
    """
    middle = (orders.shape[1] + 1) / 2
    return np.asarray(np.abs(np.cumsum(orders - middle, axis=1)).max(axis=1), dtype=np.float64)


def _best_cut(values: Sequence[float]) -> int:
    return min(
        range(_EACH_SIDE, len(values) - _EACH_SIDE + 1),
        key=lambda index: _deviations(values[:index]) + _deviations(values[index:]),
    )


def _deviations(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return sum(abs(value - middle) for value in values)
