"""Small decisions that all ranks take alike: does anyone want to stop, has everyone a batch?

An exchange moves eight bytes a rank over a group of its own (Gloo on CPU memory, also beside NCCL, so that a decision
never waits for the device). It can be started in one step and read in the next, which hides it entirely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, Pending, RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.errors import CollectiveError


class Exchange:
    """An exchange under way; :meth:`wait` gives what each rank said."""

    def __init__(self, pending: Pending, said: torch.Tensor) -> None:
        self._pending = pending
        self._said = said

    def wait(self) -> list[int]:
        """Block until done. Returns one number a rank, by global rank."""
        self._pending.wait_late()
        return [int(value) for value in self._said.tolist()]


class Agreement:
    """Every rank says a number and learns everybody's. All ranks make it, and call it, in the same order.

    Args:
        collectives: The seam; its waits must block the host.
        world_size: Number of ranks.
    """

    def __init__(self, collectives: Collectives, world_size: int) -> None:
        self._collectives = collectives
        self._world_size = world_size
        group = make_group(
            range(world_size),
            rank=collectives.rank,
            label="agreement",
            tier="world",
            timeout_s=collectives.timeout_s,
            backend="gloo",
        )
        self._group: RankGroup | None = group

    def start(self, number: int) -> Exchange:
        """Say a number."""
        said = torch.zeros(self._world_size, dtype=torch.int64)
        said[self._collectives.rank] = number
        assert self._group is not None, "every rank is in it, until it is closed"
        return Exchange(self._collectives.start_all_reduce(said, self._group, dist.ReduceOp.SUM), said)

    def exchange(self, number: int) -> list[int]:
        """:meth:`start`, waited for."""
        return self.start(number).wait()

    def any_of(self, said: Sequence[bool]) -> list[bool]:
        """Say yes or no to some questions, as many on each rank; to each, whether any rank said yes."""
        votes = torch.tensor(said, dtype=torch.uint8)
        assert self._group is not None, "every rank is in it, until it is closed"
        if votes.numel():
            self._collectives.all_reduce(votes, self._group, dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def close(self) -> None:
        """Release the group. Safe to call twice."""
        if self._group is not None:
            destroy([self._group])
        self._group = None


class GroupVote:
    """:meth:`Agreement.any_of` among a group that exists, on its backend; on the main thread.

    Args:
        collectives: The seam.
        group: Who votes.
        device: What its backend takes.
    """

    def __init__(self, collectives: Collectives, group: RankGroup, device: torch.device) -> None:
        self._collectives = collectives
        self._group = group
        self._device = device

    def any_of(self, said: Sequence[bool]) -> list[bool]:
        """Say yes or no to some questions, as many on each rank; to each, whether any rank said yes."""
        votes = torch.tensor(said, dtype=torch.uint8, device=self._device)
        if votes.numel():
            self._collectives.all_reduce(votes, self._group, dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def close(self) -> None:
        """Nothing: the group belongs to who made it."""


class PartingVote:
    """:meth:`Agreement.any_of` among all ranks, and after :meth:`part` among those that train together.

    Args:
        everyone: Until then.
        inside: From then on.
    """

    def __init__(self, everyone: Agreement, inside: GroupVote) -> None:
        self._everyone = everyone
        self._inside = inside
        self._has_parted = False

    def part(self) -> None:
        """Workers train apart from now on."""
        self._has_parted = True

    def any_of(self, said: Sequence[bool]) -> list[bool]:
        """Say yes or no to some questions, as many on each rank; to each, whether any rank said yes."""
        return self._inside.any_of(said) if self._has_parted else self._everyone.any_of(said)

    def close(self) -> None:
        """Release the group of all ranks. Safe to call twice."""
        self._everyone.close()


class DelayedVote:
    """Wishes that any rank may have, known to all at the same call, without waiting on the training path.

    What a rank says in one call is read in the next, when it has long arrived; or some calls later, so that ranks may
    be as many calls apart.

    Args:
        agreement: How ranks hear each other; used by nothing else meanwhile, and closed with this. ``None`` for one
            rank, whose wishes are read at once.
        delay: After how many calls a wish is read.
    """

    def __init__(self, agreement: Agreement | None, *, delay: int = 1) -> None:
        self._agreement = agreement
        self._delay = delay
        self._under_way: deque[Exchange] = deque()
        self._lasting = 0
        self._once: deque[int] = deque()  # a signal handler may put something in at any moment

    def wish(self, number: int, *, once: bool = False) -> None:
        """Have a wish, for the next call or from now on; no collective, fit for a signal handler.

        Args:
            number: Which: a power of two.
            once: Say so in one call only.
        """
        if once:
            self._once.append(number)
        else:
            self._lasting |= number

    def cast(self) -> list[int]:
        """Say this rank's wishes; the sum of those of each rank ``delay`` calls ago, alike everywhere. Collective."""
        said = self._lasting
        while self._once:
            said |= self._once.popleft()
        if self._agreement is None:
            return [said]
        previous = self._under_way.popleft().wait() if len(self._under_way) == self._delay else []
        self._under_way.append(self._agreement.start(said))
        return previous

    def close(self) -> None:
        """Wait for what is under way, so that nothing is left on the network, and release the group. Safe twice."""
        try:
            while self._under_way:
                self._under_way.popleft().wait()
        except CollectiveError:  # a peer is gone; whoever waits for it says so
            pass
        finally:
            if self._agreement is not None:
                self._agreement.close()
