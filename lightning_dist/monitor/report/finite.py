"""A record without what no picture can show: numbers that are not finite, which broken clocks leave."""

from __future__ import annotations

import dataclasses
import math

from lightning_dist.monitor.record import RankRecord, RunRecord, StepRecord, Traffic


def finite(record: RunRecord) -> RunRecord:
    """The same run; steps and samples that are not finite are left out, phases that are not are unknown."""
    return dataclasses.replace(record, ranks={number: _rank(rank) for number, rank in record.ranks.items()})


def _rank(rank: RankRecord) -> RankRecord:
    return dataclasses.replace(
        rank,
        steps=tuple(_step(step) for step in rank.steps if math.isfinite(step.duration_s) and step.duration_s >= 0),
        samples=tuple(sample for sample in rank.samples if math.isfinite(sample.value)),
    )


def _step(step: StepRecord) -> StepRecord:
    communication = step.communication if step.communication is not None and _sound(step.communication) else None
    tiers = {name: traffic for name, traffic in step.tiers.items() if _sound(traffic)}
    known = {phase: seconds for phase, seconds in step.phases.items() if seconds is None or math.isfinite(seconds)}
    if communication is step.communication and len(tiers) == len(step.tiers) and len(known) == len(step.phases):
        return step
    return dataclasses.replace(step, phases=known, communication=communication, tiers=tiers)


def _sound(traffic: Traffic) -> bool:
    return math.isfinite(traffic.total_s) and math.isfinite(traffic.exposed_s)
