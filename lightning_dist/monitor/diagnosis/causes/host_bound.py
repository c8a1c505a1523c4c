"""The optimizer, callbacks, logging or Lightning's loops take the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_dist.monitor.diagnosis import already
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import percent, seconds
from lightning_dist.monitor.record import Phase

PHASES = (Phase.OPTIMIZER, Phase.LOGGING, Phase.OTHER)

_NAMES = {
    Phase.OPTIMIZER: "the optimizer's step",
    Phase.LOGGING: "logging",
    Phase.OTHER: "callbacks and loops",
}
_USUAL_LOGGING = 50  # steps: Lightning's own


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
        what=f"what is not the model, most of it {_NAMES[most]}, takes {seconds(sum(costs.values()))} a step",
        evidence=tuple(
            f"{_NAMES[phase].capitalize()}: {seconds(costs[phase])} a step ({percent(costs[phase] / step_s)})."
            for phase in known
        ),
        advice=_ADVICE[most](evidence),
        directness=0.9 if most is not Phase.OTHER else 0.8,
    )


def _of_optimizer(evidence: Evidence) -> tuple[str, ...]:
    lines = []
    if evidence.option("optimizer.fused") is not True:
        lines.append("One pass over memory instead of many: a fused optimizer, e.g. AdamW(fused=True).")
    if (evidence.readers or 1) > 1 and not already.shards_optimizer(evidence):  # else there is nobody to share with
        lines.append('Let each rank step its share only: Trainer(strategy="hierdist_zero1"), parallel=zero1.')
    lines.append(f"Step less often: {evidence.more_accumulation}.")
    return tuple(lines)


def _of_logging(evidence: Evidence) -> tuple[str, ...]:
    now = evidence.whole_option("trainer.log_every_n_steps")
    rarer = _USUAL_LOGGING if now is None or now < _USUAL_LOGGING else 4 * now
    return (f"Log less often: Trainer(log_every_n_steps={rarer}), and no self.log(..., sync_dist=True) in each step.",)


def _of_loops(evidence: Evidence) -> tuple[str, ...]:
    bar = "" if evidence.option("trainer.enable_progress_bar") is False else "the progress bar's refresh_rate, "
    return (
        f"Look at callbacks and hooks that run in each batch, {bar}and .item() or print in training_step.",
        "Larger batches give the host less to do for each sample.",
    )


_ADVICE: Mapping[Phase, Callable[[Evidence], tuple[str, ...]]] = {
    Phase.OPTIMIZER: _of_optimizer,
    Phase.LOGGING: _of_logging,
    Phase.OTHER: _of_loops,
}
