"""What steps were made of in the course of a run: the mean of all ranks, stretch by stretch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dist.monitor.record import Phase, RunRecord
from lightning_dist.monitor.report.extremes import stretches_of

STRETCHES = 300


@dataclass(frozen=True)
class Stretch:
    """Some steps in a row.

    Attributes:
        first: The first step.
        last: The last.
        at_s: End of its last step, in seconds after the run's start.
        phases: Mean seconds of each phase; what is not known is not there.
    """

    first: int
    last: int
    at_s: float
    phases: Mapping[Phase, float]


def course(record: RunRecord) -> list[Stretch]:
    """All steps, in at most :data:`STRETCHES` stretches of as many steps each."""
    start_ns = min((rank.header.started_wall_ns for rank in record.ranks.values()), default=0)
    sums: dict[int, dict[Phase, float]] = {}
    counts: dict[int, int] = {}
    ends: dict[int, float] = {}
    for rank in record.ranks.values():
        for step in rank.steps:
            of_step = sums.setdefault(step.step, {})
            counts[step.step] = counts.get(step.step, 0) + 1
            end_s = (rank.header.wall_ns(step.end_ns) - start_ns) / 1e9
            ends[step.step] = max(end_s, ends.get(step.step, end_s))
            for phase, seconds in step.phases.items():
                if seconds is not None:
                    of_step[phase] = of_step.get(phase, 0.0) + seconds
    steps = sorted(sums)
    found = []
    for first, end in stretches_of(len(steps), STRETCHES):
        inside = steps[first:end]
        count = sum(counts[step] for step in inside)
        means = {
            phase: sum(sums[step].get(phase, 0.0) for step in inside) / count
            for phase in Phase
            if any(phase in sums[step] for step in inside)
        }
        found.append(Stretch(inside[0], inside[-1], ends[inside[-1]], means))
    return found
