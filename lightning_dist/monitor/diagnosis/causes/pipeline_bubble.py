"""Stages wait for each other."""

from __future__ import annotations

import math

from lightning_dist.config.pipeline import ONE_STAGE, SPLIT_BACKWARD, for_batch
from lightning_dist.laws import pipeline_bubble
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import percent, seconds
from lightning_dist.monitor.record import Phase

IDLING_LESS = ("zbv", "interleaved_zero_bubble")  # schedules that fill the bubble with the second half of backward
BEYOND = 1.3  # times what the schedule says: something else idles stages too


def claim(evidence: Evidence) -> Claim | None:
    """What stages idle that set the pace."""
    if Phase.PIPELINE_IDLE not in evidence.window.phases:
        return None
    cost_s = evidence.cost_s(Phase.PIPELINE_IDLE)
    if cost_s.sum() <= 0:
        return None
    idle = evidence.window.share(cost_s)
    lines = [f"A stage waits {seconds(float(cost_s.mean()))} a step for its neighbours."]
    size = evidence.whole_option("parallel.pipeline.size")
    count = evidence.whole_option("parallel.pipeline.micro_batches")
    by_schedule = None
    schedule = evidence.option("parallel.pipeline.schedule")
    samples = _samples(evidence)
    if size is not None and count is not None and samples is not None:
        count = for_batch(str(schedule), size, count, samples)[1]
    virtual = evidence.whole_option("parallel.pipeline.virtual_stages") or (1 if schedule in (None, *ONE_STAGE) else 2)
    if size is not None and count is not None:
        by_schedule = pipeline_bubble(size, count, virtual_stages=virtual)
        most = "at most " if schedule in SPLIT_BACKWARD else ""  # the formula does not know of their filled bubble
        lines.append(
            f"By its schedule, {size} stages with {count} micro-batches idle {most}{percent(by_schedule)} of a step."
        )
        if idle > BEYOND * by_schedule:
            lines.append("It is more than that: stages differ, or what they exchange takes long.")
    return Claim(
        cost_s=cost_s,
        what="stages of the pipeline idle",
        evidence=tuple(lines),
        advice=_advice(evidence, size, count, virtual, samples),
        directness=0.95 if by_schedule is None or idle <= BEYOND * by_schedule else 0.8,
    )


def _samples(evidence: Evidence) -> int | None:
    """Of the smallest batch that a pipeline is given: there are no more micro-batches; ``None``: unknown."""
    found = [each for each in evidence.facts("batch_size") if isinstance(each, int) and each > 0]
    return min(found, default=None)


def _finer(size: int | None, count: int | None, virtual: int, samples: int | None) -> str:
    if size is None or count is None:
        return "Cut batches finer: more micro-batches."
    wanted = math.ceil(4 * max(size, count) / size) * size  # each schedule takes a multiple of the ranks
    option = f"parallel.pipeline.micro_batches={wanted}"
    idles = f"idles {percent(pipeline_bubble(size, wanted, virtual_stages=virtual))}"
    if samples is None or samples >= wanted:
        return f"Cut batches finer: {option} {idles}."
    return f"Cut larger batches finer: {option} with batches of {wanted} samples (now {samples}) {idles}."


def _advice(
    evidence: Evidence, size: int | None, count: int | None, virtual: int, samples: int | None
) -> tuple[str, ...]:
    idling_less = [each for each in IDLING_LESS if each != evidence.option("parallel.pipeline.schedule")]
    return (
        _finer(size, count, virtual, samples),
        f"Or a schedule that idles less: parallel.pipeline.schedule={' or '.join(idling_less)}.",
        "Or fewer stages: a smaller parallel.pipeline.size.",
    )
