"""What is done when a rank or a host fails, leaves or comes back."""

from __future__ import annotations

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.actions import SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    FirstStep,
    HostLeaves,
    HostLost,
    HostReady,
    HostUnhealthy,
    OptionsTold,
    RoundDone,
    RoundStopped,
    WorkerFailed,
)
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import LastRound, State
from lightning_dist.errors import ConfigError
from tests.unit.elastic.fleet import Fleet, running

# The first round.


def test_it_starts_at_once_with_all_hosts_and_after_a_while_with_enough() -> None:
    fleet = Fleet(hosts=(2, 3))
    fleet.come("a", "b")
    fleet.wait(29)
    assert fleet.state is State.GATHERING
    fleet.come("c")
    assert fleet.start == StartRound(1, ("a", "b", "c"), "3 hosts are there", "started")

    fleet = Fleet(hosts=(2, 3))
    fleet.come("a")
    fleet.wait(100)
    assert fleet.state is State.GATHERING
    fleet.come("b")
    fleet.wait(29)
    assert fleet.state is State.GATHERING
    fleet.wait(1)
    assert fleet.start.hosts == ("a", "b")


def test_too_few_hosts_end_the_run_in_the_end() -> None:
    fleet = Fleet(hosts=(2, 3))
    fleet.come("b")
    fleet.tell(HostUnhealthy("c", "disk: 3 MB/s"))
    fleet.wait(599)
    assert fleet.state is State.GATHERING
    fleet.wait(1)
    assert fleet.end.exit_code == 1
    assert "1 hosts (b) were ready within 600 s, and at least 2 are needed" in fleet.end.reason


def test_a_standby_leader_starts_only_with_everybody() -> None:
    fleet = Fleet(hosts=(1, 3), leads_by_right=False)
    fleet.come("b", "c")
    fleet.wait(100)
    assert fleet.state is State.GATHERING
    fleet.come("a")
    assert fleet.state is State.STARTING

    fleet = Fleet(hosts=(1, 3), leads_by_right=False)
    fleet.come("b")
    fleet.wait(600)
    assert "first host of --rendezvous" in fleet.end.reason


def test_hosts_beyond_the_most_are_left_out_and_kept_for_later() -> None:
    fleet = Fleet(hosts=(1, 2))
    fleet.come("b", "a", "c")
    assert fleet.members == ("b", "a")
    fleet.step()
    fleet.lose("b")
    assert fleet.start.hosts == ("a", "c")
    assert fleet.start.action == "waited"


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2)])
def test_impossible_sizes_are_refused(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match=r"--hosts|MIN:MAX"):
        Policy(ElasticConfig(), min_hosts=low, max_hosts=high, host="a")


# A rank fails.


@pytest.mark.parametrize("mode", ["restart", "degrade"])
def test_a_killed_rank_restarts_all_on_the_same_hosts(mode: str) -> None:
    fleet = running(mode)
    fleet.fail("b", rank=2, detail="signal 9")
    assert fleet.log[-2] == StopRound(1, "rank 2 on host b was killed: signal 9")
    assert (fleet.start.number, fleet.start.hosts, fleet.start.action) == (2, ("a", "b", "c"), "restarted")
    blamed = fleet.start.blame
    assert blamed is not None
    assert (blamed.host, blamed.ranks, blamed.cause) == ("b", (2,), Cause.SIGNAL)


def test_off_ends_with_the_ranks_code_once_all_have_stopped() -> None:
    fleet = running("off")
    fleet.deaf.add("c")
    fleet.fail("b", cause=Cause.EXIT, rank=3, exit_code=7, detail="ValueError: x")
    assert fleet.state is State.STOPPING
    fleet.tell(RoundStopped("c", 1))
    assert fleet.end.exit_code == 7
    assert fleet.end.reason == "rank 3 on host b ended with an error: ValueError: x; with elastic.mode=off the run ends"
    fleet = running("off")
    fleet.fail("b")
    assert fleet.end.exit_code == 137


def test_a_failure_before_the_first_step_or_while_stopping_is_one_more_or_none() -> None:
    fleet = Fleet(hosts=(1, 2))
    fleet.come("a", "b")
    fleet.fail("a")
    assert fleet.number == 2
    fleet.deaf.add("b")
    fleet.fail("a", rank=0)
    fleet.fail("b", rank=3)
    assert fleet.state is State.STOPPING
    fleet.tell(RoundStopped("b", 2), HostReady("b", 2))
    assert fleet.number == 3
    assert len(fleet.policy.situation.restarts_s) == 2


