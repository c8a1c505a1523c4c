"""The leader is lost, and the next endpoint takes over: who leads, what it knows, and who may train after a cut."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading.fence import Fence
from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    HostLeaves,
    OptionsTold,
    RoundDone,
    RoundStopped,
    Snapshot,
    WorkerFailed,
)
from lightning_dist.elastic.policy.situation import Waits
from lightning_dist.elastic.session import End
from tests.support.agents import Party, in_round, until


def test_the_next_endpoint_takes_over_when_the_leader_dies_and_the_run_keeps_its_name_and_numbers() -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, b, c = party.begun("abc")
        first = c.session.run
        a.kill()
        for agent in (b, c):
            assert agent.stop().number == 1
        value = in_round([b, c], step=5)
        assert (value.number, value.run) == (2, first)
        assert {seat.host for seat in value.seats} == {"b", "c"}
        assert b.leads
        for agent in (b, c):
            agent.session.tell(RoundDone(agent.host, 2))
        assert {b.end().exit_code, c.end().exit_code} == {0}


def test_a_new_leader_knows_what_was_told_the_old_one_before_it_died() -> None:
    with Party(2, min_hosts=3, max_hosts=3, mode="off") as party:
        a, b, c = party.begun("abc")
        b.session.tell(OptionsTold(ElasticConfig(mode="degrade", max_restarts=0)))
        c.session.tell(WorkerFailed("c", 7, 0, Cause.EXIT, "of a round that never was"))  # no news for anybody
        a.kill()
        for agent in (b, c):
            agent.stop()
        end = c.end()
        assert end.exit_code == 1
        assert "0 restarts within" in end.reason


def test_a_new_leader_goes_on_counting_restarts() -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, b, c = agents = party.begun("abc")
        b.session.tell(OptionsTold(ElasticConfig(mode="degrade", max_restarts=1)))
        b.session.tell(WorkerFailed("b", 1, 2, Cause.SIGNAL))
        for agent in agents:
            agent.stop()
        in_round(agents, step=3)
        a.kill()
        for agent in (b, c):
            agent.stop()
        assert "1 restarts within 3600 s are spent" in b.end().reason


def test_no_number_is_given_to_two_rounds_even_if_the_new_leader_had_not_heard_of_the_last() -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, b, c = agents = party.begun("abc")
        leader = a.leader
        send = leader._send

        def send_but_to_b(host: str, message: dict[str, Any]) -> None:
            if (host, message["kind"]) != ("b", "round"):
                send(host, message)

        leader._send = send_but_to_b
        c.session.tell(WorkerFailed("c", 1, 4, Cause.SIGNAL))
        for agent in agents:
            agent.stop()
        assert c.next().number == 2
        a.kill()
        assert c.stop().number == 2
        assert in_round([b, c], step=3).number == 3


def test_a_leader_whose_host_is_taken_away_hands_over_and_the_others_train_on() -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, b, c = agents = party.begun("abc")
        a.session.tell(HostLeaves("a", "SIGTERM"))
        for agent in agents:
            assert agent.stop().at_snapshot
        assert {seat.host for seat in in_round([b, c], step=3).seats} == {"b", "c"}
        a.session.leave("SIGTERM")
        until(lambda: b.leads and "c" in b.leader._members, "b leads")
        for agent in (b, c):
            agent.session.tell(RoundDone(agent.host, 2))
        assert b.end() == c.end()
        assert b.end().exit_code == 0
        assert [type(order) for order in (b.session.order(), c.session.order())] == [End, End]  # and no other before


@pytest.mark.parametrize("leads_first", [True, False], ids=["stopped after it led", "before"])
def test_an_interruption_of_the_leaders_host_ends_the_run_though_others_have_not_stopped(leads_first: bool) -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, *others = party.begun("abc")
        a.session.tell(EndAsked("SIGINT", exit_code=130, at_snapshot=False))
        for agent in others:
            agent.order()  # to stop; its ranks still end
        if leads_first:
            a.session.leave("SIGINT")
            until(lambda: others[0].leads, "b leads")
        for agent in others:
            agent.session.tell(RoundStopped(agent.host, 1))
        if not leads_first:
            a.session.leave("SIGINT")
        for agent in others:
            agent.ready()
        assert [agent.end() for agent in others] == [End(130, "SIGINT")] * 2


def test_a_leader_that_its_own_host_has_lost_leads_no_more() -> None:
    """Others take it for granted: who is a member elsewhere starts no round."""
    with Party(2, min_hosts=1, max_hosts=2) as party:
        agents = party.begun("ab")
        a, former = agents[0], agents[0].leader
        a.session._loop.call_soon_threadsafe(
            lambda: asyncio.ensure_future(former._members["a"].channel.close("for no reason"))
        )
        until(lambda: former.is_over, "it stands down")
        until(lambda: [agent.leads for agent in agents].count(True) == 1, "one leads")
        for agent in agents:
            agent.session.tell(RoundDone(agent.host, 1))
        assert {agent.end().exit_code for agent in agents} == {0}


def test_a_host_that_led_and_is_started_anew_joins_the_leader_there_is() -> None:
    with Party(2, min_hosts=1, max_hosts=2) as party:
        a, b = party.begun("ab")
        a.kill()
        b.stop()
        in_round([b], step=3)
        again = party.agent("a")
        again.ready()
        until(lambda: "a" in b.leader._members, "a joins b")
        assert not again.leads
        assert b.leads


@pytest.mark.parametrize("with_reset", [False, True], ids=["closed", "reset"])
def test_the_other_half_goes_on_alone_if_the_leader_is_known_to_be_dead(with_reset: bool) -> None:
    with Party(2, min_hosts=1, max_hosts=2) as party:
        a, b = party.begun("ab")
        a.kill(with_reset=with_reset)
        b.stop()
        assert in_round([b], step=3).number == 2


def test_a_leader_that_was_stopped_finds_that_the_others_went_on_and_joins_them() -> None:
    with Party(2, min_hosts=1, max_hosts=3) as party:
        a, b, c = party.begun("abc")
        with a.paused():
            for agent in (b, c):
                agent.stop()
            assert {seat.host for seat in in_round([b, c], step=3).seats} == {"b", "c"}
        a.stop()
        until(lambda: "a" in b.leader._members, "a joins b")
        assert not a.leads


def test_half_of_the_hosts_without_the_leader_wait_until_they_see_it_again() -> None:
    with Party(2, min_hosts=1, max_hosts=2) as party:
        a, b = party.begun("ab")
        with a.paused():
            stop = b.stop()
            assert "host a" in stop.reason
            assert b.session.next_round(1.0) is None
        a.stop()
        value = a.next()
        if len(value.seats) == 1:  # it had not seen b yet; as the leader it counts
            a.step(value, step=3)
            a.session.tell(Snapshot(value.number, 4))
            a.stop()
            value = a.next()
        assert len(value.seats) == 2
        assert b.next() == value
        assert a.leads != b.leads


def test_with_a_fence_half_of_the_hosts_go_on_and_the_other_half_does_not(tmp_path: Path) -> None:
    with Party(2, min_hosts=1, max_hosts=2, run="named", fence=tmp_path, waits=Waits(fence_s=0.2)) as party:
        a, b = party.begun("ab")
        with a.paused():
            b.stop()
            value = in_round([b], step=3)
            assert value.number == 2
        a.stop()
        until(lambda: "a" in b.leader._members, "a joins b")
        assert sorted(path.name for path in (tmp_path / "named").glob("round-*")) == [
            "round-00000001",
            "round-00000002",
        ]


def test_a_round_that_was_claimed_by_a_leader_that_died_before_it_began_is_passed_over(tmp_path: Path) -> None:
    with Party(2, min_hosts=1, max_hosts=2, run="named", fence=tmp_path) as party:
        a, b = party.begun("ab")
        Fence(tmp_path, "named").claim(2, host="a", instance=a.session._node._state.instance)
        a.kill()
        b.stop()
        assert in_round([b], step=3).number == 3


def test_a_run_all_of_whose_agents_were_killed_goes_on_with_the_same_fence_once_all_are_back(tmp_path: Path) -> None:
    waits = Waits(join_s=0.1, fence_s=0.1)
    with Party(2, min_hosts=1, max_hosts=2, run="named", fence=tmp_path, waits=waits) as party:
        a, b = party.begun("ab")
        a.kill()
        b.stop()
        assert in_round([b], step=3).number == 2  # which b has claimed
        b.kill()
        a = party.agent("a")
        a.ready()
        met = "host a leads no more: round 2 of run named is claimed by host b already"
        until(lambda: any(text.startswith(met) for text in a.said), "a meets the claim of b")
        assert a.session.next_round(1.0) is None  # b may train
        assert [text.startswith(met) for text in a.said].count(True) == 1
        b = party.agent("b")
        b.ready()
        value = a.next()
        assert value.number == 3
        if len(value.seats) == 1:  # a was at it before b had said that it is ready
            a.step(value)
            a.session.tell(Snapshot(value.number, 4))
            a.stop()
            value = a.next()
        assert b.next() == value
        assert len(value.seats) == 2


def test_a_round_that_a_host_elsewhere_has_claimed_is_not_started_and_the_run_ends_here(tmp_path: Path) -> None:
    with Party(2, min_hosts=1, max_hosts=2, run="named", fence=tmp_path, seek_s=0.5) as party:
        a, b = party.begun("ab")
        Fence(tmp_path, "named").claim(2, host="z", instance="other")
        a.kill()
        b.stop()
        end = b.end()
        assert end.exit_code == 1
        assert "round 2 of run named is claimed by host z already" in end.reason


def test_who_comes_after_the_end_of_a_run_is_told_so_by_the_fence(tmp_path: Path) -> None:
    with Party(2, min_hosts=1, max_hosts=1, run="named", fence=tmp_path) as party:
        a = party.agent("a")
        a.ready()
        a.session.tell(RoundDone("a", a.next().number))
        assert a.end().exit_code == 0
        a.session.leave("training is over")
        end = party.agent("b").end()
        assert end.exit_code == 0
        assert end.reason.startswith("run named is over: training is over; to go on")
