"""How sure a mean is, when neighbouring steps resemble each other: pure."""

from __future__ import annotations

import math

import numpy as np

from lightning_dist.monitor.diagnosis.window import Floats

BLOCKS = 5  # few, so that each holds enough steps for what comes every few steps; more would see less correlation


def block_error(values: Floats) -> float:
    """Standard error of the mean of a series, from the means of blocks of it.

    Steps are correlated, so the error that their number suggests is too small; means of long blocks hardly are: the
    method of batch means (Law and Carson, "A sequential procedure for determining the length of a steady-state
    simulation", Operations Research 1979).
    """
    count = min(BLOCKS, len(values))
    if count < 2:
        return 0.0
    means = np.array([block.mean() for block in np.array_split(values, count)])
    return float(means.std(ddof=1)) / math.sqrt(count)


def chance_above(value: float, threshold: float, error: float) -> float:
    """How likely a measured value is truly above a threshold, its error being normally distributed."""
    if error <= 0:
        return 1.0 if value >= threshold else 0.0
    return 0.5 * (1 + math.erf((value - threshold) / (error * math.sqrt(2))))
