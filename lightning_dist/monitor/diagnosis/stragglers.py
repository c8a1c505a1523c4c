"""Which ranks the others wait for, in which phase, since when: pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dist.monitor.diagnosis.changes import shift_of, without_shift
from lightning_dist.monitor.diagnosis.noise import block_error
from lightning_dist.monitor.diagnosis.window import WAITING, Floats, Window
from lightning_dist.monitor.record import Phase

# One rank does these for all, by design: that it is alone with them makes it no straggler.
ALONE = (Phase.CHECKPOINT, Phase.LOGGING, Phase.VALIDATION)

LEAST_SHARE = 0.03  # of a step; ranks always differ by a little
# By which a lag must exceed what it varies by: Student's t of 4 degrees of freedom (blocks less one) exceeds 4 in 1 %.
STANDARD_ERRORS = 4.0
ALIKE = 0.5  # of the largest lag: ranks that lag by as much are stragglers too
CLIPPED = 90  # percentile: what a rank lags in fewer than a tenth of the steps is an accident


@dataclass(frozen=True, eq=False)
class Stragglers:
    """Ranks that are slower than the others, all along or since some step.

    Attributes:
        ranks: Which.
        rows: Theirs in the window.
        phase: In which they lose most of it; ``None``: no phase tells.
        lag_s: By how much longer they work for a step than the others do, on average.
        cost_s: What each step would take less if they were as fast as the slowest of the others.
        since_step: From when on; ``None``: from the start.
        lag_since_s: As ``lag_s``, from then on.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    phase: Phase | None
    lag_s: float
    cost_s: Floats
    since_step: int | None
    lag_since_s: float


def stragglers_of(window: Window) -> Stragglers | None:
    """The stragglers of a run; ``None``: there are none, or nobody could be seen waiting.

    A rank's lag in a step is its own time (what it neither waited nor did for all) less the median rank's. Noise puts
    every rank behind now and then and averages out; a straggler is behind the median rank on average, beyond what its
    lag varies by.
    """
    if len(window.ranks) < 2 or Phase.COMMUNICATION not in window.phases:
        return None
    own_s = window.own_s - sum((window.phases[phase] for phase in ALONE if phase in window.phases), start=0.0)
    lag = own_s - _lower_median(own_s)
    lag = np.minimum(lag, np.percentile(lag, CLIPPED, axis=1, keepdims=True))
    mean = lag.mean(axis=1)
    mean = mean - _lower_median(mean)
    scatter = 1.4826 * float(np.median(np.abs(mean - np.median(mean)))) if len(mean) > 4 else 0.0
    floor = max(LEAST_SHARE * float(window.step_s.mean()), STANDARD_ERRORS * scatter)
    first = int(np.argmax(mean))
    behind = own_s[first] - _lower_median(np.delete(own_s, first, axis=0))
    behind = np.clip(behind, *np.percentile(behind, (100 - CLIPPED, CLIPPED)))
    if mean[first] < max(floor, STANDARD_ERRORS * block_error(without_shift(behind))):
        return None
    rows = [int(row) for row in np.flatnonzero(mean >= max(ALIKE * mean[first], floor))]
    others = np.delete(own_s, rows, axis=0)
    cost_s = np.maximum(own_s[rows].max(axis=0) - others.max(axis=0), 0.0)
    series = lag[rows].mean(axis=0)
    shift = shift_of(series)
    rises = shift is not None and shift.after > 2 * max(shift.before, 0.0)
    return Stragglers(
        ranks=tuple(window.ranks[row] for row in rows),
        rows=tuple(rows),
        phase=_phase(window, rows),
        lag_s=float(mean[rows].mean()),
        cost_s=cost_s,
        since_step=window.steps[shift.index] if shift is not None and rises else None,
        lag_since_s=shift.after if shift is not None and rises else float(mean[rows].mean()),
    )


def _phase(window: Window, rows: list[int]) -> Phase | None:
    """The phase in which these ranks exceed the median rank most."""
    excess = {
        phase: float((table[rows] - _lower_median(table)).mean())
        for phase, table in window.phases.items()
        if phase not in (*WAITING, *ALONE)
    }
    most = max(excess, key=lambda phase: excess[phase], default=None)
    return most if most is not None and excess[most] > 0 else None


def _lower_median(values: Floats) -> Floats:
    """The median over ranks; of two in the middle the lower one, so that one slow rank of two is seen."""
    middle = (values.shape[0] - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle], dtype=np.float64)
