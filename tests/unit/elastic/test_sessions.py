"""Agents and their leader over loopback: rounds, orders, ends, and who is let in."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import open_session
from lightning_dist.elastic.policy.events import Cause, RoundDone, RoundStopped, Snapshot, WorkerFailed
from lightning_dist.elastic.session import End, Stop
from tests.support.agents import QUICK, Party, in_round, open_what_lasts, until


@pytest.fixture(scope="module", autouse=True)
def _what_lasts() -> None:
    open_what_lasts()


def test_one_host_goes_from_round_to_round_with_a_fresh_store_for_each() -> None:
    session = open_session(host="a", min_hosts=1, max_hosts=1, options=ElasticConfig(mode="restart"), pace=QUICK)
    try:
        session.ready(2)
        first = session.next_round(10)
        store = TCPStore(first.store_address, first.store_port, is_master=False)
        store.set("key", "of the first round")
        session.tell(WorkerFailed("a", 1, 1, Cause.SIGNAL, "signal 9", -9))
        assert until(session.order, "an order") == Stop(1, "rank 1 on host a was killed: signal 9")
        session.tell(RoundStopped("a", 1))
        session.ready(2)
        second = session.next_round(10)
        assert (second.number, second.run, second.world_size) == (2, first.run, 2)
        assert session.run == first.run
        assert second.store_port != first.store_port
        assert not TCPStore(second.store_address, second.store_port, is_master=False).check(["key"])
        session.tell(RoundDone("a", 2))
        assert session.next_round(10) == End(0, "training is over")
        assert session.order() == End(0, "training is over")
        assert session.order() is None
    finally:
        session.leave("done")
        session.leave("twice")


def test_all_hosts_get_the_same_round_and_the_same_end() -> None:
    with Party(min_hosts=3, max_hosts=3) as party:
        agents = party.agents("cab")
        for agent in agents:
            agent.ready()
        value = in_round(agents)
        assert {seat.address for seat in value.seats} == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
        for agent in agents:
            agent.session.tell(RoundDone(agent.host, 1))
        assert {agent.end().exit_code for agent in agents} == {0}


def test_a_host_whose_process_ends_is_gone_at_once_and_one_that_comes_late_is_taken_in() -> None:
    with Party(min_hosts=1, max_hosts=2) as party:
        a, b = agents = party.agents("ab")
        for agent in agents:
            agent.ready()
        in_round(agents)
        b.session.leave("its host is taken away")
        assert "host b" in a.stop().reason
        assert [seat.host for seat in in_round([a], step=7).seats] == ["a"]
        again = party.agent("b")
        again.ready()
        a.session.tell(Snapshot(2, 8))
        assert a.stop().at_snapshot
        assert [seat.host for seat in in_round([a, again]).seats] == ["a", "b"]
