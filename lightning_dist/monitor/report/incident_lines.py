"""Goodput and incidents for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from lightning_dist.incidents import PHASES, Incident
from lightning_dist.monitor.goodput import Goodput, goodput
from lightning_dist.monitor.report import incident_words as words
from lightning_dist.monitor.report.pieces import counted
from lightning_dist.monitor.report.quantities import SHARE, text
from lightning_dist.monitor.rounds import WholeRun


def incident_lines(run: WholeRun) -> list[RenderableType]:
    """Nothing for a run of one round to which nothing happened."""
    if len(run.rounds) == 1 and not run.incidents:
        return []
    return [Text(goodput_line(goodput(run))), *(line for incident in run.incidents for line in _lines(incident))]


def goodput_line(of: Goodput) -> str:
    """Useful time over wall time, and where the rest went."""
    return (
        f"goodput {text(of.share, SHARE)}: of {text(of.wall_s, 's')} in {counted(of.rounds, 'round')}, "
        f"{text(of.useful_s, 's')} went into {counted(of.steps, 'step')} that stand, {text(of.repeated_s, 's')} into "
        f"{counted(of.steps_lost, 'step')} done again, {text(of.between_s, 's')} into none"
    )


def _lines(incident: Incident) -> Iterator[Text]:
    yield Text(f"incident {incident.number}, {words.moment(incident)}: {words.what(incident)}", style="bold")
    yield from (Text(f"  {said}", style="dim") for said in (incident.who, incident.detail) if said)
    lost = "steps lost unknown" if incident.steps_lost is None else f"{counted(incident.steps_lost, 'step')} lost"
    size = f", {words.size(incident)} ranks" if words.size(incident) else ""
    yield Text(f"  {words.action(incident)}{size}; {lost}")
    if incident.seconds:
        known = [name for name in PHASES if name in incident.seconds]
        parts = (f"{words.phase_title(name).lower()} {text(incident.seconds[name], 's')}" for name in known)
        yield Text(f"  {text(incident.total_s, 's')} until the next step: {', '.join(parts)}")
