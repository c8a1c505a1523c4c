"""What shows that ranks wait for communication, whatever is behind it."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis import already
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import percent, seconds, size
from lightning_dist.monitor.record import Phase

WORTH_A_WORD = 0.001  # of the segments; a link that is not full loses fewer


def sentences(evidence: Evidence) -> tuple[str, ...]:
    """For people: how much is communicated, and how much of it is hidden."""
    traffic = evidence.traffic
    exposed_s = float(evidence.cost_s(Phase.COMMUNICATION).mean())
    if traffic is None:
        return (f"Ranks wait {seconds(exposed_s)} a step for communication.",)
    share = traffic.total_s / float(evidence.window.step_s.mean())
    lines = [
        f"Communication takes {seconds(traffic.total_s)} a step ({percent(share)}), of which compute hides "
        f"{seconds(traffic.overlapped_s)}."
    ]
    if traffic.size_bytes:
        lines.append(f"A rank communicates {size(traffic.size_bytes)} a step in {traffic.operations:.0f} operations.")
    if evidence.resent is not None and evidence.resent.share >= WORTH_A_WORD:
        lines.append(evidence.resent.sentence)
    return tuple(lines)


def hierarchical(evidence: Evidence) -> str:
    """How to get communication that knows the hosts."""
    return "sync=hierarchical" if evidence.is_ours else 'Trainer(strategy="hierdist")'


def fewer_bytes(evidence: Evidence) -> tuple[str, ...]:
    """What sends less over a slow link, and is not done yet."""
    lines = []
    if not evidence.is_ours or evidence.option("sync.algorithm") == "flat":
        lines.append(f"Send each byte between hosts once: {hierarchical(evidence)}.")
    if not already.sends_half(evidence):
        lines.append("Halve what crosses between hosts: sync=bf16.")
    lines.append(f"Synchronise less often: {evidence.more_accumulation}.")
    return tuple(lines)
