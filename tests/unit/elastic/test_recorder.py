"""What an incident was and what it cost, from what a leader hears and does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dist import incidents
from lightning_dist.elastic.leading.line_writer import LineWriter
from lightning_dist.elastic.leading.recorder import Recorder
from lightning_dist.elastic.policy.actions import EndRun, StartRound, StopRound
from lightning_dist.elastic.policy.blame import Blame
from lightning_dist.elastic.policy.events import (
    Cause,
    Event,
    FirstStep,
    HostLeaves,
    HostLost,
    Progress,
    RoundStopped,
    WorkerFailed,
)
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.incidents import Incident

A, B = Seat("a", "10.0.0.1", 2), Seat("b", "10.0.0.2", 2)
KILLED = Blame(Cause.SIGNAL, "b", True, (3,), "signal 9", 137)
A_LOST = Blame(Cause.HOST_LOST, "a", True, (), "nothing was heard for 5 s", 1)
B_LOST = Blame(Cause.HOST_LOST, "b", True, (), "its agent has ended", 1)


def value_of(number: int, *seats: Seat) -> Round:
    return Round(number, seats, "run")


def started(number: int, *seats: Seat, action: str, blame: Blame | None = None) -> tuple[StartRound, Round]:
    hosts = tuple(seat.host for seat in seats)
    return StartRound(number, hosts, "why", action=action, blame=blame), value_of(number, *seats)


@pytest.fixture
def recorder() -> Recorder:
    """In round 1, of hosts a and b, at step 20."""
    made = Recorder("run", first_number=4, wall_clock=lambda: 1_000_000.0)
    assert made.began(*started(1, A, B, action="started"), 0.0) is None
    assert hear(made, 1.0, FirstStep("a", 1, 1), FirstStep("b", 1, 1)) is None
    assert hear(made, 9.0, Progress("a", 1, 20, ()), Progress("b", 1, 19, ())) is None
    return made


def hear(recorder: Recorder, now_s: float, *events: Event) -> Incident | None:
    """What the last of the events gives."""
    return [recorder.hear(event, now_s) for event in events][-1]


def test_a_rank_that_is_killed_costs_what_each_phase_took(recorder: Recorder) -> None:
    hear(recorder, 10.0, WorkerFailed("b", 1, 3, Cause.SIGNAL, "signal 9", -9, silent_s=0.125))
    recorder.did(StopRound(1, "why"), 10.0)
    hear(recorder, 10.25, RoundStopped("b", 1, step=20))
    hear(recorder, 10.5, RoundStopped("a", 1, step=22))
    written = recorder.began(*started(2, A, B, action="restarted", blame=KILLED), 10.75)
    assert written == Incident(
        number=4,
        what="signal",
        who="rank 3 on host b",
        detail="signal 9",
        time=1_000_000.0,
        action="restarted",
        seconds={"detect": 0.125, "stop": 0.5, "regroup": 0.25},
        step_before=22,
        ranks_before=4,
        ranks_after=4,
        lost_ranks=(3,),
        blamed_host="b",
        run="run",
    )
    assert hear(recorder, 12.0, FirstStep("a", 2, 21, 0.5, 0.25, 0.125)) is None
    whole = hear(recorder, 12.0, FirstStep("b", 2, 21, 1.0, 0.5, 0.25))
    assert whole is not None
    assert (whole.number, whole.step_after, whole.steps_lost) == (4, 20, 2)
    assert whole.seconds == {
        "detect": 0.125,
        "stop": 0.5,
        "regroup": 0.25,
        "start": 1.0,
        "load": 0.5,
        "first_step": 0.25,
    }
    assert hear(recorder, 13.0, FirstStep("b", 2, 21)) is None  # told again


def test_a_lost_host_takes_its_ranks_with_it(recorder: Recorder) -> None:
    hear(recorder, 10.0, HostLost("b", False, "nothing was heard", 5.0))
    recorder.did(StopRound(1, "why"), 10.0)
    hear(recorder, 10.5, RoundStopped("a", 1, step=20))
    written = recorder.began(*started(2, A, action="degraded", blame=B_LOST), 11.0)
    assert written is not None
    assert (written.what, written.who, written.lost_ranks) == ("host_lost", "ranks 2, 3 on host b", (2, 3))
    assert (written.ranks_before, written.ranks_after) == (4, 2)
    assert written.seconds["detect"] == 5.0


def test_what_it_took_to_take_over_counts_with_the_loss_of_the_former_leader_and_with_no_other() -> None:
    recorder = Recorder("run", first_number=1, wall_clock=lambda: 1_000_000.0)
    recorder.took_over(value_of(1, A, B), takeover_s=0.25)
    hear(recorder, 10.0, HostLost("a", False, "nothing was heard", 5.0), RoundStopped("b", 1, step=20))
    written = recorder.began(*started(2, B, action="degraded", blame=A_LOST), 11.0)
    assert written is not None
    assert written.seconds == {"detect": 5.0, "takeover": 0.25, "stop": 0.0, "regroup": 1.0}
    hear(recorder, 12.0, FirstStep("b", 2, 21))
    hear(recorder, 13.0, HostLost("b", False, "nothing was heard", 5.0))
    again = recorder.began(*started(3, A, action="degraded", blame=B_LOST), 14.0)
    assert again is not None
    assert "takeover" not in again.seconds


def test_a_host_that_is_taken_back_or_told_to_end_is_an_incident_of_its_own(recorder: Recorder) -> None:
    recorder.did(StopRound(1, "host c is there", at_snapshot=True), 10.0)
    hear(recorder, 11.0, RoundStopped("a", 1, step=25), RoundStopped("b", 1, step=25))
    written = recorder.began(*started(2, A, B, Seat("c", "", 2), action="regrown"), 11.0)
    assert written is not None
    assert (written.what, written.who, written.lost_ranks, written.blamed_host) == ("regrown", "host c", (), None)
    hear(recorder, 12.0, FirstStep("a", 2, 26), FirstStep("b", 2, 26), FirstStep("c", 2, 26))
    hear(recorder, 13.0, HostLeaves("c", "SIGTERM"))
    hear(recorder, 14.0, RoundStopped("a", 2, step=30))
    written = recorder.began(*started(3, A, B, action="degraded"), 14.0)
    assert written is not None
    assert (written.number, written.what, written.who) == (5, "preempted", "host c")
    assert (written.ranks_before, written.ranks_after) == (6, 4)


def test_a_failure_before_the_first_step_is_a_second_incident_and_the_steps_are_lost_once(recorder: Recorder) -> None:
    hear(recorder, 10.0, WorkerFailed("b", 1, 3, Cause.SIGNAL))
    assert recorder.began(*started(2, A, B, action="restarted", blame=KILLED), 11.0) is not None
    hear(recorder, 12.0, WorkerFailed("b", 2, 3, Cause.SIGNAL))
    second = recorder.began(*started(3, A, B, action="restarted", blame=KILLED), 13.0)
    assert second is not None
    assert (second.number, second.step_before) == (5, 20)
    hear(recorder, 14.0, FirstStep("a", 3, 19))
    whole = hear(recorder, 14.0, FirstStep("b", 3, 19))
    assert whole is not None
    assert (whole.number, whole.steps_lost) == (5, 2)


@pytest.mark.parametrize(
    ("end", "is_incident"),
    [(EndRun(0, "training is over"), False), (EndRun(137, "the budget is spent", blame=KILLED), True)],
    ids=["well", "failed"],
)
def test_the_end_of_a_run_is_an_incident_if_it_has_failed(recorder: Recorder, end: EndRun, is_incident: bool) -> None:
    written = recorder.did(end, 20.0)
    assert (written is not None) is is_incident
    if written is not None:
        assert (written.action, written.ranks_after, written.lost_ranks) == ("ended", 0, (3,))


def test_a_leader_that_takes_over_records_the_loss_of_the_one_before() -> None:
    recorder = Recorder("run", first_number=1, wall_clock=lambda: 5.0)
    recorder.took_over(value_of(7, A, B))
    hear(recorder, 0.0, HostLost("b", True, "it led, and is gone"))
    hear(recorder, 0.5, FirstStep("a", 7, 3), RoundStopped("a", 7, step=40))
    written = recorder.began(*started(8, A, action="degraded", blame=B_LOST), 1.0)
    assert written is not None
    assert (written.ranks_before, written.ranks_after, written.step_before) == (4, 2, 40)


@pytest.mark.parametrize("left", ["", '{"number": 1, "wh'], ids=["nothing", "a torn line"])
def test_lines_are_appended_after_what_a_killed_writer_left(
    tmp_path: Path, left: str, recorder: Recorder, say: Callable[[str], None]
) -> None:
    incident = recorder.did(EndRun(1, "why", blame=KILLED), 20.0)
    assert incident is not None
    path = tmp_path / "folder" / incidents.FILE
    path.parent.mkdir()
    path.write_text(left)
    writer = LineWriter(path, say)
    writer.put(incidents.to_line(incident))
    writer.close()
    writer.close()
    assert incidents.read(path.parent) == (incident,)


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, say: Callable[[str], None], said: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    writer = LineWriter(tmp_path / "file" / "incidents.jsonl", say)
    writer.put("{}")
    writer.put("{}")
    writer.close()
    assert len(said) == 1
    assert "incidents are not recorded" in said[0]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def say(said: list[str]) -> Callable[[str], None]:
    return said.append
