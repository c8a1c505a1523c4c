"""How much a curve of utilisation is a saw: a rank that works and starves in turns. Pure.

Definitions. The *high* level is the 90th percentile of the values (by time). A stretch is *low* from where the curve
falls below 40 % of it to where it rises above 60 %: what wavers in between changes nothing. A *cycle* is from one fall
to the next; its length is the period. *Regularity* is 1 - (spread of periods) / (their median), the spread being the
distance between quartiles, and never below 0: 1 for a beat, about 0 for falls at random times. *Depth* is the distance
between the means of the high and the low stretches as a share of the high level. The *score* is depth x regularity,
and 0 with fewer than three cycles: 0 for a flat curve whatever its level, 1 for a regular swing down to nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FALLS_BELOW, _RISES_ABOVE = 0.4, 0.6  # of the high level
_LEAST_CYCLES = 3
_LEAST_LEVEL = 0.02  # below it nothing works at all, and shares of it say nothing


@dataclass(frozen=True)
class SawTooth:
    """The shape of a curve.

    Attributes:
        mean: Of the values, by time.
        low_share: Share of the time that is low.
        cycles: How many times it fell and fell again.
        period_s: Median time from fall to fall; ``None``: it did not fall twice.
        regularity: Between 0 and 1.
        depth: Between 0 and 1.
        score: Between 0 and 1; see the module's definitions.
    """

    mean: float
    low_share: float
    cycles: int
    period_s: float | None
    regularity: float
    depth: float
    score: float


def saw_tooth(times_s: Sequence[float], values: Sequence[float]) -> SawTooth | None:
    """The shape of a curve; ``None`` if it has fewer than two values.

    Args:
        times_s: When, in order. A value holds from the time before it to its own: it is what was measured in between.
        values: As many.
    """
    if len(times_s) != len(values):
        raise ValueError(f"{len(times_s)} times for {len(values)} values: there is one for each")
    held = [
        (start, end, value)
        for start, end, value in zip(times_s, times_s[1:], values[1:], strict=False)
        if end > start and math.isfinite(value)
    ]
    if not held:
        return None
    total_s = sum(end - start for start, end, _ in held)
    mean = sum((end - start) * value for start, end, value in held) / total_s
    level = _high_level(held, total_s)
    if level < _LEAST_LEVEL:
        return SawTooth(mean, 0.0, 0, None, 0.0, 0.0, 0.0)
    falls: list[float] = []
    low, high = _Part(), _Part()
    is_low = held[0][2] < _FALLS_BELOW * level
    for start, end, value in held:
        if is_low and value > _RISES_ABOVE * level:
            is_low = False
        elif not is_low and value < _FALLS_BELOW * level:
            is_low = True
            falls.append(start)
        (low if is_low else high).add(end - start, value)
    periods = [after - before for before, after in itertools.pairwise(falls)]
    regularity = _regularity(periods)
    depth = min(1.0, max(0.0, (high.mean - low.mean) / level)) if low.seconds and high.seconds else 0.0
    return SawTooth(
        mean=mean,
        low_share=low.seconds / total_s,
        cycles=len(periods),
        period_s=statistics.median(periods) if periods else None,
        regularity=regularity,
        depth=depth,
        score=depth * regularity,
    )


@dataclass
class _Part:
    seconds: float = 0.0
    area: float = 0.0

    def add(self, seconds: float, value: float) -> None:
        self.seconds += seconds
        self.area += seconds * value

    @property
    def mean(self) -> float:
        return self.area / self.seconds if self.seconds else 0.0


def _high_level(held: Sequence[tuple[float, float, float]], total_s: float) -> float:
    """Below it the curve is for 90 % of the time."""
    below_s = 0.0
    by_value = sorted((value, end - start) for start, end, value in held)
    for value, seconds in by_value:
        below_s += seconds
        if below_s >= 0.9 * total_s:
            return value
    return by_value[-1][0]


def _regularity(periods: Sequence[float]) -> float:
    if len(periods) < _LEAST_CYCLES:
        return 0.0
    lower, median, upper = statistics.quantiles(periods, n=4, method="inclusive")
    return max(0.0, 1.0 - (upper - lower) / median)
