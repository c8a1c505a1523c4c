"""The optimizer, callbacks, logging or Lightning's loops take the time."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import SHARDED_MODES, Evidence
from lightning_dist.monitor.diagnosis.wording import percent, seconds
from lightning_dist.monitor.record import Phase

PHASES = (Phase.OPTIMIZER, Phase.LOGGING, Phase.OTHER)

_NAMES = {
    Phase.OPTIMIZER: "the optimizer's step",
    Phase.LOGGING: "logging",
    Phase.OTHER: "callbacks and loops",
}
_ADVICE = {
    Phase.LOGGING: (
        "Log less often: Trainer(log_every_n_steps=50), and no self.log(..., sync_dist=True) in each step.",
    ),
    Phase.OTHER: (
        "Look at callbacks and hooks that run in each batch, the progress bar's refresh_rate, and .item() or print in "
        "training_step.",
        "Larger batches give the host less to do for each sample.",
    ),
}


def claim(evidence: Evidence) -> Claim | None:
    """What is neither compute, data nor communication."""
    measured = evidence.window.phases
    known = [phase for phase in PHASES if phase in measured]
    if Phase.DATA_WAIT not in measured:  # then it is among what is left
        known = [phase for phase in known if phase is not Phase.OTHER]
    if not known:
        return None
    costs = {phase: float(evidence.without_stragglers_s(phase).mean()) for phase in known}
    most = max(known, key=lambda phase: costs[phase])
    step_s = float(evidence.window.step_s.mean())
    return Claim(
        cost_s=evidence.without_stragglers_s(*known),
        what=f"{seconds(sum(costs.values()))} a step go to other than the model, most to {_NAMES[most]}",
        evidence=tuple(
            f"{_NAMES[phase].capitalize()}: {seconds(costs[phase])} a step ({percent(costs[phase] / step_s)})."
            for phase in known
        ),
        advice=_of_optimizer(evidence) if most is Phase.OPTIMIZER else _ADVICE[most],
        directness=0.9 if most is not Phase.OTHER else 0.8,
    )


def _of_optimizer(evidence: Evidence) -> tuple[str, ...]:
    lines = ["One pass over memory instead of many: a fused optimizer, e.g. AdamW(fused=True)."]
    if evidence.world_size > 1 and evidence.option("parallel.mode") not in SHARDED_MODES:
        lines.append("Let each rank step its share only: parallel=zero1.")
    lines.append(f"Step less often: {evidence.more_accumulation}.")
    return tuple(lines)
