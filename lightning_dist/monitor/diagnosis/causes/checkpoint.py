"""Training stands still for checkpoints."""

from __future__ import annotations

import numpy as np

from lightning_dist.laws import daly_interval_s
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import seconds
from lightning_dist.monitor.record import Phase

STALL_S = 1e-4  # shorter is the look whether one is due
LEAST = 0.01  # of the longest; on a busy machine that look takes longer than STALL_S
DAY_S = 86400.0


def claim(evidence: Evidence) -> Claim | None:
    """The sum of their stalls: they are rare, so medians do not see them."""
    if Phase.CHECKPOINT not in evidence.window.phases:
        return None
    cost_s = evidence.cost_s(Phase.CHECKPOINT)
    stalls = cost_s[cost_s > max(STALL_S, LEAST * float(cost_s.max()))]
    if not stalls.size:
        return None
    each_s = float(stalls.mean())
    lines = [f"{stalls.size} of {len(cost_s)} steps stand still for a checkpoint, {seconds(each_s)} each."]
    written_s = evidence.mean("checkpoint_write")
    if written_s is not None:
        lines.append(f"Until one is committed takes {seconds(written_s)}.")
    return Claim(
        cost_s=np.where(cost_s > STALL_S, cost_s, 0.0),
        what="training stands still for checkpoints",
        evidence=tuple(lines),
        advice=_advice(evidence, each_s, every_s=evidence.window.total_s / stalls.size),
        directness=0.95,
        is_rare=True,
    )


def _advice(evidence: Evidence, each_s: float, *, every_s: float) -> tuple[str, ...]:
    return (*_shorter(evidence), _rarer(evidence, each_s, every_s))


def _shorter(evidence: Evidence) -> tuple[str, ...]:
    """Of a checkpoint that is copied at once and written in the background, the copy is left."""
    if evidence.option("checkpoint.mode") != "async_sharded":
        return (
            "Write while training goes on: checkpoint=async_sharded, or AsyncShardedCheckpoint in callbacks, also "
            "under Lightning's ddp.",
        )
    if evidence.option("checkpoint.snapshot") == "overlapped":
        return ()
    given = '{"mode": "async_sharded", "snapshot": "overlapped"}'
    how = "checkpoint.snapshot=overlapped" if evidence.is_ours else f"AsyncShardedCheckpoint(checkpoint={given})"
    return (f"Copy during the next step: {how}.",)


def _rarer(evidence: Evidence, each_s: float, every_s: float) -> str:
    if evidence.option("checkpoint.every") == "auto":
        return 'How often is chosen by every="auto": see whether mtbf_h is that of the whole job; make each shorter.'
    interval_s = daly_interval_s(each_s, DAY_S)
    if every_s >= interval_s:
        return "They are as rare as loses the least time with a failure a day (Daly's law): make each shorter."
    return (
        f"Save less often: with a failure a day, every {seconds(interval_s)} loses the least time (Daly's law; "
        "ModelCheckpoint(train_time_interval=...), every_n_train_steps)."
    )
