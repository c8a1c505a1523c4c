"""Since when a series is higher: pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dist.monitor.diagnosis.window import Floats

MIN_SIDE = 5  # values on either side; fewer say nothing of a level
SIGNIFICANT = 5.0  # standard errors between the levels: the best of all splits of pure noise rarely exceeds 4


@dataclass(frozen=True)
class Shift:
    """A lasting change of level.

    Attributes:
        index: First value at the later level.
        before: Mean until then.
        after: Mean from then on.
    """

    index: int
    before: float
    after: float


def shift_of(values: Floats) -> Shift | None:
    """The one change of level that explains a series best; ``None`` if its levels do not differ beyond noise.

    Each split into two parts is tried, and the one that leaves the least squares is taken (binary segmentation's first
    step: Scott and Knott, "A cluster analysis method for grouping means in the analysis of variance", Biometrics 1974).
    Values beyond the 5th and 95th percentile count as those, so that single outliers make no change.
    """
    count = len(values)
    if count < 2 * MIN_SIDE or not np.isfinite(values).all():
        return None
    clipped = np.clip(values, *np.percentile(values, (5, 95)))
    left = np.arange(MIN_SIDE, count - MIN_SIDE + 1)
    sums = np.cumsum(clipped)
    before = sums[left - 1] / left
    after = (sums[-1] - sums[left - 1]) / (count - left)
    gain = left * (count - left) / count * (after - before) ** 2
    best = int(np.argmax(gain))
    split = int(left[best])
    rest = np.concatenate([clipped[:split] - before[best], clipped[split:] - after[best]])
    error = float(np.sqrt((rest**2).sum() / max(count - 2, 1) * (1 / split + 1 / (count - split))))
    difference = float(after[best] - before[best])
    if difference == 0 or abs(difference) < SIGNIFICANT * error:
        return None
    return Shift(split, float(values[:split].mean()), float(values[split:].mean()))


def without_shift(values: Floats) -> Floats:
    """A series as if it had stayed at the level of its start: what is left is noise."""
    shift = shift_of(values)
    if shift is None:
        return values
    step = np.where(np.arange(len(values)) >= shift.index, shift.after - shift.before, 0.0)
    return np.asarray(values - step, dtype=np.float64)
