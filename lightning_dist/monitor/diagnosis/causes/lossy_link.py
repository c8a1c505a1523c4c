"""Segments are lost on the way and sent again."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.causes import exposed
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.wording import percent
from lightning_dist.monitor.record import Phase

RESENT = 0.005  # of the segments; a sound network in a data centre loses fewer than one in a thousand
RESENT_PER_S = 1.0  # fewer are accidents of a connection that opens or closes


def claim(evidence: Evidence) -> Claim | None:
    """Exposed communication, where segments are sent again."""
    worst = evidence.resent_share
    if Phase.COMMUNICATION not in evidence.window.phases or worst is None or not is_lossy(evidence):
        return None
    share, host = worst
    return Claim(
        cost_s=evidence.cost_s(Phase.COMMUNICATION),
        what=f"a lossy link, of host {host}",
        evidence=(
            *exposed.sentences(evidence),
            f"Host {host} sends {percent(share)} of its TCP segments again, {evidence.resent_per_s:.3g} a second.",
        ),
        advice=(
            f"Look at the link of {host}: cable, optics, errors of the port (ethtool -S, ip -s link), a switch "
            "whose queue is full.",
            "If queues overflow: flow control or ECN on the switch, fewer streams at a time (sync.max_in_flight=2).",
            "Until then fewer bytes suffer less: sync=bf16.",
        ),
        directness=0.9,
        ranks=tuple(
            rank for rank, row in zip(evidence.window.ranks, evidence.window.hosts, strict=True) if row == host
        ),
    )


def is_lossy(evidence: Evidence) -> bool:
    """Whether so many segments are sent again that it costs time."""
    worst, per_s = evidence.resent_share, evidence.resent_per_s
    return worst is not None and per_s is not None and worst[0] >= RESENT and per_s >= RESENT_PER_S
