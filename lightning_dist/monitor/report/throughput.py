"""How much a run gets done: samples, tokens and bytes a second of all ranks, and the use of their peak."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from lightning_dist.monitor.record import RankRecord, RunFacts, RunRecord, StepRecord
from lightning_dist.monitor.report.breakdown import settled

REPLICA = "data_parallel_rank"  # a fact of a rank: those with the same number read the same samples


@dataclass(frozen=True)
class Throughput:
    """Of a whole run; ``None`` is unknown.

    Attributes:
        step_s: Median step, over ranks and steps.
        samples_per_s: Of all ranks together.
        tokens_per_s: Likewise.
        bytes_per_s: Of the tensors of batches.
        mfu: Model FLOP utilisation: what the model needs of what the devices can do (Chowdhery et al. 2022, PaLM).
        why_no_mfu: What is missing for it.
    """

    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    bytes_per_s: float | None
    mfu: float | None
    why_no_mfu: str | None


def throughput(record: RunRecord) -> Throughput:
    """Over the settled steps.

    Ranks of one pipeline, and those that share each layer, read the same samples; they count once.
    """
    durations = [step.duration_s for rank in record.ranks.values() for step in settled(rank.steps)]
    finite = [duration for duration in durations if math.isfinite(duration)]
    replicas = {str(rank.header.facts.get(REPLICA, f"rank {number}")): rank for number, rank in record.ranks.items()}
    readers = list(replicas.values())
    samples_per_s = _rate(readers, lambda step: step.samples)
    mfu, why = _mfu(record.facts, samples_per_s)
    return Throughput(
        step_s=statistics.median(finite) if finite else None,
        samples_per_s=samples_per_s,
        tokens_per_s=_rate(readers, lambda step: step.tokens),
        bytes_per_s=_rate(readers, lambda step: step.batch_bytes),
        mfu=mfu,
        why_no_mfu=why,
    )


def _rate(ranks: list[RankRecord], count: Callable[[StepRecord], int | None]) -> float | None:
    """The sum of what each rank gets done a second; ``None`` if one does not know."""
    total = 0.0
    for rank in ranks:
        steps = settled(rank.steps)
        counts = [counted for step in steps if (counted := count(step)) is not None]
        seconds = sum(step.duration_s for step in steps)
        if len(counts) < len(steps) or not counts or not (math.isfinite(seconds) and seconds > 0):
            return None
        total += sum(counts) / seconds
    return total if ranks else None


def _mfu(facts: RunFacts, samples_per_s: float | None) -> tuple[float | None, str | None]:
    if not facts.peak_flops:
        return None, "the peak of the device is not known"
    if not facts.flops_per_sample:
        return None, "the floating point operations of the model are not known"
    if samples_per_s is None:
        return None, "samples were not counted"
    return samples_per_s * facts.flops_per_sample / (facts.peak_flops * facts.world_size), None
