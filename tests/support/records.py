"""Records of runs that never ran: the one maker of their facts, headers and steps.

:func:`made_run` makes a plain run. ``monitored`` models runs with causes put in, ``reported`` one with all that a
report shows; both say how long things take, and have the records made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dist.monitor.record import (
    Phase,
    RankHeader,
    RankRecord,
    RunFacts,
    RunRecord,
    Sample,
    Span,
    StepRecord,
    Traffic,
)

STARTED_NS = 1_700_000_000_000_000_000


def made_facts(world_size: int, **given: Any) -> RunFacts:
    """Of a run under Lightning's ddp, but for what is given."""
    usual = {"run_id": "made", "started": "2026-11-30T10:00:00+00:00", "strategy": "DDPStrategy", "config_hash": "c"}
    return RunFacts(**{**usual, "world_size": world_size, **given})


def made_header(rank: int, hosts: Sequence[str] = (), **given: Any) -> RankHeader:
    """Of a rank on a CPU.

    Args:
        rank: Which.
        hosts: Of each rank; by default, all are on one.
        **given: Other fields.
    """
    usual: dict[str, Any] = {
        "local_rank": hosts[:rank].count(hosts[rank]) if hosts else rank,
        "host": hosts[rank] if hosts else "a",
        "device": "cpu",
        "pid": 1000 + rank,
        "started_wall_ns": STARTED_NS,
        "started_ns": 0,
    }
    return RankHeader(rank=rank, **{**usual, **given})


def step_of(
    step: int,
    phases: Mapping[Phase, float | None],
    *,
    rank: int = 0,
    start_ns: int | None = None,
    duration_s: float | None = None,
    hidden_s: float = 0.0,
    size_bytes: int = 1000,
    operations: int = 2,
    **given: Any,
) -> StepRecord:
    """A step of some phases, one after another.

    Args:
        step: Its number.
        phases: What they took; communication is the exposed part, and ``None``: nobody knows.
        rank: Whose.
        start_ns: By default, one begins each tenth of a second.
        duration_s: By default, the sum of the phases.
        hidden_s: Communication that compute hides.
        size_bytes: What is communicated.
        operations: In how many.
        **given: Other fields.
    """
    exposed_s = phases.get(Phase.COMMUNICATION)
    traffic = None if exposed_s is None else Traffic(exposed_s + hidden_s, exposed_s, size_bytes, operations)
    usual: dict[str, Any] = {
        "start_ns": step * 10**8 if start_ns is None else start_ns,
        "duration_s": sum(seconds or 0.0 for seconds in phases.values()) if duration_s is None else duration_s,
        "communication": traffic,
        "samples": 8,
    }
    return StepRecord(step=step, rank=rank, phases=phases, **{**usual, **given})


def made_step(step: int, duration_s: float, *, rank: int = 0, data_wait_s: float = 0.0, **given: Any) -> StepRecord:
    """A step of data wait, exposed communication (a tenth) and forward."""
    phases: dict[Phase, float | None] = {
        Phase.DATA_WAIT: data_wait_s,
        Phase.COMMUNICATION: duration_s / 10,
        Phase.FORWARD: duration_s * 0.9 - data_wait_s,
        Phase.CHECKPOINT: 0.0,
    }
    traffic = Traffic(duration_s / 5, duration_s / 10, 1000, 2)
    usual = {"communication": traffic, "tiers": {"host": traffic}, "tokens": 800}
    return step_of(step, phases, rank=rank, duration_s=duration_s, **{**usual, **given})


def made_run(
    durations_s: Sequence[float],
    *,
    ranks: int = 2,
    facts: Mapping[str, Any] | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
    **run: Any,
) -> RunRecord:
    """A run whose steps take so long on all ranks.

    Args:
        durations_s: Of each step.
        ranks: How many, all on one host.
        facts: Of each rank's header.
        samples: Values by metric, one a second, on rank 0.
        **run: Other fields of the run's facts.
    """
    records = {}
    for rank in range(ranks):
        sampled = samples if samples is not None and rank == 0 else {}
        records[rank] = RankRecord(
            made_header(rank, facts=dict(facts or {})),
            tuple(made_step(i, seconds, rank=rank) for i, seconds in enumerate(durations_s)),
            tuple(
                Sample(metric, i, STARTED_NS + i * 10**9, value)
                for metric, values in sampled.items()
                for i, value in enumerate(values)
            ),
            (Span(0, "main", "forward", 0, 1000),),
        )
    return RunRecord(made_facts(ranks, **run), records)
