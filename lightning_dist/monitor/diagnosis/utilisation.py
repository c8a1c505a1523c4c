"""How busy devices are, and in which shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.window import Floats
from lightning_dist.monitor.diagnosis.wording import percent

BUSY = 0.9  # of the time; NVML counts an interval as busy if any kernel ran in it, so below this ranks wait
SWING = 0.4  # between the low and the high values, as a share of full use
CROSSINGS = 0.2  # of the samples: a saw-tooth goes up or down at least every fifth
FEWEST = 10  # samples, below which a shape is not told


@dataclass(frozen=True)
class Utilisation:
    """Of the devices that compute.

    Attributes:
        of_gpu: Else of a core by the rank.
        mean: Between 0 and 1; CPU ranks with several threads exceed it.
        is_saw_tooth: Whether it goes up and down between busy and idle.
    """

    of_gpu: bool
    mean: float
    is_saw_tooth: bool

    @property
    def is_busy(self) -> bool:
        """Whether devices have work nearly all the time."""
        return self.mean >= BUSY and not self.is_saw_tooth

    @property
    def sentence(self) -> str:
        """For people."""
        shape = ", in a saw-tooth between busy and idle" if self.is_saw_tooth else ""
        what = "GPU utilisation" if self.of_gpu else "CPU utilisation of a rank (there is no GPU)"
        return f"{what} is {percent(self.mean)} on average{shape}."


def utilisation_of(evidence: Evidence) -> Utilisation | None:
    """What was sampled of it; ``None``: nothing."""
    for metric, of_gpu in (("gpu_utilisation", True), ("cpu_utilisation", False)):
        series = evidence.series(metric)
        if series:
            mean = float(np.mean([values.mean() for values in series.values()]))
            toothed = sum(is_saw_tooth(values) for values in series.values())
            return Utilisation(of_gpu, mean, 2 * toothed > len(series))
    return None


def is_saw_tooth(values: Floats) -> bool:
    """Whether utilisation goes to and fro between two levels, often.

    The levels are the 10th and 90th percentile; the shape is a saw-tooth if they lie :data:`SWING` apart and the series
    crosses their middle in at least :data:`CROSSINGS` of its samples. Samples are about a second apart: what goes up
    and down within a step is averaged out, and the phases tell it.
    """
    if len(values) < FEWEST:
        return False
    low, high = (float(level) for level in np.percentile(values, (10, 90)))
    above = values > (low + high) / 2
    return high - low >= SWING and float(np.mean(above[1:] != above[:-1])) >= CROSSINGS
