"""Where incidents lie on the axes of a report. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_dist.incidents import Incident
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report import incident_words as words


class IncidentMark(NamedTuple):
    """A line across the curves.

    Attributes:
        step: The last that was done before; ``None``: unknown.
        at_s: Seconds after the run's start.
        title: What it was.
    """

    step: int | None
    at_s: float
    title: str


def marks_of_incidents(incidents: Sequence[Incident], record: RunRecord) -> list[IncidentMark]:
    """Those of all incidents whose time is one."""
    start_s = min((rank.header.started_wall_ns for rank in record.ranks.values()), default=0) / 1e9
    return [
        IncidentMark(
            incident.step_before if incident.step_before is not None else incident.step_after,
            incident.time - start_s,
            f"incident {incident.number}: {words.what(incident)}",
        )
        for incident in incidents
        if math.isfinite(incident.time)
    ]
