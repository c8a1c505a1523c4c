"""What the leader is to do, as values."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.elastic.policy.blame import Blame


@dataclass(frozen=True)
class StartRound:
    """Start the ranks of these hosts, in this order.

    Attributes:
        number: Of the round, from 1.
        hosts: By node rank.
        reason: Why there is a new one, for people.
        action: ``started`` (the first), ``restarted`` (the same hosts), ``waited`` (the same, one of them was waited
            for, or another took its place), ``degraded`` (fewer) or ``regrown`` (more).
        blame: What the last one failed of; ``None``: it did not fail.
    """

    number: int
    hosts: tuple[str, ...]
    reason: str
    action: str = "started"
    blame: Blame | None = None


@dataclass(frozen=True)
class StopRound:
    """End the ranks of a round.

    Attributes:
        at_snapshot: They commit a snapshot first, at the next step; else they are ended at once.
    """

    number: int
    reason: str
    at_snapshot: bool = False


@dataclass(frozen=True)
class SetAside:
    """A host takes no part any more."""

    host: str
    reason: str


@dataclass(frozen=True)
class Say:
    """Tell people."""

    text: str


@dataclass(frozen=True)
class EndRun:
    """All agents end.

    Attributes:
        exit_code: 0: training is over.
        reason: For people.
        blame: What the last round failed of, if that is why.
    """

    exit_code: int
    reason: str
    blame: Blame | None = None


Action = StartRound | StopRound | SetAside | Say | EndRun
