"""When a series is worth a warning while training runs; pure. What is behind it is the diagnosis's business."""

from __future__ import annotations

from collections import deque

from lightning_dist.monitor.record import Sample

WINDOW = 10
"""How many samples in a row an alarm looks at."""

COMMUNICATION_SHARE = 0.30  # more than this is what overlap and topology can usually win back
RETRANSMIT_SHARE = 0.01  # of the segments sent; healthy links are far below, and TCP's rate falls quickly above
LEAST_RETRANSMITS_PER_S = 1.0  # fewer cost nothing that is felt


class Alarms:
    """Watches samples, and warns once of each thing.

    Args:
        host: Named in warnings of what is the host's.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._recent: dict[str, deque[float]] = {}
        self._given: set[str] = set()

    def take(self, sample: Sample) -> str | None:
        """A warning that this sample brings about."""
        recent = self._recent.setdefault(sample.metric, deque(maxlen=WINDOW))
        recent.append(sample.value)
        if sample.metric in self._given or len(recent) < WINDOW:
            return None
        text = None
        if sample.metric == "communication_share":
            text = self._communication(sum(recent) / len(recent))
        elif sample.metric == "tcp_retransmits":
            text = self._retransmits(sum(recent) / len(recent))
        if text is not None:
            self._given.add(sample.metric)
        return text

    def _communication(self, share: float) -> str | None:
        if share <= COMMUNICATION_SHARE:
            return None
        return (
            f"communication is under way for {share:.0%} of the step (over the last {WINDOW} samples); "
            f"`hierdist report` says how much of it is exposed, and why"
        )

    def _retransmits(self, per_s: float) -> str | None:
        sent = self._recent.get("tcp_sent_segments")
        sent_per_s = sum(sent) / len(sent) if sent else 0.0
        share = per_s / (sent_per_s + per_s) if per_s > 0 else 0.0
        if share < RETRANSMIT_SHARE or per_s < LEAST_RETRANSMITS_PER_S:
            return None
        return (
            f"host {self._host} sends {share:.1%} of its TCP segments again, {per_s:.0f} a second (over the last "
            f"{WINDOW} samples): a link of it loses packets, or is overfull"
        )
