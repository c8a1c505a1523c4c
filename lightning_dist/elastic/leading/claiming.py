"""A leader's claim of a round, and what it means not to get it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_dist.elastic.leading.aside import aside
from lightning_dist.elastic.leading.duties import Duties
from lightning_dist.elastic.session import End
from lightning_dist.errors import LaunchError

T = TypeVar("T")
PATIENCE_S = 60.0
"""With storage that does not answer, or cannot be used."""


@dataclass(frozen=True)
class Refusal:
    """Another one has the claim.

    Attributes:
        number: Of the round.
        is_void: Who has it leads no more: the next number is free.
        reason: For people.
    """

    number: int
    is_void: bool
    reason: str


async def claim_round(duties: Duties, number: int, *, is_void: Callable[[str], bool]) -> Refusal | None:
    """Claim a round; ``None``: it is ours.

    Args:
        duties: Who leads; with a fence.
        number: Of the round.
        is_void: Whether a host is known to lead no more.

    Raises:
        LaunchError: Storage did not answer for a minute.
    """
    fence = duties.fence
    assert fence is not None, "asked only with one"
    claimed = functools.partial(fence.claim, number, host=duties.host, instance=duties.instance)
    claim = await _patiently(duties, claimed, f"the claim of round {number}")
    if claim.instance == duties.instance:
        return None
    while is_void(claim.host):  # an earlier start of the run has claimed several
        look = functools.partial(fence.claimed, claim.round + 1)
        following = await _patiently(duties, look, f"a look at round {claim.round + 1}")
        if following is None:
            reason = f"round {claim.round} was claimed by host {claim.host}, which leads no more"
            return Refusal(claim.round, True, reason)
        claim = following
    reason = (
        f"round {claim.round} of run {duties.run} is claimed by host {claim.host} already: it trains, or an earlier "
        "start of the run did; if none runs any more, start all its hosts, or give another folder with --fence"
    )
    return Refusal(claim.round, False, reason)


async def _patiently(duties: Duties, ask: Callable[[], T], what: str) -> T:
    """Ask storage until it answers; for a minute at most."""
    end_s = duties.clock() + PATIENCE_S
    while True:
        try:
            return await aside(ask, timeout_s=PATIENCE_S, what=what)
        except LaunchError as error:
            if duties.clock() > end_s:
                raise
            duties.say(str(error))
            await asyncio.sleep(duties.pace.ping_s)


async def note_end(duties: Duties, end: End) -> None:
    """Let those that come too late find out at the fence, if there is one."""
    if duties.fence is None:
        return
    note = functools.partial(duties.fence.end, end.exit_code, end.reason)
    try:
        await aside(note, timeout_s=duties.pace.deadline_s, what="the end of the run")
    except LaunchError as error:
        duties.say(str(error))
