"""Agents and their leader over loopback: rounds, orders, ends, and who is let in."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_dist import incidents, wire
from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import Pace, open_session
from lightning_dist.elastic.leading.channel import ROLES
from lightning_dist.elastic.policy.events import (
    Cause,
    HostUnhealthy,
    Progress,
    RoundDone,
    RoundStopped,
    Snapshot,
    WorkerFailed,
)
from lightning_dist.elastic.policy.situation import Presence, Waits
from lightning_dist.elastic.rounds import Seat
from lightning_dist.elastic.session import End, Stop
from lightning_dist.errors import ConfigError
from tests.support.agents import DEADLINE_S, QUICK, SECRET, Party, in_round, until


def test_one_host_goes_from_round_to_round() -> None:
    session = open_session(host="a", min_hosts=1, max_hosts=1, options=ElasticConfig(mode="restart"), pace=QUICK)
    try:
        session.ready(2, store_port=11)
        first = session.next_round(10)
        assert first.seats == (Seat("a", "127.0.0.1", 2, 11),)
        session.tell(WorkerFailed("a", 1, 1, Cause.SIGNAL, "signal 9", -9))
        assert until(session.order, "an order") == Stop(1, "rank 1 on host a was killed: signal 9")
        session.tell(RoundStopped("a", 1))
        session.ready(2, store_port=12)
        second = session.next_round(10)
        assert (second.number, second.run, second.world_size) == (2, first.run, 2)
        assert session.run == first.run
        assert second.seats == (Seat("a", "127.0.0.1", 2, 12),)
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


def test_who_calls_while_the_others_still_leave_hears_of_the_end() -> None:
    with Party(min_hosts=2, max_hosts=2, pace=Pace(0.1, 10.0)) as party:
        agents = party.begun("ab")
        for agent in agents:
            agent.session.tell(RoundDone(agent.host, 1))
        assert agents[0].end() == party.agent("c").end() == End(0, "training is over")


def test_a_host_whose_process_ends_is_gone_at_once_and_one_that_comes_late_is_taken_in() -> None:
    with Party(min_hosts=1, max_hosts=2) as party:
        a, b = party.begun("ab")
        b.session.leave("its host is taken away")
        assert "host b" in a.stop().reason
        assert [seat.host for seat in in_round([a], step=7).seats] == ["a"]
        again = party.agent("b")
        again.ready()
        a.session.tell(Snapshot(2, 8))
        assert a.stop().at_snapshot
        assert [seat.host for seat in in_round([a, again]).seats] == ["a", "b"]


def test_an_end_with_an_error_reaches_all_hosts_and_is_recorded(tmp_path: Path) -> None:
    with Party(min_hosts=2, max_hosts=2, mode="off", record=tmp_path) as party:
        a, b = agents = party.agents("ab")
        for agent in agents:
            agent.ready()
        value = in_round(agents, step=1)
        rank = value.first_rank("b")
        b.session.tell(WorkerFailed("b", 1, rank, Cause.EXIT, "ValueError: no", 3, silent_s=0.5))
        for agent in agents:
            order = agent.stop()
            assert order.reason == f"rank {rank} on host b ended with an error: ValueError: no"
        assert {a.end().exit_code, b.end().exit_code} == {3}
        run = a.session.run
    (incident,) = incidents.read(tmp_path)
    assert (incident.what, incident.action, incident.run) == ("exit", "ended", run)
    assert (incident.lost_ranks, incident.seconds["detect"]) == ((rank,), 0.5)


def test_a_round_that_was_stopped_before_the_agent_took_it_is_not_started() -> None:
    with Party(min_hosts=2, max_hosts=2, mode="restart") as party:
        a, b = agents = party.agents("ab")
        for agent in agents:
            agent.ready()
        value = b.next()
        until(lambda: a.session._inbox._round is not None, "a was told of the round")
        b.session.tell(WorkerFailed("b", 1, value.first_rank("b"), Cause.SIGNAL))
        b.stop()
        until(lambda: a.session._inbox._round != value, "a was told to stop")
        assert a.next().number == 2
        assert b.next().number == 2
        assert a.session.order() is None


def test_a_slow_host_is_reported_once_and_stays() -> None:
    with Party(min_hosts=2, max_hosts=2) as party:
        a, b = agents = party.begun("ab")
        steps = itertools.count(2)

        def said() -> list[str]:
            step = next(steps)
            a.session.tell(Progress("a", 1, step, (0.1, 0.1)))
            b.session.tell(Progress("b", 1, step, (0.5, 0.5)))
            return a.said

        until(lambda: any("slow" in text for text in said()), "that b is slow")
        for agent in agents:
            agent.session.tell(RoundDone(agent.host, 1))
        assert a.end().exit_code == 0
        assert [text.partition(":")[0] for text in a.said if "slow" in text] == ["host b is slow"]


def test_an_agent_with_another_secret_is_told_so_and_nobody_else_is_troubled() -> None:
    with Party(min_hosts=1, max_hosts=2, waits=Waits(join_s=0.0)) as party:
        a = party.agent("a")
        stranger = party.agent("b", secret=b"a secret that nobody shares")
        end = stranger.end()
        assert end.exit_code == 1
        assert end.reason == f"who answers at {party.endpoints[0]} has another secret; give all hosts the same one"
        a.ready()
        assert in_round([a]).number == 1


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), bytes(1 << 16)],
    ids=["nothing", "HTTP", "noise", "zeros"],
)
def test_what_a_stranger_sends_troubles_nobody(sent: bytes) -> None:
    with Party(min_hosts=1, max_hosts=1) as party:
        a = party.agent("a")
        endpoint = party.endpoints[0]
        with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as connection:
            connection.sendall(sent)
            connection.settimeout(30)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):  # until the leader hangs up
                    pass
        a.ready()
        assert in_round([a]).number == 1


@pytest.mark.parametrize("sent", [b"\xff" * 64, wire.pack({"kind": "told"}), wire.pack({"kind": "hello", "told": 5})])
def test_what_one_that_knows_the_secret_sends_troubles_nobody_either(sent: bytes) -> None:
    with Party(min_hosts=1, max_hosts=1) as party:
        a = party.agent("a")
        endpoint = party.endpoints[0]
        with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as connection:
            wire.prove(connection, SECRET, ROLES, is_server=False)
            connection.sendall(sent)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
        a.ready()
        assert in_round([a]).number == 1


def test_a_host_that_leaves_in_order_is_known_to_be_gone() -> None:
    with Party(min_hosts=2, max_hosts=2) as party:
        a, b = party.begun("ab")
        b.session.leave("its host is taken away")
        assert "its host is taken away" in a.order().reason
        assert a.leader._policy.situation.hosts["b"].presence is Presence.GONE


def test_a_member_that_falls_silent_is_lost_but_may_live_and_comes_back() -> None:
    with Party(min_hosts=1, max_hosts=3) as party:
        a, b, c = agents = party.begun("abc")
        with c.paused():
            assert "nothing was heard for 0.5 s" in a.stop().reason
            b.stop()
            in_round([a, b], step=5)
        assert "was away" in c.stop().reason
        a.session.tell(Snapshot(2, 6))
        a.stop()
        b.stop()
        assert len(in_round(agents, step=7).seats) == 3


def test_a_host_that_is_not_fit_leaves_once_somebody_has_heard_why() -> None:
    with Party(min_hosts=1, max_hosts=2) as party:
        b = party.agent("b")
        b.session.tell(HostUnhealthy("b", "disk: /runs cannot be written"))
        assert not b.session.told(0.0)
        a = party.agent("a")
        assert b.session.told(DEADLINE_S)
        b.session.leave("it is not fit")
        until(lambda: "host b is not fit to train: disk: /runs cannot be written" in a.said, "a says so")


def test_a_name_that_another_agent_has_and_a_run_of_another_name_are_refused() -> None:
    with Party(min_hosts=1, max_hosts=2, run="one", pace=Pace(0.02, 0.1)) as party:
        party.agent("a").ready()
        end = party.agent("a", address="127.0.0.9").end()
        assert end.reason == "another agent is there as host a; give each its own name with --host"
        end = party.agent("b", run="two").end()
        assert end.reason.endswith("the run here is 'one', not 'two'; give all hosts the same --run")


def test_a_host_that_finds_no_leader_ends_and_says_where_it_looked() -> None:
    with Party(min_hosts=1, max_hosts=2, join_s=0.3) as party:
        end = party.agent("b").end()
        assert end == End(1, f"no leader was found at {party.endpoints[0]} within 0.3 s: no endpoint answers")


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"secret": None}, ConfigError, "several hosts need a secret that they share.*openssl rand"),
        ({"fence": Path("folder")}, ConfigError, "write --run NAME beside --fence"),
        ({"min_hosts": 3}, ConfigError, "--hosts 3:2"),
    ],
    ids=["secret", "fence", "hosts"],
)
def test_what_cannot_work_is_said_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with Party(max_hosts=2) as party, pytest.raises(error, match=complaint):
        party.agent("a", **{"min_hosts": 1, **arguments})
