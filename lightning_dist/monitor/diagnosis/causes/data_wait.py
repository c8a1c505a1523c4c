"""What shows that ranks wait for data, whatever is behind it."""

from __future__ import annotations

import numpy as np

from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.utilisation import utilisation_of
from lightning_dist.monitor.diagnosis.window import Floats
from lightning_dist.monitor.diagnosis.wording import seconds
from lightning_dist.monitor.record import Phase

MOSTLY = 0.5  # of the wait: moving batches to the device then is the cause
RARE = 0.25  # median over mean: below, few steps wait long and most do not


def wait_s(evidence: Evidence) -> Floats:
    """What batches cost each step: waiting for them and moving them to the device."""
    return evidence.without_stragglers_s(Phase.DATA_WAIT, Phase.HOST_TO_DEVICE)


def move_dominates(evidence: Evidence) -> bool:
    """Whether most of it is the move."""
    move = float(evidence.cost_s(Phase.HOST_TO_DEVICE).sum())
    return move > MOSTLY * (move + float(evidence.cost_s(Phase.DATA_WAIT).sum()))


def sentences(evidence: Evidence) -> tuple[str, ...]:
    """For people."""
    lines = []
    used = utilisation_of(evidence)
    if used is not None:
        lines.append(used.sentence)
    waits = evidence.cost_s(Phase.DATA_WAIT)
    mean_s, median_s = float(waits.mean()), float(np.median(waits))
    lines.append(f"Data wait is {seconds(mean_s)} a step on average, {seconds(median_s)} in the median step.")
    if median_s < RARE * mean_s:
        lines.append("Few steps wait long and most hardly: batches come in bursts, as at the start of an epoch.")
    if move_dominates(evidence):
        lines.append(f"Batches take {seconds(float(evidence.cost_s(Phase.HOST_TO_DEVICE).mean()))} to the device.")
    return tuple(lines)


def directness(evidence: Evidence) -> float:
    """A measured wait is direct evidence; a GPU that is busy all along speaks against it."""
    used = utilisation_of(evidence)
    return 0.6 if used is not None and used.of_gpu and used.is_busy else 0.95
