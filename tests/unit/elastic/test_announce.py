"""What a leader tells people."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.leading import announce
from lightning_dist.elastic.policy.actions import StartRound, StopRound
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.incidents import Incident

A, B = Seat("a", "10.0.0.1", 2), Seat("b", "10.0.0.2", 1)


@pytest.mark.parametrize(
    ("action", "seats", "said"),
    [
        ("started", (A, B), "round 2 begins: 3 ranks on hosts a, b"),
        ("restarted", (A, B), "round 2 begins, all started again: 3 ranks on hosts a, b"),
        ("degraded", (B,), "round 2 begins, smaller: 1 rank on host b"),
        ("regrown", (B, A), "round 2 begins, larger: 3 ranks on hosts b, a"),
        ("waited", (A, B), "round 2 begins, all hosts there again: 3 ranks on hosts a, b"),
    ],
)
def test_a_round_that_begins(action: str, seats: tuple[Seat, ...], said: str) -> None:
    hosts = tuple(seat.host for seat in seats)
    assert announce.beginning(StartRound(2, hosts, "why", action=action), Round(2, seats, "run")) == said


def test_a_round_that_ends() -> None:
    assert announce.stopping(StopRound(1, "rank 3 was killed")) == "round 1 ends: rank 3 was killed"
    assert announce.stopping(StopRound(2, "a is back", at_snapshot=True)) == "round 2 saves and ends: a is back"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, None, None),
        (20, None, None),  # a round has begun, and has not come to its first step
        (None, 18, "trains again 3.7 s later, after step 18"),
        (18, 18, "trains again 3.7 s later, after step 18; no step is lost"),
        (19, 18, "trains again 3.7 s later, after step 18; 1 step done again"),
        (1020, 18, "trains again 3.7 s later, after step 18; 1,002 steps done again"),
    ],
)
def test_training_that_goes_on(before: int | None, after: int | None, said: str | None) -> None:
    seconds = {"detect": 0.5, "stop": 3.2}
    incident = Incident(1, "signal", "rank 3", "", 0.0, "restarted", seconds, step_before=before, step_after=after)
    assert announce.going_on(incident) == said
