"""The trace: valid by the rules of the trace event format, so that Perfetto opens it whole."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.monitor.report.trace import events, write_trace
from tests.support import reported

NAMES = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
REQUIRED = {
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "C": {"ph", "pid", "name", "ts", "args"},
    "M": {"ph", "pid", "tid", "name", "args"},
}


def check(event: dict[str, Any]) -> None:
    """The rules of the format for the kinds of events that are used."""
    assert set(event) == REQUIRED[event["ph"]]
    assert isinstance(event["name"], str)
    assert all(isinstance(event[key], int) for key in ("pid", "tid") if key in event)
    assert all(
        isinstance(event[key], float | int) and math.isfinite(event[key]) for key in ("ts", "dur") if key in event
    )
    assert isinstance(event["args"], dict)
    if event["ph"] == "X":
        assert event["dur"] >= 0
    elif event["ph"] == "C":
        assert event["args"]
        assert all(isinstance(value, float | int) and math.isfinite(value) for value in event["args"].values())
    else:
        assert set(event["args"]) == {NAMES[event["name"]]}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "new" / "trace.json"
    write_trace(reported.run(ranks=2, steps=60), path)
    assert [each.name for each in path.parent.iterdir()] == ["trace.json"]
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_every_event_keeps_the_rules(trace: dict[str, Any]) -> None:
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        check(event)


def test_ranks_are_processes_and_lanes_threads(trace: dict[str, Any]) -> None:
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert processes == {0: "rank 0, host-0, cpu", 1: "rank 1, host-1, cpu"}
    threads = [event["args"]["name"] for event in named if event["name"] == "thread_name" and event["pid"] == 1]
    assert threads == ["steps", "main", "comm.cross", "comm.cross, 2", "comm.host"]
    used = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert used == {(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"}


def test_events_of_a_thread_do_not_overlap(trace: dict[str, Any]) -> None:
    by_thread = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        assert all(first[1] <= second[0] + 0.01 for first, second in pairwise(sorted(spans)))


def test_steps_spans_and_samples_are_all_there(trace: dict[str, Any]) -> None:
    record = reported.run(ranks=2, steps=60)
    of_kind = defaultdict(list)
    for event in trace["traceEvents"]:
        of_kind[event.get("cat", event["ph"])].append(event)
    assert len(of_kind["step"]) == 120
    assert len(of_kind["phase"]) + len(of_kind["operation"]) == sum(len(rank.spans) for rank in record.ranks.values())
    assert len(of_kind["C"]) == sum(len(rank.samples) for rank in record.ranks.values())
    first = next(event for event in of_kind["step"] if event["pid"] == 1)
    step = record.ranks[1].steps[0]
    assert first["ts"] == pytest.approx((record.ranks[1].header.wall_ns(step.start_ns) - reported.START_NS) / 1e3)
    assert first["dur"] == pytest.approx(step.duration_s * 1e6)
    assert first["args"]["samples"] == 16
    assert "Pipeline idle, ms" not in first["args"], "what is not known is not 0"


def test_a_counter_has_its_unit(trace: dict[str, Any]) -> None:
    memory = next(event for event in trace["traceEvents"] if event["name"] == "Memory of the rank")
    assert memory["args"] == {"bytes": 8e8}


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError):
        write_trace(reported.run(ranks=1, steps=2), tmp_path / "trace.json")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_events_are_made_one_by_one() -> None:
    made = events(reported.run(ranks=1, steps=2))
    assert next(made)["name"] == "process_name"
