"""A comparison as one HTML file, without a script."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

from lightning_dist.experiment.arms import ARMS, Experiment, RunName, said
from lightning_dist.experiment.comparison import Comparison
from lightning_dist.experiment.curves import Track
from lightning_dist.experiment.paired import estimate
from lightning_dist.experiment.picture import Band, Line, Point, chart
from lightning_dist.experiment.store import Outcome
from lightning_dist.experiment.verdict import Answer
from lightning_dist.experiment.words import HEADINGS, advice, metric_words, row, value_text
from lightning_dist.monitor.report.document import asset, document, section
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import counted
from lightning_dist.monitor.report.quantities import text

_MOST_MOMENTS = 200  # of a curve over time
_STYLE = """
.arm { fill: none; stroke-width: 2; stroke-linejoin: round } .arm.thin { stroke-width: .8; opacity: .45 }
.arm.a { stroke: var(--p-forward) } .arm.b { stroke: var(--p-data_wait) } .arm.gap { stroke: var(--ink) }
.chart { margin-bottom: 1.4rem }
.spread { opacity: .25 } .spread.gap { fill: var(--curve) }
.key { font-weight: 600 } .key.a { color: var(--p-forward) } .key.b { color: var(--p-data_wait) }
.verdict.open { border-left-color: var(--p-data_wait) }
pre { overflow-x: auto; font-size: .8rem; white-space: pre-wrap }
"""


def html_of(experiment: Experiment, comparison: Comparison, failed: Mapping[RunName, Outcome]) -> str:
    """The whole page.

    Args:
        experiment: What was run.
        comparison: What it says.
        failed: The runs that cannot be compared.
    """
    title = f"{said(experiment.b)} against {said(experiment.a)}"
    body = joined(
        element("p", "hierdist ab", class_="over"),
        element("h1", title),
        element("p", *_facts(comparison), class_="meta"),
        _verdict(comparison),
        section("figures", "Figures", _figures(comparison)),
        section("curves", "Curves", *_curves(comparison)),
        section("runs", "Runs", _runs(comparison), *_failures(failed)),
        section("command", "What was run", _command(experiment)),
    )
    return document(title, element("main", body), style=asset("style.css") + _STYLE)


def _facts(comparison: Comparison) -> Iterator[Markup]:
    yield element("span", counted(len(comparison.pairs), "pair"))
    yield element("span", counted(comparison.steps, "step"))
    yield element("span", counted(comparison.pairs[0].a.world_size, "rank"))
    yield element("span", metric_words(comparison))


def _verdict(comparison: Comparison) -> Markup:
    judgement = comparison.judgement
    colour = {Answer.SAFE: "verdict good", Answer.NOT_SAFE: "verdict", Answer.NOT_ENOUGH: "verdict open"}
    said_advice = advice(comparison)
    return element(
        "section",
        element("p", "Verdict", class_="over"),
        element("p", judgement.answer.value, class_="said"),
        element("p", judgement.why, class_="summary"),
        element("p", said_advice, class_="summary") if said_advice else None,
        *(element("p", note, class_="mark") for note in comparison.notes),
        class_=colour[judgement.answer],
    )


def _figures(comparison: Comparison) -> Markup:
    rows = [row(quantity) for quantity in comparison.quantities]
    note = (
        "Each line is a mean over pairs of runs that differ in the arm only; losses as differences, the rest as "
        "ratios. The intervals have the true value with a chance of 95 %: by Student's t, and by the bootstrap-t."
    )
    return joined(_table(HEADINGS, rows), element("p", note, class_="note"))


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    head = element(
        "tr", *(element("th", name, class_="number" if place else None) for place, name in enumerate(headings))
    )
    lines = [
        element("tr", element("th", cells[0]), *(element("td", cell, class_="number") for cell in cells[1:]))
        for cells in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *lines)), class_="wide")


def _curves(comparison: Comparison) -> Iterator[Markup]:
    tracks = [comparison.tracks(pair) for pair in comparison.pairs]
    keys = element(
        "p", element("span", "a", class_="key a"), " and ", element("span", "b", class_="key b"), class_="note"
    )
    yield keys
    by_step = [list(_line(track.steps, track)) for arms in tracks for track in arms]
    by_time = [list(_line(track.seconds, track)) for arms in tracks for track in arms]
    yield _figure("The loss by step", _arms(by_step, comparison), "optimizer step")
    yield _figure("The loss by time", _arms(by_time, comparison), "seconds of training")
    gap = _gap(tracks)
    if gap is not None:
        lines, bands = gap
        margin = comparison.judgement.margin
        limits = [(0.0, "0")] + ([(margin, "margin")] if math.isfinite(margin) else [])
        drawing = chart(lines=lines, bands=bands, limits=limits, x_name="optimizer step")
        yield element(
            "figure",
            element("figcaption", element("b", "b minus a, mean of the pairs, and its 95 % interval (t)")),
            drawing,
            class_="chart",
        )


def _line(places: Sequence[float], track: Track) -> Iterator[Point]:
    yield from zip(places, track.values, strict=True)


def _arms(points: Sequence[list[Point]], comparison: Comparison) -> list[Line]:
    """The runs' curves thin, and of each arm the mean of what they are at each place of its first run."""
    lines = []
    for arm, name in enumerate(ARMS):
        own = points[arm::2]
        for pair, each in zip(comparison.pairs, own, strict=True):
            lines.append(Line(name, each, f"{name}, seed {pair.seed}", is_thin=len(own) > 1))
        if len(own) > 1:
            lines.append(Line(name, _mean_line(own), f"{name}, mean of {len(own)} runs"))
    return lines


