"""Whether the hosts that hear a leader may train, or others that cannot be seen may be training already: a pure rule.

Note: two sides of a cut
    When hosts fall silent, each side of the cut sees the other one die. Both must not go on: they would write the same
    checkpoints. Three things tell a side that it is the only one:

    - More than half of the hosts of the last round are on it. Those that are known to be dead do not count: a
      connection that was closed is a process that ended, and its ranks end with it.
    - Exactly half of them are, and the leader of the last round with them: there was one leader, so the other half does
      not have it.
    - It has claimed the next round on shared storage, where only one side can (the fence). With a fence, leaders claim
      every round, those that count as well: else a side that counts and a side that claims could both go on. Which
      side gets the claim does not matter for safety; it should be the larger one, so a smaller one leaves it time.
      Half of the hosts leave the other half none: it is not larger.

    The first round has no last one to count. The leader at the first endpoint may start it with as many hosts as the
    user has asked for; another leader only with all that there can be.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Ruling(enum.Enum):
    """What a side may do."""

    MAY_START = "may_start"
    BY_FENCE = "by_fence"  # start the next round if it gets the claim
    BY_FENCE_LATER = "by_fence_later"  # likewise, once a larger side has had time to
    MUST_WAIT = "must_wait"  # until hosts are seen again, or are known to be dead


@dataclass(frozen=True)
class Side:
    """The hosts that hear a leader, and what it knows of the others.

    Attributes:
        last: Hosts of the last round; empty before the first one.
        present: Hosts that hear this leader, whether they take part or not.
        dead: Hosts whose agent is known to have ended.
        has_leader: The leader of the last round is on this side; before the first: the leader is at the first endpoint.
        max_hosts: How many hosts there can be.
    """

    last: Collection[str]
    present: Collection[str]
    dead: Collection[str]
    has_leader: bool
    max_hosts: int

    @property
    def is_only_one(self) -> bool:
        """By counting: no other side can say the same of itself."""
        if not self.last:
            return self.has_leader or len(set(self.present)) >= self.max_hosts
        here, voters = self._counted
        return 2 * here > voters or (2 * here == voters and (self.has_leader or not voters))

    @property
    def is_half(self) -> bool:
        """No other side is larger, and one may be as large."""
        here, voters = self._counted
        return bool(self.last) and 2 * here == voters

    @property
    def _counted(self) -> tuple[int, int]:
        """Hosts of the last round that are here, and those that may live."""
        voters = set(self.last) - (set(self.dead) - set(self.present))
        return len(voters & set(self.present)), len(voters)


def rule(side: Side, *, has_fence: bool) -> Ruling:
    """What this side may do.

    Args:
        side: Who is on it.
        has_fence: There is a folder on shared storage where rounds are claimed.
    """
    if side.is_only_one:
        return Ruling.MAY_START
    if not has_fence:
        return Ruling.MUST_WAIT
    return Ruling.BY_FENCE if side.is_half else Ruling.BY_FENCE_LATER


def explain(side: Side) -> str:
    """Why a side must wait, and what the user can do, for people."""
    here = sorted(set(side.present) & set(side.last)) or sorted(set(side.present))
    if not side.last:
        return (
            f"{len(here)} of at most {side.max_hosts} hosts are here, and the first host of --rendezvous is not: it "
            "may have started without them. Start all hosts, name a host that is there first, or give --fence FOLDER "
            "on storage that all hosts share"
        )
    silent = sorted(set(side.last) - set(side.present) - set(side.dead))
    return (
        f"{len(here)} of the {len(side.last)} hosts of the last round are here ({', '.join(here) or 'none'}); "
        f"{', '.join(silent)} cannot be heard, and may be training. More than half must be here; with --fence FOLDER "
        "on storage that all hosts share, fewer can go on"
    )
