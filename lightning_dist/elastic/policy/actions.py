"""What the leader is to do, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartRound:
    """Start the ranks of these hosts, in this order.

    Attributes:
        number: Of the round, from 1.
        hosts: By node rank.
        reason: Why there is a new one, for people.
    """

    number: int
    hosts: tuple[str, ...]
    reason: str


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
    """

    exit_code: int
    reason: str


Action = StartRound | StopRound | SetAside | Say | EndRun
