"""Legs and the bytes that follow from them."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given

from lightning_dist.laws import flat_bytes_per_host, hierarchical_bytes_per_host
from lightning_dist.topology.hierarchy import (
    Hierarchy,
    Leg,
    best_order,
    flat_traffic,
    hierarchical_traffic,
    hierarchy_of,
    placement_cost,
)
from lightning_dist.topology.spec import Cluster, Tier
from tests.unit.topology.strategies import clusters


@pytest.mark.parametrize(
    ("notation", "inner", "top"),
    [
        ("1", [], (Tier.HOST, [(0,)])),
        ("3", [], (Tier.HOST, [(0, 1, 2)])),
        ("3x1", [], (Tier.WORLD, [(0, 1, 2)])),
        ("2x2", [(Tier.HOST, [(0, 1), (2, 3)], 2)], (Tier.WORLD, [(0, 2), (1, 3)])),
        ("2x2:cyclic", [(Tier.HOST, [(0, 2), (1, 3)], 2)], (Tier.WORLD, [(0, 1), (2, 3)])),
        ("3+1", [(Tier.HOST, [(0, 1, 2), (3,)], 1)], (Tier.WORLD, [(0, 3)])),
        ("2+3", [(Tier.HOST, [(0, 1), (2, 3, 4)], 2)], (Tier.WORLD, [(0, 2), (1, 3)])),
        ("1x2x2", [(Tier.HOST, [(0, 1), (2, 3)], 2)], (Tier.SWITCH, [(0, 2), (1, 3)])),
        ("2x1x2", [(Tier.HOST, [(0, 1), (2, 3)], 2)], (Tier.WORLD, [(0, 2), (1, 3)])),
        ("2x2x1", [(Tier.SWITCH, [(0, 1), (2, 3)], 2)], (Tier.WORLD, [(0, 2), (1, 3)])),
        (
            "2x2x2",
            [(Tier.HOST, [(0, 1), (2, 3), (4, 5), (6, 7)], 2), (Tier.SWITCH, [(0, 2), (1, 3), (4, 6), (5, 7)], 2)],
            (Tier.WORLD, [(0, 4), (2, 6), (1, 5), (3, 7)]),
        ),
    ],
)
def test_legs_of_known_clusters(
    notation: str, inner: list[tuple[Tier, list[tuple[int, ...]], int]], top: tuple[Tier, list[tuple[int, ...]]]
) -> None:
    legs = hierarchy_of(Cluster.parse(notation))
    assert [(leg.tier, list(leg.groups), leg.width) for leg in legs.inner] == inner
    assert (legs.top.tier, list(legs.top.groups)) == top


def test_parts_nest() -> None:
    legs = hierarchy_of(Cluster.parse("2x2x2"))
    assert legs.parts == 4
    assert [legs.owned_part(rank) for rank in range(8)] == [0, 2, 1, 3, 0, 2, 1, 3]
    assert legs.inner[0].part_of(3) == 1
    assert legs.inner[1].part_of(3) == 1  # host1 is the second host of its switch


def test_a_leg_knows_who_takes_no_part() -> None:
    leg = Leg(Tier.HOST, ((0, 1, 2), (3,)), 1)
    assert leg.group_of(1) == (0, 1, 2)
    assert (leg.part_of(0), leg.part_of(1), leg.part_of(3), leg.part_of(9)) == (0, None, 0, None)
    assert leg.group_of(9) is None
    assert hierarchy_of(Cluster.parse("3+1")).owned_part(1) is None


def all_reduce(legs: Hierarchy, tensors: dict[int, list[int]]) -> dict[int, list[int]]:
    """The three moves, on lists, by the letter of the Note in the module."""
    held = {rank: list(values) for rank, values in tensors.items()}
    for leg in legs.inner:
        after: dict[int, list[int]] = {}
        for group in leg.groups:
            total = [sum(column) for column in zip(*(held[rank] for rank in group), strict=True)]
            size = len(total) // leg.width
            for part, rank in enumerate(group[: leg.width]):
                after[rank] = total[part * size : (part + 1) * size]
        held = after
    for group in legs.top.groups:
        total = [sum(column) for column in zip(*(held[rank] for rank in group), strict=True)]
        held.update(dict.fromkeys(group, total))
    for leg in reversed(legs.inner):
        held = {rank: [v for owner in g[: leg.width] for v in held[owner]] for g in leg.groups for rank in g}
    return held


@given(clusters())
def test_the_legs_sum_over_all_ranks(cluster: Cluster) -> None:
    legs = hierarchy_of(cluster)
    size = legs.parts
    tensors = {rank: [(rank + 1) * 1000 + i for i in range(size)] for rank in range(cluster.world_size)}
    expected = [sum(values[i] for values in tensors.values()) for i in range(size)]
    assert all_reduce(legs, tensors) == dict.fromkeys(tensors, expected)


@given(clusters())
def test_owners_hold_the_part_they_are_said_to_own(cluster: Cluster) -> None:
    legs = hierarchy_of(cluster)
    for rank in range(cluster.world_size):
        parts = [leg.part_of(rank) for leg in legs.inner]
        if None in parts:
            assert legs.owned_part(rank) is None
            continue
        nested = 0
        for leg, part in zip(legs.inner, parts, strict=True):
            assert part is not None
            nested = nested * leg.width + part
        assert legs.owned_part(rank) == nested


@given(clusters())
def test_groups_are_disjoint_and_cross_no_slower_tier(cluster: Cluster) -> None:
    legs = hierarchy_of(cluster)
    present = set(range(cluster.world_size))
    for leg in legs.legs:
        members = [rank for group in leg.groups for rank in group]
        assert len(members) == len(set(members))
        assert set(members) == present
        assert all(len(group) >= leg.width for group in leg.groups)
        assert max(cluster.tier_of(group) for group in leg.groups) is leg.tier
        if leg is not legs.top:
            assert any(len(group) > 1 for group in leg.groups)
            present = {rank for group in leg.groups for rank in group[: leg.width]}
    assert legs.parts == math.prod(leg.width for leg in legs.inner)
    assert all(len(group) == legs.top.width for group in legs.top.groups)


@given(clusters(switches=False))
def test_two_tiers_send_the_formula_whatever_the_placement(cluster: Cluster) -> None:
    expected = hierarchical_bytes_per_host(120.0, cluster.num_hosts)
    assert all(t.total_bytes == pytest.approx(expected) for t in hierarchical_traffic(cluster, 120.0))


@given(clusters())
def test_traffic_is_what_the_legs_move(cluster: Cluster) -> None:
    """Count every part that leaves a host or a switch, group by group."""
    legs = hierarchy_of(cluster)
    sent = dict.fromkeys(cluster.hosts, 0.0)
    part_bytes = 60.0
    for leg in legs.inner:
        part_bytes /= leg.width
        for group in leg.groups:
            for owner in group[: leg.width]:
                for other in group:
                    if cluster.host_of(owner) != cluster.host_of(other):
                        sent[cluster.host_of(other)] += part_bytes  # reduce-scatter, to the owner
                        sent[cluster.host_of(owner)] += part_bytes  # gather, from the owner
    for group in legs.top.groups:
        for rank in group:
            if cluster.tier_of(group) is not Tier.HOST:
                sent[cluster.host_of(rank)] += 2 * part_bytes * (len(group) - 1) / len(group)
    assert {t.host: pytest.approx(t.total_bytes) for t in hierarchical_traffic(cluster, 60.0)} == sent


@given(clusters())
def test_flat_traffic_counts_ring_edges(cluster: Cluster) -> None:
    n = cluster.world_size
    leaving = dict.fromkeys(cluster.hosts, 0)
    for rank in range(n):
        leaving[cluster.host_of(rank)] += cluster.host_of(rank) != cluster.host_of((rank + 1) % n)
    expected = {host: flat_bytes_per_host(60.0, n, leaving_edges=edges) for host, edges in leaving.items()}
    assert {t.host: pytest.approx(t.total_bytes) for t in flat_traffic(cluster, 60.0)} == expected


@given(clusters())
def test_the_best_order_costs_nothing_over_itself(cluster: Cluster) -> None:
    order = best_order(cluster)
    assert sorted(order) == list(range(cluster.world_size))
    reordered = Cluster(tuple(cluster.host_of(rank) for rank in order), cluster.switch_of_host)
    assert placement_cost(reordered).ratio == 1.0
    assert placement_cost(cluster).ratio >= 1.0


@pytest.mark.parametrize(
    ("notation", "ratio"),
    [("1", 1), ("4", 1), ("2x2", 1), ("2x2:cyclic", 2), ("2x4:cyclic", 4), ("4x2:cyclic", 2), ("2x2x2:cyclic", 2)],
)
def test_placement_cost(notation: str, ratio: float) -> None:
    assert placement_cost(Cluster.parse(notation)).ratio == ratio


def test_placement_cost_sees_switches() -> None:
    cluster = Cluster.from_hosts({"a": [0], "b": [1], "c": [2], "d": [3]}, switches={"s": ["a", "c"], "t": ["b", "d"]})
    cost = placement_cost(cluster)
    assert (cost.host_edges, cost.switch_edges, cost.ratio) == (1, 2, 2.0)


def test_three_tiers_keep_traffic_under_the_switch() -> None:
    first = hierarchical_traffic(Cluster.parse("2x4x2"), 8.0)[0]
    assert first.switch_bytes == 2 * 8.0 * 3 / 4
    assert first.world_bytes == 2 * (8.0 / 4) / 2


def test_ten_thousand_ranks() -> None:
    start = time.perf_counter()
    cluster = Cluster.uniform(1250, 8, order="cyclic")
    legs = hierarchy_of(cluster)
    flat_traffic(cluster, 1.0)
    hierarchical_traffic(cluster, 1.0)
    assert (legs.parts, legs.top.width) == (8, 1250)
    assert time.perf_counter() - start < 10  # milliseconds; the bound only catches a quadratic slip
