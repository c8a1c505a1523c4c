"""What agents and leaders say to each other survives the way there as it was; anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import messages
from lightning_dist.elastic.leading.messages import Hello, Status
from lightning_dist.elastic.policy import events
from lightning_dist.elastic.policy.events import Cause, Event
from lightning_dist.elastic.policy.sizes import Sizes
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.elastic.session import End, Stop

EVENTS: list[Event] = [
    events.HostReady("a", 2, 4711),
    events.HostLost("a", True, "gone", 5.0),
    events.HostLeaves("a", "SIGTERM"),
    events.HostUnhealthy("a", "disk full"),
    events.WorkerFailed("a", 3, 1, Cause.OUT_OF_MEMORY, "killed", -9, silent_s=0.5),
    events.RoundStopped("a", 3, step=7),
    events.FirstStep("a", 3, 8, start_s=1.0, load_s=0.5),
    events.Snapshot(3, 10),
    events.Progress("a", 3, 11, (0.5, 0.25)),
    events.RoundDone("a", 3),
    events.OptionsTold(ElasticConfig(mode="degrade", rejoin_s=3.0)),
    events.SizesTold(Sizes(4, 2, alike=True, asked="parallel=tensor")),
    events.EndAsked("SIGINT"),
    events.Tick(),
]
ROUND = Round(3, (Seat("a", "10.0.0.1", 2, 4711), Seat("b", "10.0.0.2", 4)), "run", "why")


def travelled(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_event_arrives_as_it_was(event: Event) -> None:
    assert messages.event_from_json(travelled(messages.event_to_json(event))) == event


def test_all_events_are_covered() -> None:
    assert {type(event).__name__ for event in EVENTS} == set(messages._EVENTS)


def test_rounds_orders_and_statuses_arrive_as_they_were() -> None:
    assert messages.round_from_json(travelled(messages.round_to_json(ROUND))) == ROUND
    for order in (Stop(3, "why", at_snapshot=True), End(1, "why")):
        assert messages.order_from_json(travelled(messages.order_to_json(order))) == order
    status = Status("a", True, 2, 3)
    assert messages.status_from_json(travelled(messages.status_to_json(status))) == status


@pytest.mark.parametrize(
    "hello",
    [
        Hello("a", "10.0.0.1", "x"),
        Hello(
            "a",
            "10.0.0.1",
            "x",
            term=2,
            run="run",
            round=ROUND,
            is_running=True,
            ready=events.HostReady("a", 2),
            told=tuple(enumerate(EVENTS, start=5)),
            memory={"restart_ages_s": [1.5]},
            lost=("b", True),
        ),
    ],
    ids=["new", "known"],
)
def test_a_hello_arrives_as_it_was(hello: Hello) -> None:
    assert messages.hello_from_json(travelled(messages.hello_to_json(hello))) == hello


def test_a_field_that_a_later_version_has_added_is_left_out() -> None:
    value = {**messages.event_to_json(EVENTS[0]), "colour": "green"}
    assert messages.event_from_json(value) == EVENTS[0]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"event": "Nothing"},
        {"event": "HostReady"},
        {"event": "HostReady", "host": "a", "num_ranks": "2"},
        {"event": "HostReady", "host": ["a"], "num_ranks": 2},
        {"event": "WorkerFailed", "host": "a", "round": 1, "rank": 0, "cause": "boredom"},
        {"event": "OptionsTold"},
        {"event": "OptionsTold", "options": {"mode": "sometimes"}},
        {"event": "OptionsTold", "options": 5},
    ],
    ids=repr,
)
def test_what_is_no_event_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError, match="what was sent is no"):
        messages.event_from_json(value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "status"}, "a hello comes first, not 'status'"),
        ({"format": 99}, "install the same version of lightning_dist on all hosts"),
        ({"told": 5}, "is no hello"),
        ({"told": [[1]]}, "is no hello"),
        ({"round": {"number": 1}}, "is no round"),
        ({"host": None}, "is no hello"),
    ],
    ids=repr,
)
def test_what_is_no_hello_is_refused(change: dict[str, Any], complaint: str) -> None:
    value = {**messages.hello_to_json(Hello("a", "10.0.0.1", "x")), **change}
    with pytest.raises(ConnectionError, match=complaint):
        messages.hello_from_json(value)
