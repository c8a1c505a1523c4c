"""Forward and backward take the time: as it should be."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.utilisation import utilisation_of
from lightning_dist.monitor.diagnosis.wording import percent, seconds
from lightning_dist.monitor.record import Phase

VALIDATION = 0.1  # of the time, from which on it is worth a word


def claim(evidence: Evidence) -> Claim:
    """Compute, and validation, which computes too."""
    parts = {phase: evidence.cost_s(phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.VALIDATION)}
    lines = [
        f"Forward takes {seconds(float(parts[Phase.FORWARD].mean()))} a step, backward "
        f"{seconds(float(parts[Phase.BACKWARD].mean()))}."
    ]
    used = utilisation_of(evidence)
    if used is not None:
        lines.insert(0, used.sentence)
    advice = [f"Faster compute is what is left: {_faster(evidence)}larger batches, more ranks."]
    validation = evidence.window.share(parts[Phase.VALIDATION])
    if validation >= VALIDATION:
        lines.append(f"Validation is {percent(validation)} of the time.")
        advice.append("Validate less often or on fewer batches: val_check_interval, limit_val_batches.")
    return Claim(
        cost_s=evidence.without_stragglers_s(*parts),
        what="compute",
        evidence=tuple(lines),
        advice=tuple(advice),
        directness=0.95,
    )


def _faster(evidence: Evidence) -> str:
    half = "" if "16" in str(evidence.option("trainer.precision")) else "precision=bf16-mixed, "
    return half + ("" if evidence.option("model.is_compiled") is True else "torch.compile of the blocks, ")
