"""Events cut into steps: to which phase an instant goes, what is exposed, what adds up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.events import WAIT, Event, EventKind
from lightning_dist.monitor.record import Phase, StepRecord
from lightning_dist.monitor.steps import TAIL, Batches, CutStep, Piece, StepCutter, innermost

MAIN, LANE = 1, 2  # threads
MS = 1_000_000


def span(name: str, start: int, end: int, *, thread: int = MAIN, lane: str = "main", **attributes: Any) -> Event:
    """Of a step in milliseconds."""
    return Event(EventKind.SPAN, name, 0, 0, lane, start * MS, end * MS, 0.0, attributes, thread)


def phase(phase: Phase, start: int, end: int) -> Piece:
    return Piece(start * MS, end * MS, phase)


def on_lane(start: int, end: int, tier: str = "world", **attributes: Any) -> Event:
    return span("comm.cross", start, end, thread=LANE, lane="cross", tier=tier, **attributes)


def cut(*seen: Event | Piece, until: int = 100, batches: Batches | None = None) -> CutStep:
    phases = [each for each in seen if isinstance(each, Piece)]
    events = [each for each in seen if isinstance(each, Event)]
    return StepCutter(0, thread=MAIN).cut(0, 0, until * MS, phases, events, batches or Batches(1))


def ms(record: StepRecord) -> dict[Phase, float]:
    """The phases that took time, in milliseconds."""
    return {name: round(seconds * 1e3, 6) for name, seconds in record.phases.items() if seconds}


def test_an_instant_goes_to_the_innermost_span_and_the_rest_is_other() -> None:
    record = cut(
        phase(Phase.DATA_WAIT, 0, 10),
        phase(Phase.FORWARD, 25, 40),
        phase(Phase.BACKWARD, 40, 70),
        phase(Phase.OPTIMIZER, 20, 80),
    ).record
    assert ms(record) == {
        Phase.DATA_WAIT: 10,
        Phase.FORWARD: 15,
        Phase.BACKWARD: 30,
        Phase.OPTIMIZER: 15,
        Phase.OTHER: 30,
    }


def test_what_is_inside_a_validation_or_a_checkpoint_is_its_own() -> None:
    done = cut(
        phase(Phase.HOST_TO_DEVICE, 12, 14),
        span("comm.trainer", 20, 30, lane="trainer", tier="host"),
        phase(Phase.LOGGING, 40, 45),
        phase(Phase.VALIDATION, 10, 50),
        span("comm.barrier", 62, 68, lane="trainer", tier="host"),
        phase(Phase.CHECKPOINT, 60, 70),
        on_lane(30, 40),
    )
    assert ms(done.record) == {Phase.VALIDATION: 40, Phase.CHECKPOINT: 10, Phase.OTHER: 50}
    assert done.record.communication is not None
    assert done.record.communication.total_s == 0
    assert done.record.communication.operations == 0


def test_an_operation_of_the_training_thread_is_exposed_and_one_of_a_lane_is_not() -> None:
    record = cut(
        phase(Phase.BACKWARD, 10, 60),
        on_lane(20, 50, size_bytes=100),
        span("comm.norm", 60, 65, lane="whole", tier="host", size_bytes=4),
        phase(Phase.OPTIMIZER, 60, 80),
    ).record
    assert ms(record)[Phase.COMMUNICATION] == 5
    assert ms(record)[Phase.BACKWARD] == 50
    assert ms(record)[Phase.OPTIMIZER] == 15
    traffic = record.communication
    assert traffic is not None
    assert (traffic.total_s, traffic.exposed_s, traffic.size_bytes, traffic.operations) == (0.035, 0.005, 104, 2)
    assert record.tiers["world"].exposed_s == 0
    assert record.tiers["host"].exposed_s == record.tiers["host"].total_s == 0.005


def test_the_end_of_a_backward_is_exposed_as_far_as_an_operation_is_under_way() -> None:
    record = cut(phase(Phase.BACKWARD, 10, 60), span(TAIL, 40, 60), on_lane(20, 50)).record
    assert ms(record)[Phase.COMMUNICATION] == 10
    assert ms(record)[Phase.BACKWARD] == 40
    assert record.tiers["world"].overlapped_s == pytest.approx(0.02)


def test_a_wait_for_lanes_is_exposed_and_counts_as_under_way() -> None:
    record = cut(phase(Phase.FORWARD, 0, 50), span(WAIT, 20, 31), on_lane(10, 30)).record
    assert ms(record)[Phase.COMMUNICATION] == 11
    assert record.communication is not None
    assert record.communication.total_s == 0.021
    assert record.tiers["world"].exposed_s == 0.01


def test_waiting_for_a_neighbour_is_idle_and_no_communication() -> None:
    record = cut(
        span("comm.activations", 10, 20, lane="activations", tier="host"),
        span("pipeline.forward", 20, 30),
        span("comm.gradients", 30, 50, lane="gradients", tier="host"),
        span("pipeline.backward", 50, 70),
        phase(Phase.FORWARD, 5, 75),
    ).record
    assert ms(record) == {
        Phase.PIPELINE_IDLE: 30,
        Phase.FORWARD: 20,
        Phase.BACKWARD: 20,
        Phase.OTHER: 30,
    }
    assert record.communication is not None
    assert record.communication.total_s == 0


def test_events_that_reach_beyond_a_step_count_inside_it_only() -> None:
    record = (
        StepCutter(0, thread=MAIN)
        .cut(3, 10 * MS, 20 * MS, [phase(Phase.FORWARD, 5, 12)], [on_lane(0, 100)], Batches(1))
        .record
    )
    assert ms(record) == {Phase.FORWARD: 2, Phase.OTHER: 8}
    assert record.communication is not None
    assert record.communication.total_s == 0.01
    assert record.step == 3


def test_counters_and_batches_are_a_steps_own() -> None:
    counter = Event(EventKind.COUNTER, "data.skipped", 0, 0, "main", MS, MS, 2.0, {}, LANE)
    record = cut(counter, counter, batches=Batches(4, samples=32, tokens=None, size_bytes=1024)).record
    assert record.counters == {"data.skipped": 4.0}
    assert (record.micro_batches, record.samples, record.tokens, record.batch_bytes) == (4, 32, None, 1024)


def test_unknown_phases_are_none_and_so_is_communication_that_is_not_seen() -> None:
    cutter = StepCutter(0, thread=MAIN, unknown=[Phase.HOST_TO_DEVICE], sees_communication=False)
    record = cutter.cut(0, 0, MS, [], [], Batches(1)).record
    assert record.phases[Phase.HOST_TO_DEVICE] is None
    assert record.communication is None


def test_spans_show_phases_and_lanes() -> None:
    spans = cut(phase(Phase.FORWARD, 10, 20), phase(Phase.FORWARD, 20, 30), on_lane(15, 25)).spans()
    assert [(each.lane, each.name, each.start_ns, each.end_ns) for each in spans] == [
        ("main", "forward", 10 * MS, 30 * MS),
        ("cross", "comm.cross", 15 * MS, 25 * MS),
    ]


PHASES = st.sampled_from([each for each in Phase if each not in (Phase.COMMUNICATION, Phase.OTHER)])


@st.composite
def nested(draw: st.DrawFn) -> list[Event | Piece]:
    """Spans of a thread as it emits them: inside first."""
    events: list[Event | Piece] = []

    def fill(start: int, end: int, depth: int) -> None:
        at = start
        while depth and at < end and draw(st.booleans()):
            low = draw(st.integers(at, end))
            high = draw(st.integers(low, end))
            fill(low, high, depth - 1)
            kind = draw(st.integers(0, 3))
            if kind == 0:
                events.append(span("comm.x", low, high, lane="whole", tier="host"))
            elif kind == 1:
                events.append(span(WAIT if draw(st.booleans()) else TAIL, low, high))
            else:
                events.append(phase(draw(PHASES), low, high))
            at = high

    fill(0, 100, 3)
    return events


LANES = st.lists(
    st.builds(
        lambda a, b, tier: on_lane(min(a, b), max(a, b), tier),
        st.integers(-5, 110),
        st.integers(-5, 110),
        st.sampled_from(["host", "world"]),
    ),
    max_size=6,
)


@given(nested(), LANES)
def test_phases_add_up_and_exposed_is_a_part_of_the_total(events: list[Event | Piece], lanes: list[Event]) -> None:
    done = cut(*events, *lanes)
    record = done.record
    assert sum(seconds or 0.0 for seconds in record.phases.values()) == pytest.approx(record.duration_s, abs=1e-12)
    assert all((seconds or 0.0) >= 0 for seconds in record.phases.values())
    traffic = record.communication
    assert traffic is not None
    assert traffic.exposed_s == pytest.approx(record.phases[Phase.COMMUNICATION], abs=1e-12)
    for each in (traffic, *record.tiers.values()):
        assert -1e-12 <= each.overlapped_s <= each.total_s + 1e-12
        assert each.exposed_s + each.overlapped_s == pytest.approx(each.total_s, abs=1e-12)
    assert all(a.end_ns <= b.start_ns for a, b in zip(done.pieces, done.pieces[1:], strict=False))


@given(nested())
def test_each_instant_goes_to_the_span_that_was_entered_last(events: list[Event | Piece]) -> None:
    known = [each for each in events if isinstance(each, Piece)]
    pieces = innermost(reversed(known), 0, 100 * MS)
    for moment in range(100):
        at = moment * MS + MS // 2
        phases = [each.phase for each in known if each.start_ns <= at < each.end_ns]  # inside first
        found = [piece.phase for piece in pieces if piece.start_ns <= at < piece.end_ns]
        keeping = [each for each in reversed(phases) if each in (Phase.VALIDATION, Phase.CHECKPOINT)]
        assert found == (keeping[:1] or phases[:1])
