"""What went wrong in a run and what it cost: goodput, then a line an incident with its seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dist.incidents import PHASES, Incident
from lightning_dist.monitor.goodput import Goodput, goodput
from lightning_dist.monitor.report import incident_words as words
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import counted, figures_of, swatch
from lightning_dist.monitor.report.quantities import SHARE, text
from lightning_dist.monitor.rounds import WholeRun

_HEADS = (
    ("when", "spare"),
    ("what", None),
    ("then", "spare"),
    ("ranks", "number spare"),
    ("steps lost", "number"),
    ("until the next step", "number"),
    ("by phase", None),
)


def incidents_section(run: WholeRun) -> Markup | None:
    """``None``: the run has one round and nothing happened."""
    if len(run.rounds) == 1 and not run.incidents:
        return None
    of = goodput(run)
    parts = [("useful", of.useful_s, "forward"), ("done again", of.repeated_s, "data_wait")]
    return joined(
        figures_of(_figures(of)),
        _bar([*parts, ("in no step", of.between_s, "other")], of.wall_s),
        element("p", _explained(run, of), class_="note"),
        _table(run.incidents) if run.incidents else element("p", "No agent has written down why.", class_="note"),
    )


def _explained(run: WholeRun, of: Goodput) -> str:
    said = (
        f"Goodput is useful time over wall time: of {text(of.wall_s, 's')} in {counted(of.rounds, 'round')}, "
        f"{text(of.useful_s, 's')} went into steps that stand, {text(of.repeated_s, 's')} into steps done again, "
        f"{text(of.between_s, 's')} into none."
    )
    if len(run.rounds) == 1:
        return said
    return f"{said} Verdict, speed and shares are those of round {run.main.facts.round}, which has the most steps."


def _figures(of: Goodput) -> list[tuple[str, str]]:
    return [
        ("goodput", text(of.share, SHARE)),
        ("incidents", f"{of.incidents:,}"),
        ("steps that stand", f"{of.steps:,}"),
        ("steps done again", f"{of.steps_lost:,}"),
    ]


def _table(incidents: Sequence[Incident]) -> Markup:
    longest_s = max(incident.total_s for incident in incidents)
    rows = [row for incident in incidents for row in _rows(incident, longest_s)]
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in (("#", None), *_HEADS)))
    return joined(
        _legend(incidents),
        element("table", element("thead", head), element("tbody", *rows), class_="incidents"),
    )


def _rows(incident: Incident, longest_s: float) -> tuple[Markup, Markup]:
    parts = [(words.phase_title(name), incident.seconds[name], words.phase_colour(name)) for name in _phases(incident)]
    said = f"{incident.who}: {incident.detail}" if incident.who and incident.detail else incident.who or incident.detail
    first = element(
        "tr",
        element("th", incident.number, scope="row", rowspan=2),
        element("td", words.moment(incident), class_="spare"),
        element("td", words.what(incident)),
        element("td", words.action(incident), class_="spare"),
        element("td", words.size(incident), class_="number spare"),
        element("td", words.steps_lost(incident), class_="number"),
        element("td", text(incident.total_s, "s") if incident.seconds else "unknown", class_="number"),
        element("td", _bar(parts, longest_s), class_="wide"),
    )
    return first, element("tr", element("td", said, colspan=len(_HEADS), class_="detail"))


def _phases(incident: Incident) -> list[str]:
    known = [name for name in PHASES if name in incident.seconds]
    return known + [name for name in incident.seconds if name not in PHASES]


def _legend(incidents: Sequence[Incident]) -> Markup:
    seen: Mapping[str, None] = dict.fromkeys(name for incident in incidents for name in _phases(incident))
    items = [element("li", swatch(words.phase_colour(name)), words.phase_title(name)) for name in seen]
    return element("ul", *items, class_="legend", aria_label="Colours of an incident's phases")


def _bar(parts: Sequence[tuple[str, float, str]], longest_s: float) -> Markup:
    """Seconds end to end; ``longest_s`` would fill the width."""
    boxes, at = [], 0.0
    for title, seconds, colour in parts:
        width = 1000 * seconds / longest_s if longest_s > 0 else 0.0
        if width > 0:
            tip = element("title", f"{title}: {text(seconds, 's')}")
            boxes.append(element("rect", tip, x=f"{at:.1f}", width=f"{width:.1f}", height=10, class_=f"p-{colour}"))
            at += width
    said = ", ".join(f"{title} {text(seconds, 's')}" for title, seconds, _ in parts)
    return element(
        "svg", *boxes, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar", role="img", aria_label=said
    )
