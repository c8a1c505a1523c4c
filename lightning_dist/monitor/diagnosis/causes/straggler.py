"""The others wait for one rank, or a few."""

from __future__ import annotations

import numpy as np

from lightning_dist.monitor.diagnosis import already
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.stragglers import Stragglers
from lightning_dist.monitor.diagnosis.wording import ranks as ranks_of
from lightning_dist.monitor.diagnosis.wording import seconds
from lightning_dist.monitor.record import Phase

STALL = 5.0  # times the median step: a step in which a rank stood still

_ADVICE = {
    Phase.DATA_WAIT: "Look at its storage and reader processes: data.cache_dir on a local disk, data.workers.",
    Phase.HOST_TO_DEVICE: "Look at its PCIe link.",
    Phase.OPTIMIZER: "Look at the memory of its host: an optimizer's step is bound by memory.",
    Phase.OTHER: "Look at callbacks and hooks that run on it alone, and at other processes of its host.",
}
_SLOW_COMPUTE = (
    "Look at its device and host: clock and temperature (nvidia-smi -q -d PERFORMANCE), other processes, cores it "
    "shares (OMP_NUM_THREADS); leave the host out if it stays slow."
)


def claim(evidence: Evidence) -> Claim | None:
    """What a step would take less without them."""
    found = evidence.stragglers
    if found is None:
        return _stood_still(evidence)
    return Claim(
        cost_s=found.cost_s,
        what=f"the others wait for {ranks_of(found.ranks)}{_in_phase(found.phase)}",
        evidence=_sentences(evidence, found),
        advice=_advice(evidence, found),
        directness=0.95 if found.phase is not None else 0.7,
        ranks=found.ranks,
        since_step=found.since_step,
    )


def _stood_still(evidence: Evidence) -> Claim | None:
    """Without a lasting straggler: a rank that stood still now and then, and whose heartbeats were late."""
    window = evidence.window
    timeouts = sum(evidence.heartbeat_timeouts.values())
    if not timeouts or len(window.ranks) < 2 or Phase.COMMUNICATION not in window.phases:
        return None
    stalls = window.step_s > STALL * float(np.median(window.step_s))
    if not stalls.any():
        return None
    second = np.partition(window.own_s, -2, axis=0)[-2]
    cost_s = np.where(stalls, np.maximum(window.own_s.max(axis=0) - second, 0.0), 0.0)
    row = int(np.bincount(window.own_s.argmax(axis=0)[stalls], weights=cost_s[stalls]).argmax())
    rank = window.ranks[row]
    return Claim(
        cost_s=cost_s,
        what=f"the others wait for rank {rank}, which stands still now and then",
        evidence=(
            f"{int(stalls.sum())} steps take more than {STALL:.0f} times the median step.",
            _late(timeouts),
        ),
        advice=("Look at what stops the process: memory that is swapped, a frozen file system, a paused machine.",),
        directness=0.8,
        is_rare=True,
        ranks=(rank,),
        since_step=window.steps[int(stalls.argmax())],
    )


def _late(timeouts: int) -> str:
    return "A heartbeat was late once." if timeouts == 1 else f"Heartbeats were late {timeouts} times."


def _in_phase(phase: Phase | None) -> str:
    return "" if phase is None else f", in {phase.value.replace('_', ' ')}"


def _sentences(evidence: Evidence, found: Stragglers) -> tuple[str, ...]:
    window = evidence.window
    hosts = sorted({window.hosts[row] for row in found.rows})
    lines = [
        f"{ranks_of(found.ranks).capitalize()} on {', '.join(hosts[:4])} work{'s' if len(found.ranks) == 1 else ''} "
        f"{seconds(found.lag_s)} a step longer than the median rank."
    ]
    waiting = np.delete(window.waiting_s, found.rows, axis=0).mean()
    lines.append(
        f"The others wait {seconds(float(waiting))} a step, {ranks_of(found.ranks)} "
        f"{seconds(float(window.waiting_s[list(found.rows)].mean()))}."
    )
    if found.since_step is not None:
        lines.append(f"Since step {found.since_step} it is {seconds(found.lag_since_s)} a step.")
    whole = [host for host in hosts if all(row in found.rows for row, at in enumerate(window.hosts) if at == host)]
    if len(whole) == 1 and len(found.rows) > 1:
        lines.append(f"They are all the ranks of host {whole[0]}.")
    timeouts = sum(evidence.heartbeat_timeouts.values())
    if timeouts:
        lines.append(_late(timeouts))
    return tuple(lines)


def _advice(evidence: Evidence, found: Stragglers) -> tuple[str, ...]:
    advice = _SLOW_COMPUTE if found.phase is None else _ADVICE.get(found.phase, _SLOW_COMPUTE)
    if found.phase is Phase.HOST_TO_DEVICE and not already.pins_memory(evidence):
        return (advice, "Pin its batches: data.pin_memory=true, or pin_memory=True in a DataLoader.")
    if Phase.PIPELINE_IDLE in evidence.window.phases and evidence.option("parallel.mode") == "pipeline":
        by = "" if evidence.option("parallel.pipeline.balance") == "time" else "parallel.pipeline.balance=time, or "
        return (f"Cut the stages by measured cost: {by}parallel.pipeline.split.", advice)
    return (advice,)
