"""What incidents and their phases are called, for people. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from lightning_dist.incidents import Incident

PHASES: Mapping[str, tuple[str, str]] = {
    "detect": ("Notice", "communication"),
    "takeover": ("Take over", "backward"),
    "stop": ("Stop", "checkpoint"),
    "regroup": ("Regroup", "pipeline_idle"),
    "start": ("Start", "data_wait"),
    "load": ("Load", "host_to_device"),
    "first_step": ("First step", "forward"),
}
"""Of each phase of :data:`lightning_dist.incidents.PHASES` its title, and the step's phase whose colour it has."""

_WHAT: Mapping[str, str] = {
    "exit": "a rank ended with an error",
    "signal": "a rank was killed",
    "out_of_memory": "a rank was killed for memory",
    "hang": "a rank hung",
    "host_lost": "a host was lost",
    "unhealthy": "a host did not pass its check",
    "preempted": "a host was told to end",
    "start": "a round did not come to its first step",
    "regrown": "a host came back",
}
_ACTIONS: Mapping[str, str] = {
    "restarted": "started again",
    "degraded": "went on smaller",
    "regrown": "grew",
    "waited": "waited for the host",
    "ended": "the run ended",
}


def what(incident: Incident) -> str:
    """What happened; what this release does not know by its own name."""
    return _WHAT.get(incident.what, incident.what.replace("_", " "))


def action(incident: Incident) -> str:
    """What was done about it."""
    return _ACTIONS.get(incident.action, incident.action.replace("_", " "))


def size(incident: Incident) -> str:
    """``4``, or ``4 to 2`` ranks; empty if nobody counted."""
    if not incident.ranks_before:
        return ""
    if incident.ranks_after == incident.ranks_before:
        return str(incident.ranks_before)
    return f"{incident.ranks_before} to {incident.ranks_after}"


def phase_title(name: str) -> str:
    """Of a phase; of one that this release does not know, its name."""
    return PHASES[name][0] if name in PHASES else name.replace("_", " ")


def phase_colour(name: str) -> str:
    """The phase of a step whose colour it has."""
    return PHASES[name][1] if name in PHASES else "other"


def moment(incident: Incident) -> str:
    """When it was noticed, in the time of whoever reads."""
    try:
        return datetime.datetime.fromtimestamp(incident.time).astimezone().isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def steps_lost(incident: Incident) -> str:
    """As text."""
    return "unknown" if incident.steps_lost is None else f"{incident.steps_lost:,}"
