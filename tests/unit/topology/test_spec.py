"""Clusters as values."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given

from lightning_dist.errors import TopologyError
from lightning_dist.topology.spec import Cluster, Link, Tier
from tests.unit.topology.strategies import clusters


def test_tiers_are_ordered_from_near_to_far() -> None:
    assert Tier.HOST < Tier.SWITCH < Tier.WORLD
    assert max([Tier.SWITCH, Tier.HOST]) is Tier.SWITCH


@pytest.mark.parametrize(
    ("notation", "ranks_of_hosts"),
    [
        ("1", [[0]]),
        ("4", [[0, 1, 2, 3]]),
        ("2x2", [[0, 1], [2, 3]]),
        ("2x2:cyclic", [[0, 2], [1, 3]]),
        ("3+1", [[0, 1, 2], [3]]),
        ("3+1:cyclic", [[0, 2, 3], [1]]),
        ("2x2+1x3", [[0, 1], [2, 3], [4, 5, 6]]),
        (" 4x1:contiguous ", [[0], [1], [2], [3]]),
    ],
)
def test_parse_places_ranks(notation: str, ranks_of_hosts: list[list[int]]) -> None:
    cluster = Cluster.parse(notation)
    assert [list(cluster.ranks_of_host(host)) for host in cluster.hosts] == ranks_of_hosts
    assert not cluster.switches


def test_parse_places_hosts_under_switches() -> None:
    cluster = Cluster.parse("2x2x1+1x3x2")
    assert [cluster.hosts_of_switch(switch) for switch in cluster.switches] == [
        ("host0", "host1"),
        ("host2", "host3"),
        ("host4", "host5", "host6"),
    ]
    assert cluster.ranks_per_host == (1, 1, 1, 1, 2, 2, 2)


@pytest.mark.parametrize("notation", ["", "0x2", "2x", "a", "2x2x2x2", "2x2:random", "-1", "2+0"])
def test_parse_refuses_what_it_cannot_read(notation: str) -> None:
    with pytest.raises(TopologyError, match=r"write e\.g\.|allowed: contiguous, cyclic"):
        Cluster.parse(notation)


def test_parse_refuses_switches_for_some_hosts_only() -> None:
    with pytest.raises(TopologyError, match="no switch is given for host host2"):
        Cluster.parse("1x2x2+3")


@pytest.mark.parametrize(
    ("hosts", "switches", "message"),
    [
        ({}, None, "at least one rank"),
        ({"a": [0, 1], "b": [1]}, None, "rank 1 is listed twice: on 'a' and on 'b'"),
        ({"a": [0, 0]}, None, "rank 0 is listed twice"),
        ({"a": [0, 1], "b": [3]}, None, r"missing: 2, out of range: 3"),
        ({"a": [-1]}, None, "lists -1"),
        ({"a": ["0"]}, None, "lists '0'"),
        ({"a": [True]}, None, "lists True"),
        ({"a": [0], "b": []}, None, "host 'b' holds no rank"),
        ({"": [0]}, None, "non-empty"),
        ({"a": [0], "b": [1]}, {"s": ["a"]}, "no switch is given for host b"),
        ({"a": [0], "b": [1]}, {"s": ["a", "b", "c"]}, "hold no rank: c; hosts are: a, b"),
        ({"a": [0], "b": [1]}, {"s": ["a", "b"], "t": ["b"]}, "host 'b' is under two switches: 's' and 't'"),
    ],
)
def test_from_hosts_says_what_is_wrong(
    hosts: dict[str, list[int]], switches: dict[str, list[str]] | None, message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        Cluster.from_hosts(hosts, switches=switches)


def test_uniform_and_questions() -> None:
    cluster = Cluster.uniform(2, 3, order="cyclic")
    assert cluster.world_size == 6
    assert cluster.num_hosts == 2
    assert cluster.ranks_per_host == (3, 3)
    assert [cluster.rank_in_host(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert cluster.host_of(3) == "host1"
    assert cluster.switch_of(3) is None
    assert cluster.tiers == (Tier.HOST, Tier.WORLD)
    with pytest.raises(TopologyError, match="rank 6 is out of range"):
        cluster.host_of(6)
    with pytest.raises(TopologyError, match="host 'x' is unknown"):
        cluster.ranks_of_host("x")
    with pytest.raises(TopologyError, match="switch 'x' is unknown"):
        cluster.hosts_of_switch("x")
    with pytest.raises(TopologyError, match="at least one host"):
        Cluster.uniform(0, 3)


def test_tier_of_is_the_slowest_a_group_crosses() -> None:
    cluster = Cluster.parse("2x2x2")
    assert cluster.tier_of([3]) is Tier.HOST
    assert cluster.tier_of([0, 1]) is Tier.HOST
    assert cluster.tier_of([0, 2]) is Tier.SWITCH
    assert cluster.tier_of([0, 1, 2, 4]) is Tier.WORLD
    assert cluster.without_switches().tier_of([0, 2]) is Tier.WORLD


def test_hosts_are_ordered_by_first_rank() -> None:
    assert Cluster.from_hosts({"b": [1, 2], "a": [0]}).hosts == ("a", "b")


def test_flattened_has_a_host_for_each_rank() -> None:
    flat = Cluster.parse("1x2x2").flattened()
    assert flat.hosts == ("host0/0", "host0/1", "host1/0", "host1/1")
    assert not flat.switches


def test_links_are_checked() -> None:
    with pytest.raises(TopologyError, match="positive"):
        Link(0.0, None)
    with pytest.raises(TopologyError, match="negative"):
        Link(None, -1.0)
    assert Link(None, None) == Link()


def test_from_dict_refuses_other_things() -> None:
    with pytest.raises(TopologyError, match="not a cluster"):
        Cluster.from_dict({"ranks": 3})


@given(clusters())
def test_each_rank_is_found_where_it_was_put(cluster: Cluster) -> None:
    listed = [rank for host in cluster.hosts for rank in cluster.ranks_of_host(host)]
    assert sorted(listed) == list(range(cluster.world_size))
    for rank in range(cluster.world_size):
        assert cluster.ranks_of_host(cluster.host_of(rank))[cluster.rank_in_host(rank)] == rank
    firsts = [cluster.ranks_of_host(host)[0] for host in cluster.hosts]
    assert firsts == sorted(firsts)


@given(clusters())
def test_json_pickle_and_copy_keep_it(cluster: Cluster) -> None:
    cluster = cluster.with_links({Tier.HOST: Link(1e9, None), Tier.WORLD: Link(2.5e7, 1e-4)})
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster
    assert hash(copy.deepcopy(cluster)) == hash(cluster)
