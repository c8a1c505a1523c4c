"""Segments are lost on the way and sent again."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.causes import exposed
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import RESENT_PER_S, Evidence
from lightning_dist.monitor.record import Phase

RESENT = 0.05  # of the segments; streams that fill a link's queue make it drop up to 4 % by themselves


def claim(evidence: Evidence) -> Claim | None:
    """Exposed communication, where segments are sent again."""
    worst = evidence.resent
    if Phase.COMMUNICATION not in evidence.window.phases or worst is None or not is_lossy(evidence):
        return None
    window, host = evidence.window, worst.host
    return Claim(
        cost_s=evidence.cost_s(Phase.COMMUNICATION),
        what=f"a lossy link, of host {host}",
        evidence=exposed.sentences(evidence),
        advice=(
            f"Look at the link of {host}: cable, optics, errors of the port (ethtool -S, ip -s link), a switch "
            "whose queue is full.",
            f"If queues overflow: flow control or ECN on the switch{_fewer_streams(evidence)}.",
            *exposed.fewer_bytes(evidence),
        ),
        directness=0.9,
        ranks=tuple(rank for rank, at in zip(window.ranks, window.hosts, strict=True) if at == host),
    )


def is_lossy(evidence: Evidence) -> bool:
    """Whether so many segments are sent again that it costs time."""
    worst = evidence.resent
    return worst is not None and worst.share >= RESENT and worst.per_s >= RESENT_PER_S


def _fewer_streams(evidence: Evidence) -> str:
    now = evidence.whole_option("sync.max_in_flight")
    return f", fewer streams at a time (sync.max_in_flight={now // 2})" if now is not None and now > 1 else ""
