"""What a step is made of on average: of each rank, seconds of each phase and of communication."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dist.monitor.record import Phase, RankHeader, RankRecord, RunRecord, StepRecord, Traffic

_WARM_UP = 5  # steps at most: memory is allocated, files are opened, kernels are chosen


@dataclass(frozen=True)
class Breakdown:
    """Of one rank.

    Attributes:
        header: Whose.
        steps: How many it is the mean of.
        step_s: Mean step.
        phases: Seconds of each phase in it. ``None``: not known, in no step.
        communication: Mean of all tiers together; ``None``: unavailable.
        tiers: Mean of each tier.
    """

    header: RankHeader
    steps: int
    step_s: float
    phases: Mapping[Phase, float | None]
    communication: Traffic | None = None
    tiers: Mapping[str, Traffic] = field(default_factory=dict)

    def share(self, phase: Phase) -> float | None:
        """The part of the step that is spent in a phase."""
        seconds = self.phases.get(phase)
        return None if seconds is None or self.step_s <= 0 else seconds / self.step_s


def settled(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """All but the first, which are slower than what follows: a fifth of them, at most five."""
    return steps[min(_WARM_UP, len(steps) // 5) :]


def breakdown(rank: RankRecord) -> Breakdown | None:
    """The mean of a rank's settled steps; ``None`` if it has none."""
    steps = settled(rank.steps)
    if not steps:
        return None
    tiers = dict.fromkeys(name for step in steps for name in step.tiers)
    return Breakdown(
        header=rank.header,
        steps=len(steps),
        step_s=statistics.fmean(step.duration_s for step in steps),
        phases={phase: _mean(step.phases.get(phase) for step in steps) for phase in Phase},
        communication=_mean_traffic([step.communication for step in steps if step.communication is not None]),
        tiers={
            name: traffic
            for name in tiers
            if (traffic := _mean_traffic([step.tiers[name] for step in steps if name in step.tiers])) is not None
        },
    )


def breakdowns(record: RunRecord) -> list[Breakdown]:
    """Of all ranks that have steps, in order."""
    found = (breakdown(rank) for _, rank in sorted(record.ranks.items()))
    return [each for each in found if each is not None]


def mean_of(ranks: Sequence[Breakdown]) -> Mapping[Phase, float | None]:
    """Seconds of each phase, mean over ranks."""
    return {phase: _mean(rank.phases.get(phase) for rank in ranks) for phase in Phase}


def apart(ranks: Sequence[Breakdown], *, at_most: int, always: Iterable[int] = ()) -> list[Breakdown]:
    """Which ranks to show of many.

    Those of ``always``, of each phase the ones that spend least and most in it, and of the others as many as there is
    room for, evenly.
    """
    if len(ranks) <= at_most:
        return list(ranks)
    by_rank = {rank.header.rank: rank for rank in ranks}
    chosen = dict.fromkeys(rank for rank in always if rank in by_rank)
    for phase in Phase:
        known = [(seconds, rank) for rank, each in by_rank.items() if (seconds := each.phases.get(phase)) is not None]
        if known:
            chosen.update(dict.fromkeys((max(known)[1], min(known)[1])))
    left = [rank for rank in by_rank if rank not in chosen]
    chosen = dict.fromkeys(list(chosen)[:at_most])
    room = at_most - len(chosen)
    chosen.update(dict.fromkeys(left[number * len(left) // room] for number in range(room)))
    return [by_rank[rank] for rank in sorted(chosen)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_traffic(all_of: Sequence[Traffic]) -> Traffic | None:
    if not all_of:
        return None
    sizes = [traffic.size_bytes for traffic in all_of if traffic.size_bytes is not None]
    return Traffic(
        total_s=statistics.fmean(traffic.total_s for traffic in all_of),
        exposed_s=statistics.fmean(traffic.exposed_s for traffic in all_of),
        size_bytes=round(statistics.fmean(sizes)) if sizes else None,
        operations=round(statistics.fmean(traffic.operations for traffic in all_of)),
    )
