"""What the page's script draws, as plain values: numbers in as few digits as a picture shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_dist.monitor.record import Phase, RankHeader
from lightning_dist.monitor.report.course import Stretch
from lightning_dist.monitor.report.incident_marks import IncidentMark
from lightning_dist.monitor.report.series import Series
from lightning_dist.monitor.report.shown import EXPOSED, HIDDEN, MAIN, Shown
from lightning_dist.monitor.report.words import PHASES

IN_LANE = "lane"  # colour of communication in a lane of its own
_PREFIXES = {
    "comm": IN_LANE,
    "data": Phase.DATA_WAIT.value,
    "checkpoint": Phase.CHECKPOINT.value,
    "pipeline.forward": Phase.FORWARD.value,
    "pipeline.backward": Phase.BACKWARD.value,
    "pipeline.loss": Phase.FORWARD.value,
}


def payload(
    *,
    ranks: Iterable[tuple[RankHeader, str | None]],
    shown: Sequence[Shown],
    first: int,
    series: Sequence[Series],
    stretches: Sequence[Stretch],
    incidents: Sequence[IncidentMark] = (),
) -> dict[str, Any]:
    """All that the script needs.

    Args:
        ranks: The ranks shown, with a word about those to mark.
        shown: The timelines.
        first: Which of them to begin with.
        series: The curves.
        stretches: The course of the run.
        incidents: Lines across the curves.
    """
    names = _Names()
    return {
        "phases": [[phase.value, title] for phase, title in PHASES.items()],
        "ranks": [[header.rank, header.host, mark] for header, mark in ranks],
        "first": first,
        "steps": [_shown(each, names) for each in shown],
        "names": names.table,
        "series": [_series(each) for each in series if each.lines],
        "incidents": [[mark.step, _number(mark.at_s), mark.title] for mark in incidents],
        "course": {
            "steps": [stretch.first for stretch in stretches],
            "ends": [stretch.last for stretch in stretches],
            "times": [_number(stretch.at_s) for stretch in stretches],
            "phases": [[_number(stretch.phases.get(phase, 0.0)) for stretch in stretches] for phase in PHASES],
        },
    }


class _Names:
    """Names of boxes, each said once: its title and the name of its colour."""

    def __init__(self) -> None:
        self.table: list[tuple[str, str]] = []
        self._places: dict[tuple[str, bool], int] = {}

    def place(self, name: str, lane: str) -> int:
        key = (name, lane == MAIN)
        if key not in self._places:
            self._places[key] = len(self.table)
            self.table.append((_title(name), _colour(name)))
        return self._places[key]


def _title(name: str) -> str:
    try:
        return PHASES[Phase(name)]
    except ValueError:
        return name


def _colour(name: str) -> str:
    if name == EXPOSED:
        return Phase.COMMUNICATION.value
    if name == HIDDEN:
        return IN_LANE
    if name in set(Phase):
        return name
    found = [
        colour
        for prefix, colour in _PREFIXES.items()
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix}_"))
    ]
    return found[0] if found else Phase.OTHER.value


def _shown(shown: Shown, names: _Names) -> dict[str, Any]:
    said: dict[str, Any] = {"step": shown.step, "us": _micro(shown.length_s), "rows": []}
    if shown.notes:
        said["notes"] = list(shown.notes)
    for key in ("with_spans", "aligned", "merged"):
        if getattr(shown, key):
            said[key] = 1
    for row in shown.rows:
        boxes: list[float] = []
        for box in row.boxes:
            boxes += (_micro(box.start_s), _micro(box.length_s), names.place(box.name, row.lane))
        said["rows"].append([row.rank, row.lane, boxes])
    return said


def _series(series: Series) -> dict[str, Any]:
    said: dict[str, Any] = {
        "metric": series.metric,
        "title": series.title,
        "form": series.form,
        "lines": [
            [
                line.rank,
                [point.step for point in line.points],
                [_number(point.at_s) for point in line.points],
                [_number(point.value) for point in line.points],
            ]
            for line in series.lines
        ],
    }
    if series.band:
        columns = zip(*series.band, strict=True)
        said["band"] = [[_number(value) for value in column] for column in columns]
    if series.metric.startswith("checkpoint"):
        said["stems"] = 1
    if series.limit is not None:
        said["limit"] = series.limit
    return said


def _micro(seconds: float) -> float:
    """Microseconds; a tenth of one counts only where there are few."""
    micro = seconds * 1e6
    return round(micro) if abs(micro) >= 100 else _number(round(micro, 1))


def _number(value: float, figures: int = 4) -> float:
    """Few figures; whole numbers without a point. Not finite is 0: it has been left out before, where it matters."""
    if not math.isfinite(value):
        return 0
    if float(value).is_integer() and abs(value) < 1e15:
        return int(value)
    rounded = float(f"{value:.{figures}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
