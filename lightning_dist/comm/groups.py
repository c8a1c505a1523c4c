"""Process groups made from a hierarchy, in the same order on every rank.

Only the members of a group take part in making it, so a cluster of many hosts does not pay one rendezvous of the world for
every host. Every lane gets groups of its own: two lanes that shared one could enter it in different orders on different ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.topology.hierarchy import Leg


def make_group(
    ranks: Sequence[int], *, rank: int, label: str, tier: str, timeout_s: float, backend: str | None = None
) -> RankGroup:
    """Make the process group of ``ranks``; each of them calls it, in the same order among groups it shares with others.

    Args:
        ranks: Global ranks, in the order in which they own parts.
        rank: This process's global rank, one of ``ranks``.
        label: What the group is for; names its events and errors.
        tier: The slowest tier the group crosses.
        timeout_s: Deadline of its operations, in seconds.
        backend: ``"gloo"``, ``"nccl"``, or ``None`` for the default group's.
    """
    process_group = dist.new_group(
        sorted(ranks),
        timeout=datetime.timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"hierdist:{label}",
    )
    return RankGroup(tuple(ranks), tuple(ranks).index(rank), process_group, label, tier)


def make_leg_group(leg: Leg, *, rank: int, label: str, timeout_s: float, backend: str | None = None) -> RankGroup | None:
    """The group of one leg that holds ``rank``; ``None`` if the rank takes no part, or would be alone in it."""
    ranks = leg.group_of(rank)
    if ranks is None or len(ranks) < 2:
        return None
    return make_group(ranks, rank=rank, label=label, tier=leg.tier.value, timeout_s=timeout_s, backend=backend)


def destroy(groups: Sequence[RankGroup]) -> None:
    """Release groups; errors of a backend that is already broken are of no interest any more."""
    for group in groups:
        try:
            dist.destroy_process_group(group.process_group)
        except (RuntimeError, ValueError, AssertionError):
            continue
