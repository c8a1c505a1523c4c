"""Which steps a report can show, and of each the boxes of its timeline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_dist.monitor.record import Phase, RankRecord, RunRecord, Span, StepRecord, Traffic
from lightning_dist.monitor.report.breakdown import Breakdown
from lightning_dist.monitor.report.extremes import spread_evenly
from lightning_dist.monitor.report.rows import rows_of
from lightning_dist.monitor.report.words import PHASES

CELLS = 16_000  # boxes of steps without spans, all steps and ranks together, about
_CELLS_EACH = len(Phase) + 4  # of a rank's step: its phases, and what it communicates on two tiers
BOXES = 24_000  # boxes of steps with spans
LEAST_STEPS = 20
SLOWEST = 5
FINEST = 2000  # boxes of one name closer than this part of a step become one, where a row has more than _MANY
_MANY = 400
MAIN, COMMUNICATION = "main", "communication"
EXPOSED, HIDDEN = "exposed", "behind compute"


class Box(NamedTuple):
    """Something that took time, in seconds from the start of the timeline."""

    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True)
class Row:
    """One line of boxes.

    Attributes:
        rank: Whose.
        lane: Its name.
        boxes: In order of time.
    """

    rank: int
    lane: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Shown:
    """One timeline.

    Attributes:
        step: Which; ``None`` is the average.
        length_s: Of the timeline.
        rows: By rank, ``main`` first.
        notes: What is special about the step (``"slowest"``, ...).
        with_spans: Whether boxes lie where they were; else they are sums, laid end to end.
        aligned: Whether each rank begins at 0, as the hosts' clocks do not agree.
        merged: Whether boxes too small to see were joined.
    """

    step: int | None
    length_s: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    with_spans: bool = False
    aligned: bool = False
    merged: bool = False


@dataclass
class _Step:
    """One step of the shown ranks."""

    records: dict[int, StepRecord] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return max((record.duration_s for record in self.records.values()), default=0.0)

    @property
    def num_spans(self) -> int:
        return sum(map(len, self.spans.values()))


def average(ranks: Sequence[Breakdown]) -> Shown:
    """The mean step of each rank: its phases end to end, its communication below."""
    rows: list[Row] = []
    for rank in ranks:
        rows += _rows_of_sums(rank.header.rank, 0.0, rank.phases, rank.communication, rank.tiers)
    return Shown(None, max((rank.step_s for rank in ranks), default=0.0), tuple(rows))


def steps_of(record: RunRecord, ranks: Iterable[int], *, chosen: int | None = None) -> list[Shown]:
    """The timelines of steps, in order.

    All steps, if there is room. Else the chosen one, the slowest, one of median length, those with spans as far as
    there is room for boxes, and of the others as many as there is room for, evenly.

    Args:
        record: The run.
        ranks: Which ranks.
        chosen: A step that is to be among them.
    """
    shown_ranks = {rank: record.ranks[rank] for rank in ranks}
    steps = _gather(shown_ranks)
    notes = _notes(steps, chosen)
    order = [*notes, *(step for step in steps if steps[step].spans), *_evenly(steps, len(shown_ranks))]
    found: dict[int, Shown] = {}
    room = BOXES
    for step in dict.fromkeys(order):
        spans = steps[step].num_spans
        with_spans = 0 < spans <= room or (step == chosen and spans > 0)
        room -= spans if with_spans else 0
        if with_spans or step in notes or len(found) < _most_steps(len(shown_ranks)):
            found[step] = _shown(step, steps[step], shown_ranks, notes.get(step, ()), with_spans=with_spans)
    return [found[step] for step in sorted(found)]


def _most_steps(ranks: int) -> int:
    return max(LEAST_STEPS, CELLS // (max(1, ranks) * _CELLS_EACH))


def _evenly(steps: Mapping[int, _Step], ranks: int) -> list[int]:
    numbers = sorted(steps)
    return [numbers[index] for index in spread_evenly(len(numbers), _most_steps(ranks))]


def _gather(ranks: Mapping[int, RankRecord]) -> dict[int, _Step]:
    steps: dict[int, _Step] = {}
    for number, rank in ranks.items():
        for record in rank.steps:
            steps.setdefault(record.step, _Step()).records[number] = record
        for span in rank.spans:
            if span.step in steps and number in steps[span.step].records:
                steps[span.step].spans.setdefault(number, []).append(span)
    return steps


def _notes(steps: Mapping[int, _Step], chosen: int | None) -> dict[int, tuple[str, ...]]:
    """What is special about some steps; the chosen one first."""
    notes: dict[int, list[str]] = {}
    if chosen is not None and chosen in steps:
        notes.setdefault(chosen, []).append("chosen")
    if not steps:
        return {}
    durations = {step: each.duration_s for step, each in steps.items()}
    middle = statistics.median(durations.values())
    with_spans = [step for step in steps if steps[step].spans] or list(steps)
    typical = min(with_spans, key=lambda step: (abs(durations[step] - middle), step))
    notes.setdefault(typical, []).append("nearest to the median")
    for place, step in enumerate(sorted(durations, key=lambda step: (-durations[step], step))[:SLOWEST]):
        notes.setdefault(step, []).append("slowest" if place == 0 else f"slowest but {place}")
    return {step: tuple(said) for step, said in notes.items()}


def _shown(
    number: int, step: _Step, ranks: Mapping[int, RankRecord], notes: Sequence[str], *, with_spans: bool
) -> Shown:
    starts = {rank: ranks[rank].header.wall_ns(record.start_ns) for rank, record in step.records.items()}
    first = min(starts.values())
    longest_s = step.duration_s
    aligned = max(starts.values()) - first > longest_s * 1e9
    rows: list[Row] = []
    merged = False
    for rank, record in sorted(step.records.items()):
        offset_s = 0.0 if aligned else (starts[rank] - first) / 1e9
        spans = step.spans.get(rank, []) if with_spans else []
        if spans:
            of_rank, joined = _rows_of_spans(rank, offset_s, record, spans, longest_s / FINEST)
            rows += of_rank
            merged |= joined
        else:
            rows += _rows_of_sums(rank, offset_s, record.phases, record.communication, record.tiers)
    length_s = max((box.start_s + box.length_s for row in rows for box in row.boxes), default=longest_s)
    return Shown(number, max(length_s, longest_s), tuple(rows), tuple(notes), with_spans, aligned, merged)


def _rows_of_spans(
    rank: int, offset_s: float, record: StepRecord, spans: Sequence[Span], finest_s: float
) -> tuple[list[Row], bool]:
    lanes = dict.fromkeys(span.lane for span in spans)
    rows: list[Row] = []
    merged = False
    for lane in sorted(lanes, key=lambda lane: (lane != MAIN, lane)):
        for row in rows_of([span for span in spans if span.lane == lane]):
            boxes = [
                Box(span.name, offset_s + (span.start_ns - record.start_ns) / 1e9, (span.end_ns - span.start_ns) / 1e9)
                for span in row
            ]
            if len(boxes) > _MANY:
                whole = len(boxes)
                boxes = _joined(boxes, finest_s)
                merged |= len(boxes) < whole
            rows.append(Row(rank, lane, tuple(boxes)))
    return rows, merged


def _joined(boxes: Sequence[Box], finest_s: float) -> list[Box]:
    """Boxes of one name, so close to each other that nobody could tell them apart, as one."""
    found: list[Box] = []
    for box in boxes:
        if found and found[-1].name == box.name:
            last = found[-1]
            gap_s = box.start_s - last.start_s - last.length_s
            if gap_s < finest_s and min(last.length_s, box.length_s) < finest_s:
                found[-1] = Box(box.name, last.start_s, box.start_s + box.length_s - last.start_s)
                continue
        found.append(box)
    return found


def _rows_of_sums(
    rank: int,
    start_s: float,
    phases: Mapping[Phase, float | None],
    communication: Traffic | None,
    tiers: Mapping[str, Traffic],
) -> list[Row]:
    boxes, at_s = [], start_s
    for phase in PHASES:
        length_s = phases.get(phase) or 0.0
        if length_s > 0:
            boxes.append(Box(phase.value, at_s, length_s))
            at_s += length_s
    rows = [Row(rank, MAIN, tuple(boxes))]
    by_lane = {f"{COMMUNICATION}, {name}": traffic for name, traffic in tiers.items()}
    if communication is not None and not by_lane:
        by_lane = {COMMUNICATION: communication}
    for lane, traffic in by_lane.items():
        hidden = Box(HIDDEN, start_s, max(0.0, traffic.overlapped_s))
        exposed = Box(EXPOSED, hidden.start_s + hidden.length_s, max(0.0, traffic.exposed_s))
        rows.append(Row(rank, lane, tuple(box for box in (hidden, exposed) if box.length_s > 0)))
    return rows
