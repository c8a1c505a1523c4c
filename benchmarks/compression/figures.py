"""What the figures of the comparisons are: pure functions of what ranks saw."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compression.training import Trained

SMOOTHED = 30
"""Steps over which the loss is averaged, before it is compared with the one that is to be reached."""


def step_s(ranks: Sequence[Trained], *, after: int, period: int = 1) -> float:
    """Seconds of a step, of the slowest rank: the median over periods of so many steps.

    Args:
        ranks: What each saw.
        after: Steps that are not counted.
        period: Steps that belong together, as some synchronise only every so often.
    """
    ends = [rank.ends_s[after - 1 :: period] for rank in ranks]
    lengths = [[late - early for early, late in itertools.pairwise(each)] for each in ends]
    return statistics.median(max(each) for each in zip(*lengths, strict=True)) / period


def bytes_a_step(ranks: Sequence[Trained], *, after: int) -> float:
    """What the host that sent most has sent in a step, mean of those counted."""
    return max((rank.sent[-1] - rank.sent[after - 1]) / (len(rank.sent) - after) for rank in ranks)


def mean_losses(ranks: Sequence[Trained]) -> list[float]:
    """The loss of each step, over the ranks."""
    return [statistics.fmean(each) for each in zip(*(rank.losses for rank in ranks), strict=True)]


def steps_to(losses: Sequence[float], level: float, window: int = SMOOTHED) -> float:
    """Steps until the mean of the last ``window`` losses is first no higher than a level; infinite: it never is."""
    for end in range(window, len(losses) + 1):
        if statistics.fmean(losses[end - window : end]) <= level:
            return end
    return math.inf


def paired(rounds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, Any]]:
    """Of each arm the median, and how many times less it is than the base: median of the rounds' ratios, and ends."""
    rows: dict[str, dict[str, Any]] = {}
    for arm, values in rounds.items():
        ratios = [first / own for first, own in zip(rounds[base], values, strict=True)]
        rows[arm] = {
            "median": statistics.median(values),
            "all": list(values),
            "times_less": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }
    return rows


def seconds_to(steps: float, *, step: float, exact_steps: int = 0, exact_step: float = 0.0) -> float:
    """Time of so many steps, of which the first ones are exact and take another time each."""
    first = min(steps, exact_steps)
    return first * exact_step + (steps - first) * step
