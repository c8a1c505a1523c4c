"""Which server process holds which rank's rows, and where their copies are; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_dist.errors import CombinationError


class Home(NamedTuple):
    """A server process.

    Attributes:
        host: It runs on.
        number: Of those of its host.
    """

    host: str
    number: int

    def __str__(self) -> str:
        return f"the parameter server {self.number} of host {self.host}"


def homes_of(host_of_rank: Sequence[str], *, per_host: int, copies: int) -> tuple[tuple[Home, ...], ...]:
    """For each rank the processes that hold its rows, the one first that is asked.

    That one is on the rank's own host; ranks of a host are dealt to its processes in turn. A second copy is on the next
    host in the order of first ranks; where there is one host only, in its next process.

    Args:
        host_of_rank: Of each rank.
        per_host: Processes of a host; there are no more than it has ranks.
        copies: 1 or 2.

    Raises:
        CombinationError: Two copies are wanted, and there is one process.
    """
    hosts = list(dict.fromkeys(host_of_rank))
    counts = {host: min(per_host, list(host_of_rank).count(host)) for host in hosts}
    if copies > 1 and sum(counts.values()) == 1:
        raise CombinationError(
            "sync.parameter_server.replicas=1 needs a second server process: start ranks on another host, or write "
            "sync.parameter_server.servers_per_host=2"
        )
    turns = dict.fromkeys(hosts, 0)
    found: list[tuple[Home, ...]] = []
    for host in host_of_rank:
        turn, turns[host] = turns[host], turns[host] + 1
        own = Home(host, turn % counts[host])
        if copies == 1:
            found.append((own,))
            continue
        if len(hosts) > 1:
            other = hosts[(hosts.index(host) + 1) % len(hosts)]
            found.append((own, Home(other, turn % counts[other])))
        else:
            found.append((own, Home(host, (own.number + 1) % counts[host])))
    return tuple(found)
