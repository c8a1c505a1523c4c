"""Records of runs that never ran, with all that a report shows: made from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from lightning_dist.monitor.record import (
    Phase,
    RankHeader,
    RankRecord,
    RunRecord,
    Sample,
    Span,
    StepRecord,
    Traffic,
)
from lightning_dist.monitor.verdict import Cause, Finding, Reason, Verdict
from tests.support.records import made_facts, made_header, step_of

PARTS_MS = {
    Phase.DATA_WAIT: 6.0,
    Phase.HOST_TO_DEVICE: 0.4,
    Phase.FORWARD: 5.0,
    Phase.BACKWARD: 9.0,
    Phase.COMMUNICATION: 4.0,
    Phase.OPTIMIZER: 1.5,
    Phase.LOGGING: 0.2,
    Phase.OTHER: 0.7,
}
START_NS = 1_796_000_000_000_000_000
SPANS_EVERY = 50

STRAGGLER = Finding(
    cause=Cause.STRAGGLER,
    share=0.12,
    confidence=0.9,
    summary="Rank 1 needs 9.1 ms more for its forward than the median rank, and the others wait for it.",
    evidence=("Forward takes 14.1 ms on rank 1 and 5.0 ms on the median rank.",),
    advice=("Look at what else runs on host-0.",),
    speedup_at_most=1.14,
    ranks=(1,),
    since_step=20,
)
DATA = Finding(
    cause=Cause.DATA_PIPELINE,
    share=0.41,
    confidence=0.85,
    summary="Ranks wait 6.0 ms of a step of 14.6 ms for a batch.",
    evidence=("Data wait is 41 % of the median step on all ranks.", "No rank waits less than 5.2 ms."),
    advice=("Raise data.workers.", "Keep shards on the host: data.cache=auto."),
    speedup_at_most=1.69,
)
COMMUNICATION = Finding(
    cause=Cause.COMMUNICATION,
    share=0.15,
    confidence=0.6,
    summary="4.0 ms of a step are exposed communication.",
    speedup_at_most=1.18,
    reason=Reason.NO_OVERLAP,
)
FOUND = Verdict(DATA, (COMMUNICATION, STRAGGLER), steps=120, step_s=0.0268, missing=("GPU utilisation: no GPU.",))
NONE = Verdict(None, no_verdict="Only 3 steps were recorded; at least 20 are needed.", steps=3)


def run(
    *,
    ranks: int = 4,
    steps: int = 120,
    seed: int = 0,
    samples: bool = True,
    spans: bool = True,
    hosts: Sequence[str] = ("host-0", "host-1"),
    options: Mapping[str, object] | None = None,
    slow_rank: int | None = 1,
    unavailable: Mapping[str, str] | None = None,
    strategy: str = "hierdist zero2",
) -> RunRecord:
    """A run with a slow rank from step 20 on, a checkpoint each 40 steps, and noise."""
    facts = made_facts(
        ranks,
        run_id="2026-11-30-a1b2",
        strategy=strategy,
        options={"parallel.mode": "zero2", "sync.algorithm": "hierarchical", "trainer.max_steps": steps}
        if options is None
        else options,
        config_hash="0f1e2d3c",
        commit="85d5d7a",
        versions={"python": "3.11.9", "torch": "2.13.0", "lightning": "2.6.6", "lightning_dist": "0.1.0"},
        peak_flops=1e12,
        flops_per_sample=2e8,
    )
    random_numbers = random.Random(seed)
    shared = [random_numbers.lognormvariate(0.0, 0.08) for _ in range(steps)]
    made = {}
    for rank in range(ranks):
        header = made_header(
            rank,
            [hosts[each * len(hosts) // ranks] for each in range(ranks)],
            pid=4000 + rank,
            started_wall_ns=START_NS + rank * 1_000_000,
            started_ns=10**9 * (rank + 1),
            unavailable={"gpu_utilisation": "no GPU", "rdma_retransmits": "no RDMA device"}
            if unavailable is None
            else unavailable,
        )
        made[rank] = _rank(header, shared, slow=rank == slow_rank, samples=samples, spans=spans)
    return RunRecord(facts, made)


def _rank(header: RankHeader, shared: Sequence[float], *, slow: bool, samples: bool, spans: bool) -> RankRecord:
    random_numbers = random.Random(header.rank)
    now = header.started_ns + 5_000_000
    steps: list[StepRecord] = []
    taken: list[Sample] = []
    kept: list[Span] = []
    for number, factor in enumerate(shared):
        parts = {phase: ms * factor * random_numbers.lognormvariate(0, 0.04) / 1e3 for phase, ms in PARTS_MS.items()}
        if slow and number >= 20:
            parts[Phase.FORWARD] += 0.009
        if number % 40 == 39:
            parts[Phase.CHECKPOINT] = 0.12
        phases: dict[Phase, float | None] = {phase: parts.get(phase, 0.0) for phase in Phase}
        phases[Phase.PIPELINE_IDLE] = None
        duration_s = sum(parts.values())
        hidden_s = 0.6 * parts[Phase.BACKWARD]
        exposed_s = parts[Phase.COMMUNICATION]
        steps.append(
            step_of(
                number,
                phases,
                rank=header.rank,
                start_ns=now,
                duration_s=duration_s,
                hidden_s=hidden_s,
                size_bytes=27_000_000,
                operations=12,
                tiers={
                    "host": Traffic(hidden_s * 0.8, 0.0, 54_000_000, 24),
                    "cross": Traffic(hidden_s + exposed_s, exposed_s, 27_000_000, 12),
                },
                samples=16,
                tokens=4096,
                batch_bytes=65536,
            )
        )
        if spans and number % SPANS_EVERY == 0:
            kept += _spans(number, now, parts)
        end = now + round(duration_s * 1e9)
        if samples:
            taken += _samples(header, steps[-1], header.wall_ns(end), random_numbers)
        now = end
    return RankRecord(header, tuple(steps), tuple(taken), tuple(kept))


def _spans(step: int, start: int, parts: Mapping[Phase, float]) -> list[Span]:
    found, now = [], start
    for phase in (*PARTS_MS, Phase.CHECKPOINT):
        length = round(parts.get(phase, 0.0) * 1e9)
        if not length:
            continue
        found.append(Span(step, "main", phase.value, now, now + length))
        if phase is Phase.BACKWARD:
            each = length // 5
            for chunk in range(5):
                begin = now + chunk * each + each // 3
                found.append(Span(step, "comm.host", "comm.host", begin, begin + each // 2))
                found.append(Span(step, "comm.cross", "comm.cross", begin + each // 4, begin + each * 2))
        now += length
    return found


def _samples(header: RankHeader, step: StepRecord, wall_ns: int, random_numbers: random.Random) -> list[Sample]:
    assert step.communication is not None
    values = {
        "data_wait": step.phases[Phase.DATA_WAIT] or 0.0,
        "cpu_utilisation": 0.7 + 0.25 * random_numbers.random(),
        "communication_share": step.communication.total_s / step.duration_s,
        "memory": 8e8 + 1e6 * step.step,
        "heartbeat_timeouts": 0.0,
    }
    if header.local_rank == 0:
        values |= {"tcp_retransmits": random_numbers.choice((0, 0, 0, 3)), "network_sent": 4.2e7}
    if step.phases[Phase.CHECKPOINT]:
        values |= {"checkpoint_stall": 0.12, "checkpoint_write": 0.9}
    return [Sample(metric, step.step, wall_ns, value) for metric, value in values.items()]
