"""A run as a trace that Perfetto and ``chrome://tracing`` open: ranks are processes, lanes threads, metrics counters.

The format is that of "Trace Event Format" (Duffy et al., Google, 2016): complete events (``X``), counters (``C``),
names (``M``) and instants (``i``), times in microseconds. Complete events of one thread must lie in each other or
apart, so operations of a lane that overlap go to threads of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import METRICS, RankRecord, RunRecord, StepRecord
from lightning_dist.monitor.report.finite import finite
from lightning_dist.monitor.report.incident_marks import marks_of_incidents
from lightning_dist.monitor.report.rows import rows_of
from lightning_dist.monitor.report.shown import MAIN
from lightning_dist.monitor.report.words import PHASES

_STEPS = 0  # the thread on which the steps lie; those of spans follow


def events(record: RunRecord, incidents: Sequence[Incident] = ()) -> Iterator[dict[str, Any]]:
    """All events, rank by rank, then the incidents; times count from the start of the first rank's record."""
    record = finite(record)
    start_ns = min((rank.header.started_wall_ns for rank in record.ranks.values()), default=0)
    for _, rank in sorted(record.ranks.items()):
        yield from _names(rank)
        yield from (_step(rank, step, start_ns) for step in rank.steps)
        yield from _spans(rank, start_ns)
        yield from _counters(rank, start_ns)
    yield from _marks(record, incidents)


def write_trace(record: RunRecord, path: Path, *, incidents: Sequence[Incident] = ()) -> None:
    """Write the trace, whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    about = {"run_id": record.facts.run_id, "strategy": record.facts.strategy, "started": record.facts.started}
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[')
            for number, event in enumerate(events(record, incidents)):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
            file.write("\n]}\n")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _names(rank: RankRecord) -> Iterator[dict[str, Any]]:
    header = rank.header
    yield _named(header.rank, 0, "process_name", name=f"rank {header.rank}, {header.host}, {header.device}")
    yield _named(header.rank, 0, "process_sort_index", sort_index=header.rank)
    yield _named(header.rank, _STEPS, "thread_name", name="steps")
    yield _named(header.rank, _STEPS, "thread_sort_index", sort_index=_STEPS)


def _named(process: int, thread: int, what: str, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments}


def _step(rank: RankRecord, step: StepRecord, start_ns: int) -> dict[str, Any]:
    phases = {
        f"{title}, ms": round(seconds * 1e3, 4)
        for phase, title in PHASES.items()
        if (seconds := step.phases.get(phase)) is not None
    }
    counted = {"samples": step.samples, "tokens": step.tokens, "micro_batches": step.micro_batches}
    return {
        "ph": "X",
        "pid": step.rank,
        "tid": _STEPS,
        "name": f"step {step.step}",
        "cat": "step",
        "ts": (rank.header.wall_ns(step.start_ns) - start_ns) / 1e3,
        "dur": step.duration_s * 1e6,
        "args": {**phases, **{name: value for name, value in counted.items() if value is not None}},
    }


def _spans(rank: RankRecord, start_ns: int) -> Iterator[dict[str, Any]]:
    process = rank.header.rank
    thread = _STEPS
    lanes = dict.fromkeys(span.lane for span in rank.spans)
    for lane in sorted(lanes, key=lambda lane: (lane != MAIN, lane)):
        for number, row in enumerate(rows_of([span for span in rank.spans if span.lane == lane])):
            thread += 1
            name = lane if number == 0 else f"{lane}, {number + 1}"
            yield _named(process, thread, "thread_name", name=name)
            yield _named(process, thread, "thread_sort_index", sort_index=thread)
            for span in row:
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "name": span.name,
                    "cat": "phase" if lane == MAIN else "operation",
                    "ts": (rank.header.wall_ns(span.start_ns) - start_ns) / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "args": {"step": span.step},
                }


def _counters(rank: RankRecord, start_ns: int) -> Iterator[dict[str, Any]]:
    for sample in rank.samples:
        metric = METRICS.get(sample.metric)
        yield {
            "ph": "C",
            "pid": rank.header.rank,
            "name": metric.title if metric else sample.metric,
            "ts": (sample.wall_ns - start_ns) / 1e3,
            "args": {"value" if metric is None or metric.unit == "1" else metric.unit: sample.value},
        }


def _marks(record: RunRecord, incidents: Sequence[Incident]) -> Iterator[dict[str, Any]]:
    """Lines across all ranks; they lie on the thread of the first one's steps."""
    for mark in marks_of_incidents(incidents, record):
        yield {
            "ph": "i",
            "s": "g",
            "pid": min(record.ranks, default=0),
            "tid": _STEPS,
            "name": mark.title,
            "cat": "incident",
            "ts": mark.at_s * 1e6,
        }
