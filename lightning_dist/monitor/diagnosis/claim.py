"""What a rule says of a run, before it is weighed."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.monitor.diagnosis.window import Floats
from lightning_dist.monitor.verdict import Reason


@dataclass(frozen=True, eq=False)
class Claim:
    """One cause, and what it costs.

    Attributes:
        cost_s: What each step of the window would take less without it.
        what: The sentence that goes on with "(34 % of the step)".
        evidence: What was seen, a sentence each.
        advice: What to change, a sentence each.
        directness: How directly what was seen shows this cause and no other, between 0 and 1.
        is_rare: Whether it comes in few steps, as checkpoints do: its sum is then exact, however it varies.
        counts_from: Share of the step from which on it counts; ``None``: the rule's threshold.
        reason: Behind exposed communication.
        ranks: Whom it concerns; empty: all.
        since_step: First step that shows it; ``None``: from the start.
    """

    cost_s: Floats
    what: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    directness: float
    is_rare: bool = False
    counts_from: float | None = None
    reason: Reason | None = None
    ranks: tuple[int, ...] = ()
    since_step: int | None = None
