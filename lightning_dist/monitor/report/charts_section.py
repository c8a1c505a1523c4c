"""Where the script draws the course of the run: a frame a metric, or why it is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dist.monitor.report.breakdown import Breakdown
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.quantities import text
from lightning_dist.monitor.report.series import Series


def charts_section(series: Sequence[Series], ranks: Sequence[Breakdown], marks: Mapping[int, str]) -> Markup:
    """The course of phases, then a curve a metric."""
    choices = [element("option", "none", value="")]
    for rank in ranks:
        mark = " ◆" if rank.header.rank in marks else ""
        choices.append(element("option", f"{rank.header.rank}, {rank.header.host}{mark}", value=rank.header.rank))
    tools = element(
        "div",
        element("label", "Axis ", element("select", *map(_axis, ("steps", "time")), id="axis")),
        element("label", "Highlighted rank ", element("select", *choices, id="highlight")),
        class_="tools",
    )
    course = element(
        "figure",
        element("figcaption", element("b", "Phases of a step, mean of all ranks"), element("span", "", class_="at")),
        element("div", class_="plot", id="phases"),
        class_="chart whole",
    )
    thinned = (
        "Curves are thinned so that no peak is lost: of each stretch the least and the largest stay. A band spans "
        "all ranks' values, its line is their median."
    )
    return joined(
        tools,
        element("div", course, *map(_chart, series), class_="charts"),
        element("p", thinned, class_="note"),
    )


def _axis(name: str) -> Markup:
    return element("option", name, value=name)


def _chart(series: Series) -> Markup:
    number = element("span", str(series.number), class_="badge") if series.number else None
    if not series.lines:
        return element(
            "figure",
            element("figcaption", number, element("b", series.title)),
            element("p", f"unavailable: {series.why}", class_="none"),
            class_="chart",
        )
    said = f"median {text(series.median, series.form)}, most {text(series.most, series.form)}"
    return element(
        "figure",
        element("figcaption", number, element("b", series.title), element("span", said, class_="at")),
        element("div", class_="plot", data_metric=series.metric),
        class_="chart",
    )
