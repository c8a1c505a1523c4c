"""A run whose ranks were started several times, and that never ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import Phase, RankRecord, RunRecord, Sample, Span
from tests.support.records import STARTED_NS, made_facts, made_header, step_of


def made_round(
    number: int,
    steps: Sequence[int],
    *,
    at_s: float,
    step_s: float = 1.0,
    ranks: int = 2,
    run: str = "run",
    begins_s: float = 0.0,
) -> RunRecord:
    """One round: these steps, one after another.

    Args:
        number: Of the round.
        steps: Their numbers.
        at_s: When its ranks began, in seconds after the run.
        step_s: What each step takes.
        ranks: How many there are.
        run: What the launcher calls it.
        begins_s: From when its ranks began to its first step.
    """
    records = {}
    for rank in range(ranks):
        # Each process has a monotonic clock of its own.
        base_ns = 10**9 * (1000 * number + rank)
        header = made_header(rank, started_wall_ns=STARTED_NS + round(at_s * 1e9), started_ns=base_ns, pid=10 * number)
        starts = [base_ns + round((begins_s + index * step_s) * 1e9) for index in range(len(steps))]
        records[rank] = RankRecord(
            header,
            tuple(
                step_of(step, {Phase.FORWARD: step_s}, rank=rank, start_ns=start)
                for step, start in zip(steps, starts, strict=True)
            ),
            tuple(
                Sample("memory", step, header.wall_ns(start), float(number))
                for step, start in zip(steps, starts, strict=True)
            ),
            tuple(
                Span(step, "main", "forward", start, start + round(step_s * 1e9))
                for step, start in zip(steps, starts, strict=True)
            ),
        )
    facts = made_facts(ranks, run_id=f"{run or 'id'}{number}", started=f"2026-11-30T10:00:{number:02d}+00:00", run=run)
    return RunRecord(replace(facts, round=number), records)


KILLED = Incident(
    number=1,
    what="signal",
    who="rank 1 on host-b",
    detail="killed by SIGKILL <b>",
    time=STARTED_NS / 1e9 + 10.0,
    action="degraded",
    seconds={"detect": 0.1, "stop": 0.4, "regroup": 0.5, "start": 1.0, "load": 0.5, "first_step": 1.5},
    step_before=9,
    step_after=7,
    ranks_before=2,
    ranks_after=1,
    lost_ranks=(1,),
    blamed_host="host-b",
    run="run",
)
