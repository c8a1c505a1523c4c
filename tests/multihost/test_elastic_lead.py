"""Agents on hosts of their own, and a link that is pulled: who leads on each side, and that only one side trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.elastic.chaos.host import links
from lightning_dist.elastic.leading import Endpoint
from lightning_dist.elastic.policy.events import Snapshot
from lightning_dist.elastic.policy.situation import Waits
from tests.support.agents import DEADLINE_S, Agent, Party, in_round
from tests.support.cluster import NamespaceCluster, in_namespace


class HostParty(Party):
    """A :class:`Party` whose agents are on the hosts of a cluster; the first two can lead."""

    def __init__(self, cluster: NamespaceCluster, **arguments: Any) -> None:
        super().__init__(0, **arguments)
        self._cluster = cluster
        self.endpoints = [Endpoint(cluster[name].address, cluster[name].free_port()) for name in "ab"]

    def agent(self, host: str, **arguments: Any) -> Agent:
        """Its threads stay in the host's network."""
        place = self._cluster[host]
        return in_namespace(place.netns, lambda: super(HostParty, self).agent(host, address=place.address, **arguments))


@pytest.mark.parametrize("direction", ["both", *(pytest.param(way, marks=pytest.mark.sweep) for way in ("in", "out"))])
@pytest.mark.parametrize("cut", ["a", pytest.param("b", marks=pytest.mark.sweep)])
def test_when_a_link_is_cut_the_others_go_on_and_take_the_host_back(
    make_cluster: Callable[..., NamespaceCluster], cut: str, direction: str
) -> None:
    """Host a leads; b, cut off, leads nobody but itself, and leaves it to a again."""
    cluster = make_cluster(3)
    with HostParty(cluster, min_hosts=1, max_hosts=3) as party:
        agents = party.begun("abc")
        away, *others = sorted(agents, key=lambda agent: agent.host != cut)
        mend = in_namespace(cluster[cut].netns, lambda: links.cut("eth0", direction))
        for agent in others:
            assert agent.stop().number == 1
        value = in_round(others, step=5)
        assert (value.number, {seat.host for seat in value.seats}) == (2, {agent.host for agent in others})
        away.stop()
        assert away.session.next_round(0.5) is None  # one of three trains nothing
        in_namespace(cluster[cut].netns, mend)
        others[0].session.tell(Snapshot(2, 6))
        for agent in others:
            assert agent.stop().at_snapshot
        assert len(in_round(agents, step=7).seats) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("cut", ["a", "b"])
def test_of_two_hosts_one_goes_on_whichever_link_is_pulled(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path, cut: str
) -> None:
    cluster = make_cluster(2)
    with HostParty(cluster, min_hosts=1, max_hosts=2, run="run", fence=tmp_path, waits=Waits(fence_s=1.0)) as party:
        agents = party.begun("ab")
        cluster[cut].set_link(up=False)
        for agent in agents:
            agent.stop()
        rounds = [agent.session.next_round(DEADLINE_S / 3) for agent in agents]
        assert [value is not None for value in rounds].count(True) == 1
        assert len(list((tmp_path / "run").glob("round-*"))) == 2
