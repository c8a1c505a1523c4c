"""What a leader does that takes over from another."""

from __future__ import annotations

import json

from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    HostLeaves,
    HostLost,
    HostReady,
    RoundStopped,
    WorkerFailed,
)
from lightning_dist.elastic.policy.situation import LastRound, State
from tests.unit.elastic.fleet import Fleet, running


def taken_over(**more: object) -> Fleet:
    fleet = Fleet(last=LastRound(4, ("z", "a", "b"), "z"), **more)  # type: ignore[arg-type]
    fleet.away.update("zab")  # until they come, or a test speaks for them
    return fleet


def test_a_new_leader_goes_on_with_what_its_hosts_tell_again() -> None:
    fleet = taken_over()
    assert fleet.state is State.RUNNING
    fleet.tell(WorkerFailed("b", 4, 5, Cause.EXIT, "connection reset", 1, is_consequence=True))
    assert fleet.state is State.STOPPING
    fleet.lose("z")
    fleet.tell(RoundStopped("a", 4), HostReady("a", 2), RoundStopped("b", 4), HostReady("b", 2))
    assert (fleet.start.number, fleet.start.hosts, fleet.start.action) == (5, ("a", "b"), "degraded")
    assert fleet.start.blame is not None
    assert (fleet.start.blame.cause, fleet.start.blame.host) == (Cause.HOST_LOST, "z")


def test_a_new_leader_that_was_told_of_a_stop_already_counts_it_against_the_lost_host_only() -> None:
    fleet = taken_over()
    fleet.tell(RoundStopped("b", 4), HostReady("b", 2))
    fleet.tell(HostLost("z", False), RoundStopped("a", 4), HostReady("a", 2))
    assert fleet.members == ("a", "b")
    assert {name: len(host.failures_s) for name, host in fleet.policy.situation.hosts.items()} == {
        "z": 1, "a": 0, "b": 0,
    }  # fmt: skip


def test_a_new_leader_between_two_rounds_waits_for_their_hosts() -> None:
    fleet = Fleet(last=LastRound(4, ("a", "b", "c"), "a", is_running=False))
    fleet.come("b")
    fleet.come("a")
    assert fleet.state is State.WAITING
    fleet.come("c")
    assert (fleet.number, fleet.members) == (5, ("a", "b", "c"))


def test_a_new_leader_keeps_the_budgets() -> None:
    old = running(options={"host_failures": 2, "max_restarts": 3})
    old.fail("c")
    old.step()
    old.fail("c")
    old.step()
    old.wait(10)
    memory = old.policy.memory(old.now_s)
    assert memory == {
        "restart_ages_s": [10, 10], "failure_ages_s": {"c": [10, 10]}, "aside": ["c"], "left": [], "ending": None,
    }  # fmt: skip
    fleet = taken_over(memory=memory, options={"host_failures": 2, "max_restarts": 3})
    fleet.lose("z")
    fleet.tell(RoundStopped("a", 4), RoundStopped("b", 4))
    fleet.come("c", "a", "b")
    assert fleet.members == ("a", "b")
    fleet.fail("a")
    assert "3 restarts" in fleet.end.reason
    assert fleet.policy.memory(fleet.now_s)["failure_ages_s"]["z"] == [0]


def test_with_a_fence_the_smaller_side_leaves_the_larger_one_time() -> None:
    fleet = taken_over(has_fence=True)
    fleet.lose("z", is_certain=False)
    fleet.lose("b", is_certain=False)
    fleet.tell(RoundStopped("a", 4), HostReady("a", 2))
    fleet.wait(1)
    assert fleet.state is State.WAITING
    fleet.wait(1)
    assert fleet.start.hosts == ("a",)


def test_with_a_fence_half_of_the_hosts_ask_for_it_at_once_since_no_side_is_larger() -> None:
    fleet = Fleet(last=LastRound(4, ("z", "a"), "z"), has_fence=True)
    fleet.away.update("za")
    fleet.lose("z", is_certain=False)
    fleet.tell(RoundStopped("a", 4), HostReady("a", 2))
    assert fleet.start.hosts == ("a",)


def test_a_new_leader_ends_a_run_that_the_former_one_was_told_to_end() -> None:
    old = running(members="zab")
    old.deaf.update("zab")
    old.tell(EndAsked("SIGINT", exit_code=130, at_snapshot=False))
    fleet = taken_over(memory=json.loads(json.dumps(old.policy.memory(0.0))))
    fleet.lose("z")
    fleet.tell(RoundStopped("a", 4), RoundStopped("b", 4))
    assert (fleet.end.exit_code, fleet.end.reason) == (130, "SIGINT")


def test_a_former_leader_that_was_told_to_leave_is_not_to_blame() -> None:
    old = running(members="zab")
    old.deaf.update("zab")
    old.tell(HostLeaves("z", "SIGTERM"))
    fleet = taken_over(memory=old.policy.memory(0.0), options={"rejoin_s": 50.0})
    fleet.lose("z")
    fleet.tell(RoundStopped("a", 4), HostReady("a", 2), RoundStopped("b", 4), HostReady("b", 2))
    assert fleet.members == ("a", "b")  # it is not waited for
    assert fleet.start.blame is not None
    assert fleet.start.blame.cause is Cause.PREEMPTED
    fleet.away.clear()
    fleet.step()
    fleet.come("z")  # its agent was started anew
    fleet.save()
    assert fleet.members == ("a", "b", "z")
