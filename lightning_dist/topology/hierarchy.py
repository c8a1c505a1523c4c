"""The legs of hierarchical collectives, and the bytes each host sends; pure.

Note: legs.
    A tensor is summed over the world in three moves. Each inner leg, from inside to outside, is a reduce-scatter: all
    members of a group contribute, and its first ``width`` members own one part each. The top leg is an all-reduce of
    each part among its owners. Then the inner legs run in reverse, as gathers. Uneven hosts differ in size, so the
    width of the host leg is the size of the smallest host: a host of 3 beside a host of 1 has one owner, who crosses
    the network for the whole host. Ranks that own nothing at a level appear in no group of the levels above.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.laws import ring_all_reduce_bytes
from lightning_dist.topology.spec import Cluster, Tier


@dataclass(frozen=True)
class Leg:
    """One level of a hierarchical collective.

    Attributes:
        tier: The tier its groups cross.
        groups: Disjoint groups of global ranks. The order of members is the order of parts: member i of a group, for
            i < ``width``, owns part i of what the group holds. Groups of one member may occur beside larger ones.
        width: Number of parts the leg cuts a tensor into. For the top leg, which cuts nothing: the size of its groups.
    """

    tier: Tier
    groups: tuple[tuple[int, ...], ...]
    width: int

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """The group a rank belongs to, or ``None`` if it takes no part in this leg."""
        index = self.group_index(rank)
        return None if index is None else self.groups[index]

    def group_index(self, rank: int) -> int | None:
        """Index in :attr:`groups` of a rank's group, or ``None``."""
        return self._index.get(rank)

    def part_of(self, rank: int) -> int | None:
        """Which of the ``width`` parts the rank owns after a reduce-scatter over its group; ``None``: none."""
        group = self.group_of(rank)
        if group is None:
            return None
        position = group.index(rank)
        return position if position < self.width else None

    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, group in enumerate(self.groups) for rank in group}


@dataclass(frozen=True)
class Hierarchy:
    """The legs of a cluster.

    Attributes:
        inner: Reduce-scatter legs, from inside to outside; empty where one all-reduce does it all.
        top: The all-reduce among owners of the same part: ``top.groups[p]`` are the owners of part p.
    """

    inner: tuple[Leg, ...]
    top: Leg

    @property
    def parts(self) -> int:
        """Number of pieces a tensor is cut into at the top: the product of the inner widths."""
        return len(self.top.groups)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """All legs, from inside to outside."""
        return (*self.inner, self.top)

    def owned_part(self, rank: int) -> int | None:
        """Which of the ``parts`` pieces a rank owns at the top, or ``None``.

        Parts nest: of two inner legs of widths a and b, owner i of the first and j of the second owns piece i * b + j,
        that is elements [(i * b + j) * N / (a * b), ...) of N that the product divides.
        """
        return self.top.group_index(rank)


def hierarchy_of(cluster: Cluster) -> Hierarchy:
    """The legs for a cluster: in host, then (with switches) across the hosts of a switch, then across all.

    A leg whose groups would all have one member is left out. On one host all ranks form the one group of the top leg;
    with one rank a host there is no inner leg.
    """
    # A unit is what a level joins: its list holds, for each part, the rank that owns it.
    units: list[list[int]] = []
    legs: list[Leg] = []
    hosts = [list(cluster.ranks_of_host(host)) for host in cluster.hosts]
    if len(hosts) == 1:
        return _joined(legs, Tier.HOST, [[rank] for rank in hosts[0]])
    units = _level(legs, Tier.HOST, [[[rank] for rank in ranks] for ranks in hosts])
    if not cluster.switches:
        return _joined(legs, Tier.WORLD, units)
    unit_of_host = dict(zip(cluster.hosts, units, strict=True))
    switches = [[unit_of_host[host] for host in cluster.hosts_of_switch(switch)] for switch in cluster.switches]
    if len(switches) == 1:
        return _joined(legs, Tier.SWITCH, switches[0])
    return _joined(legs, Tier.WORLD, _level(legs, Tier.SWITCH, switches))