def _mean_line(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """At moments between the last start and the first end, by the last value of each."""
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    moments = [x for x, _ in curves[0] if start <= x <= end]
    moments = moments[:: max(1, len(moments) // _MOST_MOMENTS)]
    ends = [0] * len(curves)
    line = []
    for moment in moments:
        for place, curve in enumerate(curves):
            while ends[place] + 1 < len(curve) and curve[ends[place] + 1][0] <= moment:
                ends[place] += 1
        line.append((moment, statistics.fmean(curve[at][1] for curve, at in zip(curves, ends, strict=True))))
    return line


def _gap(tracks: Sequence[tuple[Track, Track]]) -> tuple[list[Line], list[Band]] | None:
    """Of the steps that all runs have."""
    at = [
        {step: b - a for step, a, b in zip(first.steps, first.values, second.values, strict=False)}
        for first, second in tracks
        if first.steps[: len(second.steps)] == second.steps[: len(first.steps)]
    ]
    steps = sorted(set.intersection(*map(set, at))) if at else []
    steps = [step for step in steps if all(math.isfinite(each[step]) for each in at)]
    steps = [*steps[:: max(1, len(steps) // _MOST_MOMENTS)], *steps[-1:]]
    if not steps:
        return None
    points, band = [], []
    for step in steps:
        change = estimate([each[step] for each in at], with_bootstrap=False)
        points.append((float(step), change.mean))
        if change.t is not None:
            band.append((float(step), change.t.low, change.t.high))
    return [Line("gap", points, "b minus a")], [Band("gap", band)] if band else []


def _figure(title: str, lines: Sequence[Line], x_name: str) -> Markup:
    return element(
        "figure", element("figcaption", element("b", title)), chart(lines=lines, x_name=x_name), class_="chart"
    )


def _runs(comparison: Comparison) -> Markup:
    rows = []
    for pair in comparison.pairs:
        values = [track.at_step(comparison.steps) for track in comparison.tracks(pair)]
        seconds = [curve.losses.seconds[-1] for curve in (pair.a, pair.b)]
        rows.append(
            (
                pair.seed,
                *(value_text(value, "loss") for value in values),
                f"{values[1] - values[0]:+.4f}",
                *(text(each, "s") for each in seconds),
            )
        )
    return _table(("seed", "a", "b", "b minus a", "training of a", "training of b"), rows)


def _failures(failed: Mapping[RunName, Outcome]) -> Iterator[Markup]:
    for name, outcome in failed.items():
        yield element(
            "details",
            element("summary", f"{name} is left out: {outcome.why}"),
            element("pre", "\n".join(outcome.last_words) or "it printed nothing"),
        )


def _command(experiment: Experiment) -> Markup:
    return joined(
        element("p", element("span", "a", class_="key a"), f": {said(experiment.a)}"),
        element("p", element("span", "b", class_="key b"), f": {said(experiment.b)}"),
        element("pre", shlex.join(experiment.command)),
    )
