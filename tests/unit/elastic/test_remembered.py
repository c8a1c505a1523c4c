"""What the next leader makes of what its host remembers: who started the last round decides which half may train."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading.beginning import begin
from lightning_dist.elastic.leading.channel import Pace
from lightning_dist.elastic.leading.endpoints import Endpoint
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.leading.setup import Setup
from lightning_dist.elastic.policy.actions import StartRound
from lightning_dist.elastic.policy.events import HostLost, HostReady, RoundStopped, Tick
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.rounds import Round, Seat

ROUND = Round(5, (Seat("a", "10.0.0.1", 2), Seat("b", "10.0.0.2", 2)), run="run")


def member(host: str, *, started_by: str) -> Remembered:
    """A host in round 5."""
    state = Remembered(host, "10.0.0.2", "instance", leader=started_by)
    state.began(ROUND)
    return state


def leads(state: Remembered) -> Policy:
    """The policy of that host once it leads."""
    options = ElasticConfig(mode="degrade")
    pace = Pace(0.05, 0.25)
    setup = Setup([Endpoint("a", 1), Endpoint("b", 1)], 1, b"secret", options, 1, 2, pace, print, 1.0, 1.0, 1.0)
    leader: Any = asyncio.run(begin(setup, state, 2))
    found: Policy = leader._policy
    return found


def starts(policy: Policy) -> bool:
    """Whether it goes on alone when the other host is silent."""
    events = (HostLost("a", is_certain=False), RoundStopped("b", 5), HostReady("b", 2), Tick())
    actions = [action for event in events for action in policy.react(event, 10.0)]
    return any(isinstance(action, StartRound) for action in actions)


@pytest.mark.parametrize(("starter", "may_start"), [("a", False), ("b", True)])
def test_half_of_the_hosts_goes_on_only_with_the_host_that_led_when_the_round_began(
    starter: str, may_start: bool
) -> None:
    assert starts(leads(member("b", started_by=starter))) is may_start


def test_who_has_led_in_a_cut_that_came_and_went_has_started_nothing() -> None:
    state = member("b", started_by="a")
    state.leader = "b"  # it led while it was cut off, in vain
    assert not starts(leads(state))


def test_another_leader_that_tells_of_the_round_again_has_not_started_it() -> None:
    state = member("b", started_by="a")
    state.leader = "b"
    state.began(ROUND)
    assert state.starter == "a"


def test_who_started_a_round_that_was_only_heard_of_is_not_known() -> None:
    state = member("b", started_by="b")
    state.heard_of(Round(6, ROUND.seats[:1], run="run"))
    assert state.starter is None
