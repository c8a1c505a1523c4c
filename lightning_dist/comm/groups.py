"""Process groups made from a hierarchy, in the same order on every rank.

Every lane gets groups of its own: two lanes that shared one could enter it in different orders on different ranks.

Note: every rank makes every group, also those it is not in.
    A group's name, by which its members find each other, comes from a counter that each rank keeps for itself; for who
    is not a member the call only counts. (``use_local_synchronization`` lets others stay away, but its names count the
    groups that a rank is in, so members with different numbers of groups wait for each other under different names;
    seen on torch 2.13.)
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.topology.hierarchy import Leg

_BROADCAST_BYTES = 250 << 20  # as DDP's


def default_group() -> dist.ProcessGroup:
    """The process group of all ranks, which is there once they have met."""
    group = dist.group.WORLD
    assert group is not None, "the default process group exists"
    return group


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the values of the first, several tensors in one message; every rank calls it, inside the seam.

    Args:
        tensors: Filled on the other ranks.
        group: Whose ranks; all if not given.
    """
    dist._broadcast_coalesced(default_group() if group is None else group, list(tensors), _BROADCAST_BYTES, 0)


def make_group(
    ranks: Sequence[int], *, rank: int, label: str, tier: str, timeout_s: float, backend: str | None = None
) -> RankGroup | None:
    """Make the process group of ``ranks``; every rank of the world calls it, in the same order.

    Args:
        ranks: Global ranks, in the order in which they own parts.
        rank: This process's global rank.
        label: What the group is for; names its events and errors.
        tier: The slowest tier the group crosses.
        timeout_s: Deadline of its operations, in seconds.
        backend: ``"gloo"``, ``"nccl"``, or ``None`` for the default group's.

    Returns:
        The group, or ``None`` for a rank that is not in it.
    """
    process_group = dist.new_group(
        sorted(ranks), timeout=datetime.timedelta(seconds=timeout_s), backend=backend, group_desc=f"hierdist:{label}"
    )
    if rank not in ranks:
        return None
    return RankGroup(tuple(ranks), tuple(ranks).index(rank), process_group, label, tier)


def make_leg_group(
    leg: Leg, *, rank: int, label: str, timeout_s: float, backend: str | None = None
) -> RankGroup | None:
    """Make all groups of one leg; every rank of the world calls it, in the same order.

    Returns:
        The group that holds ``rank``; ``None`` if the rank takes no part, or would be alone in it.
    """
    own: RankGroup | None = None
    for ranks in leg.groups:
        if len(ranks) > 1:
            group = make_group(ranks, rank=rank, label=label, tier=leg.tier.value, timeout_s=timeout_s, backend=backend)
            own = group if group is not None else own
    return own


def destroy(groups: Sequence[RankGroup]) -> None:
    """Release groups; errors of a backend that is already broken are of no interest any more."""
    for group in groups:
        try:
            dist.destroy_process_group(group.process_group)
        except (RuntimeError, ValueError, AssertionError):
            continue
