"""How busy devices are, and in which shape."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import percent
from lightning_dist.monitor.saw_tooth import saw_tooth

BUSY = 0.9  # of the time; NVML counts an interval as busy if any kernel ran in it, so below this ranks wait
SAW_TOOTH = 0.4  # of the score of a regular swing down to nothing: half as deep, or half as regular, is one still


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
    """What was sampled of it; ``None``: nothing.

    Samples are about a second apart: what goes up and down within a step is averaged out, and the phases tell it.
    """
    for metric, of_gpu in (("gpu_utilisation", True), ("cpu_utilisation", False)):
        curves = evidence.curves(metric)
        if curves:
            mean = sum(float(values.mean()) for _, values in curves) / len(curves)
            shapes = [saw_tooth(times.tolist(), values.tolist()) for times, values in curves]
            toothed = sum(shape is not None and shape.score >= SAW_TOOTH for shape in shapes)
            return Utilisation(of_gpu, mean, 2 * toothed > len(curves))
    return None
