"""Goodput: the part of a run's time that went into steps that were not done again. Pure.

After "goodput" of ML Productivity Goodput (Google Cloud, 2024), with the model's own share of a step left out: what a
step is made of is the business of the verdict.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import RankRecord, RunRecord
from lightning_dist.monitor.rounds import WholeRun, limits


@dataclass(frozen=True)
class Goodput:
    """Where a run's time went.

    Attributes:
        wall_s: From when the ranks of the first round began to train to the end of the last step, or of the last
            incident if that is later.
        useful_s: In steps that stand, with their saves and validation.
        repeated_s: In steps that a later round did again.
        steps: That stand.
        steps_lost: That were done again.
        rounds: How often ranks were started.
        incidents: How many there were.
    """

    wall_s: float
    useful_s: float
    repeated_s: float
    steps: int
    steps_lost: int
    rounds: int
    incidents: int

    @property
    def share(self) -> float | None:
        """Useful time over wall time; ``None``: there is no step."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else None

    @property
    def between_s(self) -> float:
        """In no step: failures noticed, ranks ended and started, snapshots loaded."""
        return max(0.0, self.wall_s - self.useful_s - self.repeated_s)


def goodput(run: WholeRun, *, started_s: float | None = None, ended_s: float | None = None) -> Goodput:
    """Of a run.

    A rank's file is up to a second late, so a killed rank leaves its last steps out. Steps that the next round did not
    do again have been done all the same, and so have those that an incident says were lost. They count with the median.

    Args:
        run: All of it.
        started_s: When it began, in seconds since the epoch, if more than its steps is to be counted.
        ended_s: Likewise, when it ended.
    """
    rounds = [_Round.of(record, limit) for record, limit in zip(run.rounds, limits(run.rounds), strict=True)]
    with_steps = [each for each in rounds if each.stands or each.again]
    unseen, unseen_s = 0, 0.0
    for each, following in pairwise(with_steps):
        missing = max(0, (each.limit or 0) - each.last - 1)
        unseen += missing
        unseen_s += min(missing * each.median_s, max(0.0, following.began_s - each.ended_s))
    seen_again = sum(len(each.again) for each in rounds)
    lost = max(seen_again, sum(incident.steps_lost or 0 for incident in run.incidents))
    median_s = statistics.median(seconds for each in with_steps for seconds in each.all_s) if with_steps else 0.0
    ends = [each.ended_s for each in with_steps] + [incident.time + incident.total_s for incident in run.incidents]
    began_s = min(each.began_s for each in rounds) if started_s is None else started_s
    wall_s = (max(ends, default=began_s) if ended_s is None else ended_s) - began_s
    return Goodput(
        wall_s=max(0.0, wall_s) if with_steps else 0.0,
        useful_s=sum(sum(each.stands) for each in rounds) + unseen_s,
        repeated_s=sum(sum(each.again) for each in rounds) + (lost - seen_again) * median_s,
        steps=sum(len(each.stands) for each in rounds) + unseen,
        steps_lost=lost,
        rounds=len(run.rounds),
        incidents=len(run.incidents),
    )


def between(incidents: Sequence[Incident]) -> dict[str, float]:
    """Seconds of all incidents by phase, in the order in which they come."""
    found: dict[str, float] = {}
    for incident in incidents:
        for phase, seconds in incident.seconds.items():
            found[phase] = found.get(phase, 0.0) + seconds
    return found


@dataclass(frozen=True)
class _Round:
    """A round as the rank saw it that recorded most of it; all ranks of a round step together."""

    began_s: float
    ended_s: float
    last: int
    limit: int | None
    stands: tuple[float, ...]  # seconds of each step
    again: tuple[float, ...]

    @classmethod
    def of(cls, record: RunRecord, limit: int | None) -> _Round:
        rank = _fullest(record)
        began_s = min((each.header.started_wall_ns for each in record.ranks.values()), default=0) / 1e9
        if rank is None:
            return cls(began_s, began_s, -1, limit, (), ())
        stands = tuple(step.duration_s for step in rank.steps if limit is None or step.step < limit)
        again = tuple(step.duration_s for step in rank.steps if limit is not None and step.step >= limit)
        ended_s = max(rank.header.wall_ns(step.end_ns) for step in rank.steps) / 1e9
        return cls(began_s, ended_s, max(step.step for step in rank.steps), limit, stands, again)

    @property
    def all_s(self) -> tuple[float, ...]:
        return (*self.stands, *self.again)

    @property
    def median_s(self) -> float:
        return statistics.median(self.all_s)


def _fullest(record: RunRecord) -> RankRecord | None:
    ranks = [rank for _, rank in sorted(record.ranks.items()) if rank.steps]
    return max(ranks, key=lambda rank: len(rank.steps), default=None)
