"""How a run starts, what is done when a rank fails, and how a run ends."""

from __future__ import annotations

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.actions import StartRound, StopRound
from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    FirstStep,
    HostReady,
    HostUnhealthy,
    OptionsTold,
    RoundDone,
    RoundStopped,
    WorkerFailed,
)
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import State
from lightning_dist.errors import ConfigError
from tests.unit.elastic.fleet import Fleet, running


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


def test_a_host_that_does_not_come_to_its_first_step_when_others_have_is_given_up() -> None:
    fleet = Fleet(hosts=(1, 2), options={"start_s": 50.0})
    fleet.come("a", "b")
    fleet.tell(FirstStep("a", 1, 1))
    fleet.wait(109)
    assert fleet.state is State.STARTING
    fleet.wait(1)
    assert fleet.start.blame is not None
    assert fleet.start.blame.text == "host b did not come to its first step: within 110 s, and a has"


def test_a_script_that_cannot_start_is_not_started_for_ever() -> None:
    fleet = Fleet(hosts=(1, 2), options={"host_failures": 9})
    fleet.come("a", "b")
    for detail in ("ConfigError: x", "ConnectionError", "ConfigError: x", "ConfigError: x"):
        fleet.fail("a", Cause.EXIT, exit_code=2, detail=detail)
    assert fleet.number == 5
    fleet.fail("a", Cause.EXIT, exit_code=2, detail="ConfigError: x")
    assert fleet.end.exit_code == 2
    assert fleet.end.reason.endswith("ConfigError: x; so did 3 rounds in a row, at once")


@pytest.mark.parametrize("tells_steps", [True, False])
def test_the_same_error_after_some_work_may_pass(tells_steps: bool) -> None:
    fleet = running(options={"host_failures": 9})
    for _ in range(5):
        fleet.fail("a", Cause.EXIT, exit_code=1, detail="exit code 1")
        if tells_steps:
            fleet.step()
        else:
            fleet.wait(60)
    assert fleet.number == 6


def test_a_snapshot_shows_that_all_have_come_to_their_first_step() -> None:
    fleet = Fleet(hosts=(1, 2))
    fleet.come("a", "b")
    fleet.save()
    assert fleet.state is State.RUNNING


def test_a_script_that_says_nothing_of_its_steps_is_taken_to_run() -> None:
    fleet = Fleet(hosts=(1, 3), options={"start_s": 50.0})
    fleet.come("a", "b")
    fleet.wait(30)
    assert fleet.state is State.STARTING
    fleet.wait(110)
    assert fleet.state is State.RUNNING
    fleet.finish()
    assert fleet.end.exit_code == 0


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
