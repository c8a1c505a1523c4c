"""The report as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report.breakdown import apart, breakdowns
from lightning_dist.monitor.report.charts_section import charts_section
from lightning_dist.monitor.report.course import course
from lightning_dist.monitor.report.document import asset, document, section
from lightning_dist.monitor.report.finite import finite
from lightning_dist.monitor.report.incident_marks import marks_of_incidents
from lightning_dist.monitor.report.incidents_section import incidents_section
from lightning_dist.monitor.report.marks import marks_of
from lightning_dist.monitor.report.markup import Markup, element, joined, json_inside
from lightning_dist.monitor.report.payload import payload
from lightning_dist.monitor.report.run_section import about, heading, speed
from lightning_dist.monitor.report.series import all_series
from lightning_dist.monitor.report.shares_section import shares_section
from lightning_dist.monitor.report.shown import average, steps_of
from lightning_dist.monitor.report.throughput import throughput
from lightning_dist.monitor.report.timeline_section import timeline_section
from lightning_dist.monitor.report.verdict_section import verdict_section
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.verdict import Verdict

RANKS = 64  # shown one by one
_SCRIPTS = ("format.js", "timeline.js", "charts.js", "start.js")


@dataclass(frozen=True)
class Picture:
    """A drawing that another part of the library made of the run.

    Attributes:
        title: Above it.
        svg: One ``svg`` element without scripts, styles and references.
        caption: Below it.
    """

    title: str
    svg: str
    caption: str = ""


def html_of(
    record: RunRecord,
    verdict: Verdict,
    *,
    step: int | None = None,
    pictures: Sequence[Picture] = (),
    whole: WholeRun | None = None,
) -> str:
    """The whole page.

    Args:
        record: The run, or the round of it that the verdict is about.
        verdict: What the diagnosis says of it.
        step: The step to open the timeline at; ``None``: the average of all.
        pictures: To be shown too.
        whole: The run with all its rounds and incidents, if it has more than one.
    """
    record = finite(record)
    whole = whole or WholeRun((record,))
    every = finite(whole.joined) if len(whole.rounds) > 1 else record
    ranks = breakdowns(record)
    marks = marks_of(verdict)
    shown_ranks = apart(ranks, at_most=RANKS, always=marks)
    numbers = [rank.header.rank for rank in shown_ranks]
    shown = [average(shown_ranks), *steps_of(every, numbers, chosen=step)] if ranks else []
    series = all_series(every, shown_ranks=numbers)
    data = payload(
        ranks=[(rank.header, marks.get(rank.header.rank)) for rank in shown_ranks],
        shown=shown,
        first=next((index for index, each in enumerate(shown) if each.step == step), 0),
        series=series,
        stretches=course(every),
        incidents=marks_of_incidents(whole.incidents, every),
    )
    happened = incidents_section(whole)
    body = joined(
        heading(every),
        element(
            "main",
            verdict_section(verdict),
            speed(throughput(record)),
            section("incidents", "Incidents", happened) if happened is not None else None,
            section("step", "One step", timeline_section(shown, shown_ranks)),
            section("shares", "Where the time goes", shares_section(ranks, shown_ranks, marks)) if ranks else None,
            section("course", "Over the run", charts_section(series, shown_ranks, marks)),
            *(_picture(picture) for picture in pictures),
            section("about", "The run", about(every)),
        ),
    )
    title = f"{record.facts.strategy}, run {record.facts.run_id}"
    script = _script()
    scripts = (
        element("script", json_inside(data), type="application/json", id="data"),
        element("script", Markup(script)),
    )
    return document(title, body, *scripts, style=asset("style.css"), script=script)


def _script() -> str:
    parts = "\n".join(map(asset, _SCRIPTS))
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _picture(picture: Picture) -> Markup:
    name = "".join(character if character.isalnum() else "-" for character in picture.title.lower())
    return section(
        name,
        picture.title,
        element("div", Markup(picture.svg), class_="scroll picture"),
        element("p", picture.caption, class_="note") if picture.caption else None,
    )
