"""Which rank keeps a copy of whose snapshot: on another host, in pairs of hosts. Pure: names in, ranks out.

Hosts are paired, so that two hosts lost at once cost a snapshot only if they are a pair: of n hosts, n/2 pairs of
n(n-1)/2. In a ring, where each host keeps its neighbour's, it would be n. An odd number of hosts has one ring of three.
Placement of "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP 2023, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence


def buddies(host_of_rank: Sequence[str]) -> tuple[int | None, ...]:
    """The rank that keeps a copy for each rank; ``None`` for all if there is one host.

    The ranks of a host are dealt in turn to those of the other. Hosts of like size are paired, so that no host keeps
    much more than it gives.

    Args:
        host_of_rank: Name of each rank's host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks_of.setdefault(host, []).append(rank)
    if len(ranks_of) < 2:
        return (None,) * len(host_of_rank)
    hosts = sorted(ranks_of, key=lambda host: (-len(ranks_of[host]), ranks_of[host][0]))
    found: list[int | None] = [None] * len(host_of_rank)
    for group in _groups(hosts):
        for index, host in enumerate(group):
            keepers = ranks_of[group[(index + 1) % len(group)]]
            for position, rank in enumerate(ranks_of[host]):
                found[rank] = keepers[position % len(keepers)]
    return tuple(found)


def _groups(hosts: Sequence[str]) -> list[Sequence[str]]:
    """Two by two; the last three together if their number is odd."""
    paired = len(hosts) - (3 if len(hosts) % 2 else 0)
    pairs: list[Sequence[str]] = [hosts[first : first + 2] for first in range(0, paired, 2)]
    return pairs if paired == len(hosts) else [*pairs, hosts[paired:]]
