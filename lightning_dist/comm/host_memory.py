"""Whether ranks that are said to share a host share memory: the members of each host find out, then all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives
from lightning_dist.comm.shared_memory import HostMemory, open_host_memory


def open_memory_of(
    members: Sequence[int],
    *,
    collectives: Collectives,
    store: dist.Store,
    window_bytes: int,
    channels: int,
    timeout_s: float,
) -> HostMemory | None:
    """The memory of some ranks of one host, this one among them; each of them calls it.

    Args:
        members: Their global ranks, in order.
        collectives: The seam.
        store: Shared by all ranks, its keys used by nobody but these members.
        window_bytes: Size of each member's window.
        channels: Number of independent channels of signals.
        timeout_s: Deadline of the handshake and of each later wait, in seconds.

    Returns:
        The memory, or ``None`` for all members if any two do not share it.
    """
    return open_host_memory(
        store,
        members=members,
        index=tuple(members).index(collectives.rank),
        window_bytes=window_bytes,
        channels=channels,
        describe=lambda position: collectives.where(members[position]),
        alarm=collectives.alarm,
        timeout_s=timeout_s,
        setup_timeout_s=timeout_s,
    )


def holds_on_all_ranks(holds: bool, *, collectives: Collectives, store: dist.Store) -> bool:
    """Whether something holds on every rank; every rank of the world calls it.

    Args:
        holds: Whether it holds on this one.
        collectives: The seam.
        store: Shared by all ranks, its keys used for nothing else.
    """
    keys = [str(rank) for rank in range(len(collectives.host_of_rank))]
    store.set(str(collectives.rank), "yes" if holds else "no")
    store.wait(keys, collectives.deadline)
    return all(value == b"yes" for value in store.multi_get(keys))
