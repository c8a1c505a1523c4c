"""The way of each rank's shard through the legs of a hierarchical reduce-scatter or all-gather; pure.

Note: ways.
    In a reduce-scatter every rank holds one segment for each rank, its destination. Going out, each inner leg sums the
    segments over its group and leaves each with one owner; the top leg sums them over hosts (or switches) and leaves
    each where its destination lives; coming back in, the inner legs hand each segment to the member that leads to its
    destination. Where hosts are even, owner and destination are the same rank and nothing is handed over. An all-gather
    runs the same way backwards.

    The owner of a segment at a leg is chosen by its destination's place (its index in its host, then its host's index
    under its switch) modulo the leg's width, so that all groups of a leg agree without talking, whatever the order of
    ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.topology.hierarchy import Hierarchy, Leg, hierarchy_of
from lightning_dist.topology.spec import Cluster, Tier


@dataclass(frozen=True)
class Hop:
    """What one rank does at one leg.

    Attributes:
        leg: Index among the hierarchy's legs, inside to outside.
        group: Global ranks of the leg's group.
        index: This rank's position in it.
        held: Destinations whose segments every member holds before the leg, ascending.
        owners: For each of ``held``: position of the member it is left with.
        inward: For each of ``held`` that lives under this group: position of the member that leads to it.
    """

    leg: int
    group: tuple[int, ...]
    index: int
    held: tuple[int, ...]
    owners: tuple[int, ...]
    inward: dict[int, int]

    def owned_by(self, position: int) -> tuple[int, ...]:
        """The destinations left with a member, ascending."""
        return tuple(d for d, owner in zip(self.held, self.owners, strict=True) if owner == position)

    def handed_over(self, giver: int, taker: int) -> tuple[int, ...]:
        """The destinations that one member hands to another on the way in."""
        return tuple(d for d in self.owned_by(giver) if self.inward.get(d) == taker)


@dataclass(frozen=True)
class Route:
    """The hops of one rank, inside to outside; the last leg's, if the rank takes part in it, is the top's.

    Attributes:
        hops: One for each leg the rank takes part in.
        num_legs: Number of legs of the hierarchy.
    """

    hops: tuple[Hop, ...]
    num_legs: int


def route_of(cluster: Cluster, rank: int, hierarchy: Hierarchy | None = None) -> Route:
    """The way through the legs as seen by ``rank``."""
    hierarchy = hierarchy or hierarchy_of(cluster)
    held = tuple(range(cluster.world_size))
    hops: list[Hop] = []
    for number, leg in enumerate(hierarchy.legs):
        group = leg.group_of(rank)
        if group is None:
            break
        index = group.index(rank)
        unit_position = {_unit(cluster, leg, member): position for position, member in enumerate(group)}
        inward = {d: unit_position[unit] for d in held if (unit := _unit(cluster, leg, d)) in unit_position}
        if leg is hierarchy.top:
            owners = tuple(inward[d] for d in held)
        else:
            owners = tuple(_index_in_unit(cluster, leg, d) % leg.width for d in held)
        hop = Hop(number, group, index, held, owners, inward)
        hops.append(hop)
        held = hop.owned_by(index)
    return Route(tuple(hops), len(hierarchy.legs))


def _unit(cluster: Cluster, leg: Leg, rank: int) -> object:
    """What a leg's members stand for: ranks in a host, hosts under a switch, hosts or switches in the world."""
    if leg.tier is Tier.HOST:
        return rank
    if leg.tier is Tier.SWITCH or len(cluster.switches) < 2:
        return cluster.host_of(rank)
    return cluster.switch_of(rank)


def _index_in_unit(cluster: Cluster, leg: Leg, rank: int) -> int:
    if leg.tier is Tier.HOST:
        return cluster.rank_in_host(rank)
    switch = cluster.switch_of(rank)
    assert switch is not None, "only clusters with switches have a leg under a switch"
    return cluster.hosts_of_switch(switch).index(cluster.host_of(rank))
