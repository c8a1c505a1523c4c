"""Who leads, as a function of what the endpoints say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.elastic.leading.messages import Status


@dataclass(frozen=True)
class Join:
    """Another endpoint leads."""

    index: int


@dataclass(frozen=True)
class Lead:
    """It is this host's turn, as the leader of this term."""

    term: int


@dataclass(frozen=True)
class Wait:
    """Nobody leads yet, and it is another one's turn, or may be."""

    reason: str


Choice = Join | Lead | Wait


def choose(statuses: Sequence[Status | None], *, own: int | None, has_waited: bool) -> Choice:
    """What a host does that has no leader.

    Who leads is joined; of several, the one of the newest round. Else the first endpoint that answers takes over, among
    those that know the newest round: one that was started anew knows none, and does not lead a run that goes on.

    Args:
        statuses: What each endpoint says, in their order; ``None``: it does not answer.
        own: This host's index, whose status is there; ``None``: it never leads.
        has_waited: At the start of a run an endpoint waits for those before it, as long as this is false.
    """
    leading = [index for index, status in enumerate(statuses) if status is not None and status.is_leading]
    if leading:
        return Join(max(leading, key=lambda index: rank_of(statuses, index)))
    alive = [index for index, status in enumerate(statuses) if status is not None]
    if own is None:
        return Wait("no endpoint leads yet" if alive else "no endpoint answers")
    first = max(alive, key=lambda index: (_known(statuses, index).round, -index))
    if first != own:
        return Wait(f"it is the turn of {_known(statuses, first).host}")
    is_fresh = _known(statuses, own).round == 0
    if is_fresh and not has_waited and any(status is None for status in statuses[:own]):
        return Wait("an endpoint before this one may still come")
    return Lead(1 + max(_known(statuses, index).term for index in alive))


def rank_of(statuses: Sequence[Status | None], index: int) -> tuple[int, int, int]:
    """Of two that lead, the one with the larger rank goes on."""
    status = _known(statuses, index)
    return status.round, status.term, -index


def _known(statuses: Sequence[Status | None], index: int) -> Status:
    status = statuses[index]
    assert status is not None, "it answered"
    return status
