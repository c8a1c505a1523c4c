"""A run whose ranks were started several times: its rounds, each with a record of its own, and what lay between. Pure.

A round ends when a rank or a host fails, or when one comes back; the next goes on from the newest snapshot. Steps after
that snapshot are done again, and what counts is how they went the last time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import RankHeader, RankRecord, RunRecord


@dataclass(frozen=True)
class WholeRun:
    """All rounds of a run.

    Attributes:
        rounds: In order of time; at least one.
        incidents: What ended each, and what it cost; none where no agent has recorded any.
        problems: What could not be read of it, a sentence each.
    """

    rounds: tuple[RunRecord, ...]
    incidents: tuple[Incident, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def main(self) -> RunRecord:
        """The round with the most steps, of those that are alike the newest; under the run's own name and start.

        What bounds a step is judged in one round: ranks and hosts are others in the next.
        """
        longest = max(reversed(self.rounds), key=num_steps)
        first = self.rounds[0].facts
        return dataclasses.replace(
            longest,
            facts=dataclasses.replace(longest.facts, run_id=first.run_id, started=first.started),
            problems=(*longest.problems, *self.problems),
        )

    @cached_property
    def joined(self) -> RunRecord:
        """One record of all rounds: each step as it went the last time, on one clock."""
        main = self.main
        if len(self.rounds) == 1:
            return main
        parts: dict[int, list[RankRecord]] = {}
        for record, limit in zip(self.rounds, limits(self.rounds), strict=True):
            for number, rank in record.ranks.items():
                parts.setdefault(number, []).append(_below(rank, limit))
        problems = dict.fromkeys(problem for record in (*self.rounds, main) for problem in record.problems)
        return dataclasses.replace(
            main,
            ranks={number: _one_after_another(rank) for number, rank in sorted(parts.items())},
            problems=tuple(problems),
        )


def num_steps(record: RunRecord) -> int:
    """Steps that were recorded; of ranks that do not agree, those of the one that has most."""
    return max((len(rank.steps) for rank in record.ranks.values()), default=0)


def first_step(record: RunRecord) -> int | None:
    """The step that a round began with; ``None``: it did none."""
    return min((step.step for rank in record.ranks.values() for step in rank.steps), default=None)


def limits(rounds: Sequence[RunRecord]) -> tuple[int | None, ...]:
    """Of each round the step from which on a later round did its steps again; ``None``: none did."""
    found: list[int | None] = []
    limit: int | None = None
    for record in reversed(rounds):
        found.append(limit)
        begins = first_step(record)
        limit = begins if limit is None else limit if begins is None else min(limit, begins)
    return tuple(reversed(found))


def _below(rank: RankRecord, limit: int | None) -> RankRecord:
    if limit is None:
        return rank
    return dataclasses.replace(
        rank,
        steps=tuple(step for step in rank.steps if step.step < limit),
        samples=tuple(sample for sample in rank.samples if sample.step < limit),
        spans=tuple(span for span in rank.spans if span.step < limit),
    )


def _one_after_another(parts: Sequence[RankRecord]) -> RankRecord:
    """A rank of several rounds, under its last name and on the clock of its first."""
    first, last = parts[0].header, parts[-1].header
    header = dataclasses.replace(last, started_wall_ns=first.started_wall_ns, started_ns=first.started_ns)
    moved = [_moved(part, _offset_ns(part.header, header)) for part in parts]
    return RankRecord(
        header,
        tuple(step for part in moved for step in part.steps),
        tuple(sample for part in moved for sample in part.samples),
        tuple(span for part in moved for span in part.spans),
    )


def _offset_ns(of: RankHeader, on: RankHeader) -> int:
    """What makes a moment of one's monotonic clock one of the other's, as the time of day has it."""
    return of.wall_ns(0) - on.wall_ns(0)


def _moved(rank: RankRecord, by_ns: int) -> RankRecord:
    if by_ns == 0:
        return rank
    return dataclasses.replace(
        rank,
        steps=tuple(dataclasses.replace(step, start_ns=step.start_ns + by_ns) for step in rank.steps),
        spans=tuple(span._replace(start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns) for span in rank.spans),
    )


def in_order(rounds: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """By number; of equal ones by when their ranks began."""
    return tuple(sorted(rounds, key=lambda record: (record.facts.round, _began_ns(record))))


def _began_ns(record: RunRecord) -> int:
    return min((rank.header.started_wall_ns for rank in record.ranks.values()), default=0)
