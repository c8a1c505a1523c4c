"""Independent values from a series whose neighbours are alike: one a block.

Steps are autocorrelated (a slow second slows many of them), and a test that takes them for independent finds a
difference between any two runs. Blocks that are long against the series' memory are nearly independent, so that their
medians may be tested as if they were: Carlstein, "The use of subseries values for estimating the variance of a general
statistic from a stationary sequence", Annals of Statistics 1986.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS_AT_MOST = 64  # as many as a record keeps
TIMES_MEMORY = 4  # a block's length over the autocorrelation time: neighbours then correlate by about 0.06
_WINDOW = 5  # Sokal's c
_VALUES_AT_MOST = 5000  # the autocorrelation of more is estimated on the last ones


@dataclass(frozen=True)
class Blocks:
    """A series in blocks of the same length; what does not fill one, at the beginning, is left out.

    Attributes:
        length: Values a block.
        values: One a block, in order.
    """

    length: int
    values: tuple[float, ...]


def in_blocks(values: Sequence[float], *, of_means: bool = False) -> Blocks:
    """Cut a series into blocks long enough to be independent, and take each one's median.

    Args:
        values: In order of time.
        of_means: Take means instead: for what comes in bursts, so that most values may be 0.
    """
    if not values:
        return Blocks(1, ())
    length = max(math.ceil(TIMES_MEMORY * autocorrelation_time(values)), math.ceil(len(values) / BLOCKS_AT_MOST))
    start = len(values) % length
    middle = statistics.fmean if of_means else statistics.median
    return Blocks(length, tuple(middle(values[i : i + length]) for i in range(start, len(values), length)))


def autocorrelation_time(values: Sequence[float]) -> float:
    """How many values tell as much as one independent value: 1 + 2 sum of the autocorrelations; 1 for white noise.

    Of the values' ranks, so that a few huge ones do not hide the rest. The sum ends at the first lag beyond five times
    its result: Sokal, "Monte Carlo methods in statistical mechanics: foundations and new algorithms", 1997. No less
    than 1: alternating values would give less, and are not to be trusted to go on.
    """
    ranks = np.asarray(average_ranks(values[-_VALUES_AT_MOST:]))
    count = len(ranks)
    centred = ranks - (count + 1) / 2
    if count < 4 or not centred.any():
        return 1.0
    spectrum = np.fft.rfft(centred, 2 * count)
    covariances = np.fft.irfft(np.abs(spectrum) ** 2)[: count // 2]
    times = 1 + 2 * np.cumsum(covariances[1:]) / covariances[0]
    ends = np.arange(1, len(times) + 1) >= _WINDOW * times
    end = int(ends.argmax()) if ends.any() else len(times) - 1
    return max(float(times[end]), 1.0)


def average_ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in order of size, from 1; equal ones share the mean of their places."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + end + 1) / 2
        start = end
    return ranks
