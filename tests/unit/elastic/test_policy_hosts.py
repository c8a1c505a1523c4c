"""What is done when a host is lost, comes back, fails again and again, is unwell, or leaves."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.policy.actions import SetAside, StopRound
from lightning_dist.elastic.policy.events import (
    Cause,
    HostLeaves,
    HostReady,
    HostUnhealthy,
    RoundStopped,
)
from lightning_dist.elastic.policy.situation import LastRound, State
from tests.unit.elastic.fleet import Fleet, running


def test_degrade_goes_on_without_a_lost_host_at_once() -> None:
    fleet = running()
    fleet.lose("b")
    assert (fleet.start.hosts, fleet.start.action) == (("a", "c"), "degraded")
    assert fleet.start.blame is not None
    assert fleet.start.blame.text == "host b is lost"


def test_a_lost_host_is_waited_for_as_long_as_asked() -> None:
    fleet = running(options={"rejoin_s": 20.0})
    fleet.lose("b")
    fleet.wait(19)
    assert fleet.state is State.WAITING
    fleet.come("b")
    assert (fleet.start.hosts, fleet.start.action) == (("a", "b", "c"), "waited")
    fleet.step()
    fleet.lose("b")
    fleet.wait(20)
    assert fleet.start.hosts == ("a", "c")


def test_restart_waits_for_the_same_number_and_then_ends() -> None:
    fleet = running("restart", options={"rejoin_s": 20.0})
    fleet.lose("b")
    fleet.wait(10)
    fleet.come("x")
    assert (fleet.start.hosts, fleet.start.action) == (("a", "c", "x"), "waited")
    fleet.step()
    fleet.lose("x")
    fleet.wait(20)
    assert fleet.end.exit_code == 1
    assert "2 hosts are ready (a, c) after 20 s of the 3 that train; with elastic.mode=degrade" in fleet.end.reason


def test_below_the_floor_it_is_waited_and_then_ended() -> None:
    fleet = running(hosts=(3, 3))
    fleet.lose("b")
    fleet.wait(59)
    assert fleet.state is State.WAITING
    fleet.come("b")
    assert fleet.state is State.STARTING
    fleet.lose("c")
    fleet.wait(60)
    assert "2 hosts are ready (a, b) after 60 s, and at least 3 are needed" in fleet.end.reason


def test_a_silent_half_is_not_gone_on_without() -> None:
    fleet = Fleet(hosts=(1, 2), last=LastRound(1, ("a", "b"), "b"))
    fleet.deaf.add("a")
    fleet.lose("b", is_certain=False)
    fleet.tell(RoundStopped("a", 1), HostReady("a", 2))
    fleet.wait(59)
    assert fleet.state is State.WAITING
    fleet.wait(1)
    assert "1 of the 2 hosts of the last round are here (a); b cannot be heard" in fleet.end.reason


def test_a_host_that_returns_is_taken_at_the_next_snapshot() -> None:
    fleet = running()
    fleet.lose("b")
    fleet.come("b")
    assert fleet.state is State.STARTING  # not before its first step
    fleet.step()
    assert fleet.state is State.RUNNING
    fleet.save()
    assert StopRound(2, "b is there, and takes part", at_snapshot=True) in fleet.log
    assert (fleet.start.hosts, fleet.start.action) == (("a", "c", "b"), "regrown")
    assert fleet.start.blame is None
    assert len(fleet.policy.situation.restarts_s) == 1  # growing costs none


def test_without_snapshots_a_returned_host_is_taken_after_a_while() -> None:
    fleet = running(members="ab")
    fleet.come("c")
    fleet.wait(29)
    assert fleet.state is State.RUNNING
    fleet.wait(1)
    assert fleet.start.action == "regrown"


@pytest.mark.parametrize("reason", ["regrow", "restart", "full"])
def test_a_returned_host_is_not_taken(reason: str) -> None:
    mode = "restart" if reason == "restart" else "degrade"
    options = {"regrow": reason != "regrow"}
    fleet = running(mode, members="ab", hosts=(1, 2 if reason == "full" else 3), options=options)
    fleet.come("c")
    fleet.save()
    fleet.wait(1000)
    assert fleet.state is State.RUNNING


def test_a_snapshot_that_fails_or_never_comes_does_not_hold_what_follows() -> None:
    fleet = running(members="ab")
    fleet.deaf.update("ab")
    fleet.come("c")
    fleet.save()
    assert fleet.state is State.DRAINING
    fleet.fail("a")
    assert fleet.log[-1] == StopRound(1, "rank 0 on host a was killed")

    fleet = running(members="ab", options={"save_s": 40.0})
    fleet.deaf.update("ab")
    fleet.come("c")
    fleet.save()
    fleet.wait(99)
    assert fleet.state is State.DRAINING
    fleet.wait(1)
    assert fleet.state is State.STOPPING
    fleet.wait(60)  # neither answers: both are taken for silent
    assert fleet.state is State.WAITING
    fleet.wait(60)
    assert "a, b cannot be heard" in fleet.end.reason


def test_a_host_that_was_only_slow_to_stop_takes_part_again() -> None:
    fleet = running()
    fleet.deaf.add("c")
    fleet.fail("a")
    fleet.wait(60)
    assert fleet.start.hosts == ("a", "b")
    fleet.tell(RoundStopped("c", 1), HostReady("c", 2))
    fleet.step()
    fleet.save()
    assert fleet.members == ("a", "b", "c")


def test_an_agent_that_began_anew_has_lost_its_ranks() -> None:
    fleet = running()
    fleet.deaf.add("b")
    fleet.come("b")
    assert fleet.start.blame is not None
    assert fleet.start.blame.cause is Cause.HOST_LOST
    assert fleet.members == ("a", "b", "c")


# A host is set aside, unwell, or leaves.


def test_a_host_that_fails_again_and_again_is_set_aside_for_good() -> None:
    fleet = running(options={"host_failures": 2})
    fleet.fail("b")
    fleet.step()
    fleet.fail("b")
    assert fleet.said(SetAside) == [SetAside("b", "it has failed 2 times within 3600 s")]
    assert fleet.members == ("a", "c")
    fleet.step()
    fleet.come("b")
    fleet.save()
    fleet.wait(1000)
    assert fleet.members == ("a", "c")


def test_failures_of_long_ago_are_forgotten() -> None:
    fleet = running(options={"host_failures": 2, "window_s": 100.0})
    fleet.fail("b")
    fleet.step()
    fleet.wait(100)
    fleet.fail("b")
    assert fleet.members == ("a", "b", "c")


def test_a_host_without_which_nothing_goes_on_is_not_set_aside() -> None:
    fleet = running(members="a", hosts=(1, 1), options={"host_failures": 1, "max_restarts": 5})
    for _ in range(5):
        fleet.fail("a")
        fleet.step()
    assert fleet.said(SetAside) == []
    fleet.fail("a")
    assert "5 restarts" in fleet.end.reason


def test_the_same_error_on_several_hosts_is_the_scripts() -> None:
    fleet = running(options={"host_failures": 1})
    fleet.deaf.update("abc")
    for host, rank in (("b", 2), ("a", 0)):
        fleet.fail(host, Cause.EXIT, rank=rank, exit_code=1, detail="ValueError: x")
    fleet.deaf.clear()
    fleet.tell(*[RoundStopped(host, 1) for host in "abc"], *[HostReady(host, 2) for host in "abc"])
    assert fleet.said(SetAside) == []
    assert fleet.members == ("a", "b", "c")


def test_an_unhealthy_host_takes_no_part_until_it_is_checked_again() -> None:
    fleet = running(members="ab")
    fleet.tell(HostUnhealthy("c", "memory"))
    fleet.save()
    assert fleet.state is State.RUNNING
    fleet.come("c")
    assert fleet.members == ("a", "b", "c")


def test_a_host_that_keeps_being_unhealthy_is_set_aside() -> None:
    fleet = running(members="ab", options={"host_failures": 2})
    fleet.tell(HostUnhealthy("c", "memory"), HostUnhealthy("c", "memory"))
    assert fleet.said(SetAside) == [SetAside("c", "it has failed 2 times within 3600 s")]


def test_a_host_that_is_told_to_end_leaves_after_a_snapshot() -> None:
    fleet = running(options={"rejoin_s": 100.0})
    fleet.leaving.add("b")
    fleet.tell(HostLeaves("b", "SIGTERM"))
    assert StopRound(1, "b was told to end", at_snapshot=True) in fleet.log
    assert (fleet.start.hosts, fleet.start.action) == (("a", "c"), "degraded")  # it will not be back: nobody waits
    assert fleet.policy.situation.restarts_s == ()
    fleet.lose("b")
    fleet.leaving.clear()
    fleet.step()
    fleet.come("b")  # an agent that was started anew
    fleet.save()
    assert fleet.members == ("a", "c", "b")


def test_a_host_that_dies_before_its_snapshot_is_not_to_blame() -> None:
    fleet = running(options={"host_failures": 1})
    fleet.deaf.update("abc")
    fleet.tell(HostLeaves("b"))
    fleet.deaf.clear()
    fleet.lose("b")
    assert fleet.members == ("a", "c")
    assert fleet.start.blame is not None
    assert fleet.start.blame.cause is Cause.PREEMPTED
    assert fleet.policy.situation.restarts_s == ()


@pytest.mark.parametrize("mode", ["off", "restart", "degrade"])
def test_when_all_hosts_are_told_to_end_the_run_ends_after_a_snapshot(mode: str) -> None:
    fleet = running(mode, members="ab")
    fleet.deaf.update("ab")
    fleet.tell(HostLeaves("a"), HostLeaves("b"))
    assert fleet.log[-1] == StopRound(1, "a was told to end", at_snapshot=True)
    fleet.tell(RoundStopped("a", 1), RoundStopped("b", 1))
    assert fleet.end.exit_code == 143