def _level(legs: list[Leg], tier: Tier, families: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Join the units of each family by one leg; returns the families as units of the next level."""
    width = min(len(family) for family in families)
    parts = len(families[0][0])
    if any(len(family) > 1 for family in families):
        groups = tuple(tuple(unit[part] for unit in family) for family in families for part in range(parts))
        legs.append(Leg(tier, groups, width))
    return [[family[owner][part] for part in range(parts) for owner in range(width)] for family in families]


def _joined(legs: Sequence[Leg], tier: Tier, units: Sequence[list[int]]) -> Hierarchy:
    groups = tuple(zip(*units, strict=True))
    return Hierarchy(tuple(legs), Leg(tier, groups, len(units)))


# -- bytes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostTraffic:
    """What one host sends to other hosts in one all-reduce.

    Attributes:
        host: Its name.
        switch_bytes: Bytes to hosts under the same switch; 0 if no switches are known.
        world_bytes: Bytes to all other hosts.
    """

    host: str
    switch_bytes: float
    world_bytes: float

    @property
    def total_bytes(self) -> float:
        """All bytes the host sends."""
        return self.switch_bytes + self.world_bytes


def flat_traffic(cluster: Cluster, size_bytes: float) -> tuple[HostTraffic, ...]:
    """Bytes each host sends when ``size_bytes`` are all-reduced by one ring in rank order.

    Each edge of a ring of n ranks carries 2M(n-1)/n (:func:`~lightning_dist.laws.ring_all_reduce_bytes`), so a host
    sends that times the number of its ranks whose successor sits elsewhere: 1 if its ranks are contiguous, all of them
    if they are cyclic.
    """
    n = cluster.world_size
    edge_bytes = ring_all_reduce_bytes(size_bytes, n)
    edges = {host: {Tier.HOST: 0, Tier.SWITCH: 0, Tier.WORLD: 0} for host in cluster.hosts}
    for rank, host in enumerate(cluster.host_of_rank):
        edges[host][cluster.tier_of((rank, (rank + 1) % n))] += 1
    return tuple(
        HostTraffic(host, count[Tier.SWITCH] * edge_bytes, count[Tier.WORLD] * edge_bytes)
        for host, count in edges.items()
    )


def hierarchical_traffic(cluster: Cluster, size_bytes: float) -> tuple[HostTraffic, ...]:
    """Bytes each host sends when ``size_bytes`` are all-reduced along :func:`hierarchy_of`.

    On two tiers 2M(H-1)/H for each of H hosts, however uneven and wherever the ranks sit. A switch leg of g hosts and
    width w adds, to the host of position i, what it must give away: each part it does not own (M/w each), and, if it
    owns one, that part to g-1 others; both are M(g-1)/g where g = w. Its part of the top is 2(M/w)(S-1)/S over S
    switches.
    """
    legs = hierarchy_of(cluster)
    switch_bytes = dict.fromkeys(cluster.hosts, 0.0)
    world_bytes = dict.fromkeys(cluster.hosts, 0.0)
    held_bytes = size_bytes
    for leg in legs.inner:
        part_bytes = held_bytes / leg.width
        if leg.tier is Tier.SWITCH:
            for group in leg.groups:
                for position, rank in enumerate(group):
                    owner = position < leg.width
                    given = (leg.width - owner) + (len(group) - 1) * owner
                    switch_bytes[cluster.host_of_rank[rank]] += given * part_bytes
        held_bytes = part_bytes
    sent_bytes = ring_all_reduce_bytes(held_bytes, legs.top.width)
    target = {Tier.HOST: dict.fromkeys(cluster.hosts, 0.0), Tier.SWITCH: switch_bytes, Tier.WORLD: world_bytes}
    for group in legs.top.groups:
        for rank in group:
            target[legs.top.tier][cluster.host_of_rank[rank]] += sent_bytes
    return tuple(HostTraffic(host, switch_bytes[host], world_bytes[host]) for host in cluster.hosts)


@dataclass(frozen=True)
class PlacementCost:
    """What the present order of ranks costs a flat ring, against the best order on the same hosts.

    Attributes:
        host_edges: Ring edges that leave the host with most of them.
        best_host_edges: The same in the best order: 1, or 0 on one host.
        switch_edges: Ring edges that leave the switch with most of them; 0 if no switches are known.
        best_switch_edges: The same in the best order.
    """

    host_edges: int
    best_host_edges: int
    switch_edges: int
    best_switch_edges: int

    @property
    def ratio(self) -> float:
        """Traffic of the busiest link over that in the best order; 1.0 is best. Times follow where links dominate."""
        return max(
            self.host_edges / self.best_host_edges if self.best_host_edges else 1.0,
            self.switch_edges / self.best_switch_edges if self.best_switch_edges else 1.0,
        )


def placement_cost(cluster: Cluster) -> PlacementCost:
    """Edges of the ring in rank order that leave the busiest host and switch, and the fewest that could."""
    host_edges = dict.fromkeys(cluster.hosts, 0)
    switch_edges = dict.fromkeys(cluster.switches, 0)
    for rank, host in enumerate(cluster.host_of_rank):
        successor = cluster.host_of_rank[(rank + 1) % cluster.world_size]
        host_edges[host] += host != successor
        if switch_edges:
            switch = cluster.switch_of_host[host]
            switch_edges[switch] += switch != cluster.switch_of_host[successor]
    return PlacementCost(
        host_edges=max(host_edges.values()),
        best_host_edges=int(cluster.num_hosts > 1),
        switch_edges=max(switch_edges.values(), default=0),
        best_switch_edges=int(len(cluster.switches) > 1),
    )


def best_order(cluster: Cluster) -> tuple[int, ...]:
    """The ranks by switch, host and rank: a ring in this order leaves each host and each switch once."""
    hosts = [host for switch in cluster.switches for host in cluster.hosts_of_switch(switch)] or cluster.hosts
    return tuple(rank for host in hosts for rank in cluster.ranks_of_host(host))
