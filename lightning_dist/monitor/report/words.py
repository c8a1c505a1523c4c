"""What the parts of a record and of a verdict are called, for people."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dist.monitor.record import Phase
from lightning_dist.monitor.report import quantities
from lightning_dist.monitor.verdict import Cause, Finding, Reason, Verdict

PHASES: Mapping[Phase, str] = {
    Phase.DATA_WAIT: "Data wait",
    Phase.HOST_TO_DEVICE: "Host to device",
    Phase.FORWARD: "Forward",
    Phase.BACKWARD: "Backward",
    Phase.COMMUNICATION: "Communication, exposed",
    Phase.PIPELINE_IDLE: "Pipeline idle",
    Phase.OPTIMIZER: "Optimizer",
    Phase.CHECKPOINT: "Checkpoint stall",
    Phase.VALIDATION: "Validation",
    Phase.LOGGING: "Logging",
    Phase.OTHER: "Other",
}
"""In the order in which a step goes through them, more or less."""

MEANINGS: Mapping[Phase, str] = {
    Phase.DATA_WAIT: "the loader was asked for a batch and had none ready",
    Phase.HOST_TO_DEVICE: "the batch is moved to the device",
    Phase.FORWARD: "training_step, with the loss",
    Phase.BACKWARD: "gradients are computed",
    Phase.COMMUNICATION: "waiting for other ranks, with nothing computed meanwhile",
    Phase.PIPELINE_IDLE: "a stage waits for its neighbours",
    Phase.OPTIMIZER: "the optimizer's step, clipping and zeroing",
    Phase.CHECKPOINT: "training stands still for a checkpoint",
    Phase.VALIDATION: "validation loops between training steps",
    Phase.LOGGING: "loggers write",
    Phase.OTHER: "callbacks, Lightning's loops, what is not told apart",
}

CAUSES: Mapping[Cause, str] = {
    Cause.DATA_PIPELINE: "Ranks wait for data",
    Cause.IO_AMPLIFICATION: "Each rank reads all data",
    Cause.COMMUNICATION: "Communication is exposed",
    Cause.LOSSY_LINK: "A link loses segments",
    Cause.STRAGGLER: "Slow ranks hold the others up",
    Cause.PIPELINE_BUBBLE: "Pipeline stages idle",
    Cause.CHECKPOINT: "Checkpoints hold training up",
    Cause.HOST_BOUND: "Optimizer, callbacks and loops take long",
    Cause.COMPUTE_BOUND: "Bound by compute, as it should be",
}

REASONS: Mapping[Reason, str] = {
    Reason.PLACEMENT: "ranks are badly placed",
    Reason.NO_OVERLAP: "nothing is sent while backward computes",
    Reason.SMALL_BUCKETS: "buckets are small",
    Reason.SLOW_LINK: "one host's link is slow",
    Reason.VOLUME: "more bytes than can be exchanged in a step",
}

CONFIDENCES = ((0.8, "high"), (0.5, "medium"), (0.0, "low"))


def title(finding: Finding) -> str:
    """What is wrong, in a few words; a straggler by its rank."""
    if finding.cause is Cause.STRAGGLER and len(finding.ranks) == 1:
        return f"Rank {finding.ranks[0]} holds the others up"
    words = CAUSES[finding.cause]
    return f"{words}: {REASONS[finding.reason]}" if finding.reason is not None else words


def confidence(finding: Finding) -> str:
    """High, medium or low."""
    return next((word for limit, word in CONFIDENCES if finding.confidence >= limit), "low")


def gain(finding: Finding) -> str | None:
    """What fixing it gives at most; ``None`` where there is nothing to fix."""
    if finding.cause is Cause.COMPUTE_BOUND or finding.speedup_at_most <= 1.0:
        return None
    return f"at most {times(finding.speedup_at_most)} times faster without it (Amdahl's law)"


def times(factor: float) -> str:
    """A speedup; beyond 100 its size says nothing."""
    return f"{factor:.2f}" if factor < 100 else "over 100"


def headline(verdict: Verdict) -> str:
    """The verdict in one line."""
    if verdict.main is None:
        return f"No verdict: {verdict.no_verdict or 'the data do not allow one'}"
    share = quantities.text(verdict.main.share, quantities.SHARE)
    said = gain(verdict.main)
    return f"{title(verdict.main)}, {share} of the step" + (f"; {said}" if said else "")
