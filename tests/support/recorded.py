"""Runs as a monitor would have recorded them, made up."""

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


def made_step(step: int, duration_s: float, *, rank: int = 0, data_wait_s: float = 0.0, **values: Any) -> StepRecord:
    """A step of data wait, exposed communication (a tenth) and forward."""
    phases = {
        Phase.DATA_WAIT: data_wait_s,
        Phase.COMMUNICATION: duration_s / 10,
        Phase.FORWARD: duration_s * 0.9 - data_wait_s,
        Phase.CHECKPOINT: 0.0,
    }
    traffic = Traffic(duration_s / 5, duration_s / 10, 1000, 2)
    given = {"communication": traffic, "tiers": {"host": traffic}, "samples": 8, "tokens": 800} | values
    return StepRecord(step, rank, step * 10**8, duration_s, phases, **given)


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
    given = {"run_id": "made", "started": "2026-11-30T10:00:00+00:00", "strategy": "DDPStrategy", "config_hash": "c"}
    records = {}
    for rank in range(ranks):
        header = RankHeader(rank, rank, "a", "cpu", 1, STARTED_NS, 0, facts=dict(facts or {}))
        sampled = samples if samples is not None and rank == 0 else {}
        records[rank] = RankRecord(
            header,
            tuple(made_step(i, seconds, rank=rank) for i, seconds in enumerate(durations_s)),
            tuple(
                Sample(metric, i, STARTED_NS + i * 10**9, value)
                for metric, values in sampled.items()
                for i, value in enumerate(values)
            ),
            (Span(0, "main", "forward", 0, 1000),),
        )
    return RunRecord(RunFacts(**{**given, "world_size": ranks, **run}), records)


def scraped(url: str) -> dict[str, float]:
    """Figures of a Prometheus endpoint: ``name{labels}`` -> value."""
    import urllib.request

    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
