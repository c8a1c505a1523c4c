"""The curves of a report: of each metric, a line a rank, thinned, and over many ranks a band."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dist.monitor.record import METRICS, Metric, Phase, RankRecord, RunRecord, StepRecord
from lightning_dist.monitor.report import quantities
from lightning_dist.monitor.report.extremes import keep_extremes, stretches_of

POINTS = 600  # of a line at most
ALL_POINTS = 6000  # of the lines of one metric together, as far as 40 a line allow
_LEAST_POINTS = 40
STRETCHES = 240  # of a band
SINGLE_LINES = 8  # more ranks than these are drawn as a band
LIMITS: Mapping[str, float] = {"communication_share": 0.3}
"""Where a metric begins to be a concern."""

STEP_TIME = "step_time"
NUMBERS = 6  # metrics that every report shows, measured or not


class Point(NamedTuple):
    """One value: in which step, how many seconds after the run's start, how much."""

    step: int
    at_s: float
    value: float


@dataclass(frozen=True)
class Line:
    """The points of one rank, in order of time."""

    rank: int
    points: tuple[Point, ...]


class Stretch(NamedTuple):
    """What the ranks' values are in a stretch of steps: its middle, then the least, the median and the most."""

    step: int
    at_s: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        metric: Its name.
        title: For people.
        number: Its place among the six; 0 for the others.
        form: See :func:`~lightning_dist.monitor.report.quantities.text`.
        lines: Thinned; none if it was not measured.
        band: Of all values of all ranks; none for few ranks.
        median: Of all values.
        most: The largest value.
        why: Why there is none, if there is none.
        limit: Where it begins to be a concern.
        of_steps: Whether it comes from the steps, as no callback sampled it.
    """

    metric: str
    title: str
    number: int
    form: str
    lines: tuple[Line, ...] = ()
    band: tuple[Stretch, ...] = ()
    median: float | None = None
    most: float | None = None
    why: str | None = None
    limit: float | None = None
    of_steps: bool = False


def all_series(record: RunRecord, *, shown_ranks: Sequence[int]) -> list[Series]:
    """The step's time, the six metrics in order, then the others that were measured.

    Args:
        record: The run.
        shown_ranks: Whose lines to keep; bands are of all.
    """
    start_ns = min((rank.header.started_wall_ns for rank in record.ranks.values()), default=0)
    step_time = Metric("s", "Time of a step")
    found = [_series(STEP_TIME, step_time, _points_of_steps(record, start_ns, STEP_TIME), shown_ranks, of_steps=True)]
    gathered = _points_of_samples(record, start_ns)
    for name, metric in sorted(METRICS.items(), key=lambda item: item[1].number or NUMBERS + 1):
        points, of_steps = gathered.get(name), False
        if points is None and name in _OF_STEPS:
            points, of_steps = _points_of_steps(record, start_ns, name), True
        if points:
            found.append(_series(name, metric, points, shown_ranks, of_steps=of_steps))
        elif metric.number:
            found.append(Series(name, metric.title, metric.number, _form(name, metric), why=_why(record, name)))
    # GPU and CPU utilisation share a number, as do the two times of a checkpoint: one that is measured stands for both.
    stands = {each.number: each for each in reversed(found) if not each.lines}
    stands |= {each.number: each for each in found if each.lines}
    return [each for each in found if each.lines or stands[each.number] is each]


def _form(name: str, metric: Metric) -> str:
    return quantities.form_of(name, metric.unit)


def _series(
    name: str, metric: Metric, points: Mapping[int, Sequence[Point]], shown: Sequence[int], *, of_steps: bool
) -> Series:
    values = [point.value for line in points.values() for point in line]
    drawn = [rank for rank in shown if rank in points] or sorted(points)[:1]
    room = max(_LEAST_POINTS, min(POINTS, ALL_POINTS // max(1, len(drawn))))
    return Series(
        metric=name,
        title=metric.title,
        number=metric.number,
        form=_form(name, metric),
        lines=tuple(Line(rank, _thinned(points[rank], room)) for rank in drawn),
        band=_band(points) if len(points) > SINGLE_LINES else (),
        median=statistics.median(values) if values else None,
        most=max(values, default=None),
        limit=LIMITS.get(name),
        of_steps=of_steps,
    )


def _thinned(points: Sequence[Point], room: int) -> tuple[Point, ...]:
    """Without what lies between two of its own value, then without what is no extreme."""
    last = len(points) - 1
    bends = [
        point
        for index, point in enumerate(points)
        if index in (0, last) or not points[index - 1].value == point.value == points[index + 1].value
    ]
    return tuple(bends[index] for index in keep_extremes([point.value for point in bends], room))


def _band(points: Mapping[int, Sequence[Point]]) -> tuple[Stretch, ...]:
    """Values of all ranks by stretches of as many steps each."""
    by_step: dict[int, list[Point]] = {}
    for line in points.values():
        for point in line:
            by_step.setdefault(point.step, []).append(point)
    steps = sorted(by_step)
    stretches = []
    for first, end in stretches_of(len(steps), STRETCHES):
        inside = [point for step in steps[first:end] for point in by_step[step]]
        values = [point.value for point in inside]
        at_s = statistics.median(point.at_s for point in inside)
        middle = steps[(first + end - 1) // 2]
        stretches.append(Stretch(middle, at_s, min(values), statistics.median(values), max(values)))
    return tuple(stretches)


def _points_of_samples(record: RunRecord, start_ns: int) -> dict[str, dict[int, list[Point]]]:
    found: dict[str, dict[int, list[Point]]] = {}
    for number, rank in record.ranks.items():
        for sample in rank.samples:
            point = Point(sample.step, (sample.wall_ns - start_ns) / 1e9, sample.value)
            found.setdefault(sample.metric, {}).setdefault(number, []).append(point)
    return found


def _points_of_steps(record: RunRecord, start_ns: int, name: str) -> dict[int, list[Point]]:
    measure = _OF_STEPS[name]
    found: dict[int, list[Point]] = {}
    for number, rank in record.ranks.items():
        points = list(_measured(rank, start_ns, measure))
        if points:
            found[number] = points
    return found


def _measured(rank: RankRecord, start_ns: int, measure: Callable[[StepRecord], float | None]) -> Iterable[Point]:
    for step in rank.steps:
        value = measure(step)
        if value is not None:
            yield Point(step.step, (rank.header.wall_ns(step.end_ns) - start_ns) / 1e9, value)


def _phase(phase: Phase) -> Callable[[StepRecord], float | None]:
    return lambda step: step.phases.get(phase)


def _communication_share(step: StepRecord) -> float | None:
    known = step.communication is not None and step.duration_s > 0
    return step.communication.total_s / step.duration_s if step.communication and known else None


def _exposed_share(step: StepRecord) -> float | None:
    known = step.communication is not None and step.duration_s > 0
    return step.communication.exposed_s / step.duration_s if step.communication and known else None


_OF_STEPS: Mapping[str, Callable[[StepRecord], float | None]] = {
    STEP_TIME: lambda step: step.duration_s,
    "data_wait": _phase(Phase.DATA_WAIT),
    "communication_share": _communication_share,
    "exposed_communication_share": _exposed_share,
    "checkpoint_stall": _phase(Phase.CHECKPOINT),
}
_STANDS_FOR = {
    "communication_share": "communication",
    "exposed_communication_share": "communication",
    "checkpoint_stall": "checkpoint",
}


def _why(record: RunRecord, name: str) -> str:
    """What the ranks say; that it was not sampled, if they say nothing."""
    for rank in record.ranks.values():
        for key in (name, _STANDS_FOR.get(name, name)):
            if key in rank.header.unavailable:
                return str(rank.header.unavailable[key])
    if METRICS[name].number == 5:
        return "no checkpoint was written"
    return "not sampled; ClusterMonitor() among the callbacks samples it"