def test_old_news_changes_nothing() -> None:
    fleet = running()
    fleet.fail("b")
    fleet.step()
    before = fleet.policy.situation
    fleet.tell(
        WorkerFailed("a", 1, 0, Cause.SIGNAL), RoundStopped("a", 1), FirstStep("c", 1, 3), RoundDone("a", 1),
        WorkerFailed("stranger", 2, 0, Cause.EXIT),
    )  # fmt: skip
    assert fleet.policy.situation == before


def test_the_budget_of_restarts_is_kept_within_its_window() -> None:
    options = {"max_restarts": 2, "window_s": 100.0, "host_failures": 9}
    fleet = running(options=options)
    for _ in range(2):
        fleet.fail("a")
        fleet.step()
    fleet.wait(100)
    fleet.fail("a")  # the first two are forgotten
    fleet.step()
    fleet.fail("a")
    fleet.step()
    fleet.fail("b", exit_code=-11)
    assert fleet.end.exit_code == 139
    assert "2 restarts within 100 s are spent" in fleet.end.reason


def test_no_restarts_at_all_may_be_allowed() -> None:
    fleet = running(options={"max_restarts": 0})
    fleet.fail("a")
    assert fleet.end.exit_code == 137


def test_a_rank_that_never_comes_to_its_first_step_is_given_up() -> None:
    fleet = Fleet(hosts=(1, 2), options={"start_s": 50.0})
    fleet.come("a", "b")
    fleet.wait(109)
    assert fleet.state is State.STARTING
    fleet.wait(1)
    assert fleet.number == 2
    assert fleet.start.blame is not None
    assert not fleet.start.blame.is_hosts_fault
    fleet.tell(FirstStep("a", 2, 1))
    fleet.wait(110)
    assert fleet.start.blame is not None
    assert fleet.start.blame.host == "b"


# A host is lost, or comes back.


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


# The end.


def test_training_is_over_when_all_hosts_say_so() -> None:
    fleet = running()
    fleet.finish("a", "b")
    assert fleet.state is State.RUNNING
    fleet.come("a")  # it is ready again before the others are done
    fleet.lose("b")
    fleet.finish("c")
    assert (fleet.end.exit_code, fleet.end.reason) == (0, "training is over")
    fleet.come("x")
    assert fleet.log[-1] is fleet.end


def test_a_host_that_fails_when_others_are_done_makes_all_go_on() -> None:
    fleet = running()
    fleet.finish("a", "b")
    fleet.fail("c")
    assert fleet.start.hosts == ("a", "b", "c")


def test_all_done_while_a_snapshot_is_asked_for_is_the_end() -> None:
    fleet = running(members="ab")
    fleet.deaf.update("ab")
    fleet.come("c")
    fleet.save()
    fleet.finish()
    assert fleet.end.exit_code == 0


def test_asked_to_end_it_saves_first_and_asked_twice_it_does_not() -> None:
    fleet = running()
    fleet.tell(EndAsked("SIGTERM", exit_code=143))
    assert StopRound(1, "SIGTERM", at_snapshot=True) in fleet.log
    assert fleet.end.exit_code == 143

    fleet = running()
    fleet.deaf.update("abc")
    fleet.tell(EndAsked("SIGINT", exit_code=130))
    assert fleet.state is State.DRAINING
    fleet.tell(EndAsked("SIGINT", exit_code=130))
    assert fleet.end.exit_code == 130


@pytest.mark.parametrize("state", [State.GATHERING, State.STARTING, State.WAITING])
def test_asked_to_end_where_nothing_can_be_saved_it_ends(state: State) -> None:
    fleet = Fleet(hosts=(2, 2))
    if state is not State.GATHERING:
        fleet.come("a", "b")
    if state is State.WAITING:
        fleet.lose("b")
    assert fleet.state is state
    fleet.tell(EndAsked())
    assert fleet.end.exit_code == 1
    assert not any(stop.at_snapshot for stop in fleet.said(StopRound))


def test_the_script_may_say_other_options() -> None:
    fleet = running("off")
    fleet.tell(OptionsTold(ElasticConfig(mode="degrade")))
    fleet.lose("b")
    assert fleet.members == ("a", "c")


# Another leader takes over.


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
    assert memory == {"restart_ages_s": [10, 10], "failure_ages_s": {"c": [10, 10]}, "aside": ["c"]}
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
    fleet.wait(4)
    assert fleet.state is State.WAITING
    fleet.wait(1)
    assert fleet.start.hosts == ("a",)
