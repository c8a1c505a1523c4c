"""The report for a terminal: the verdict, phases of each rank, a line for each metric."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_dist.monitor.record import Phase, RunRecord
from lightning_dist.monitor.report import words
from lightning_dist.monitor.report.breakdown import Breakdown, apart, breakdowns, mean_of
from lightning_dist.monitor.report.extremes import stretches_of
from lightning_dist.monitor.report.finite import finite
from lightning_dist.monitor.report.incident_lines import incident_lines
from lightning_dist.monitor.report.marks import marks_of
from lightning_dist.monitor.report.quantities import SHARE, text
from lightning_dist.monitor.report.series import Series, all_series
from lightning_dist.monitor.report.throughput import Throughput, throughput
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.verdict import Cause, Finding, Verdict

RANKS = 16
COLUMNS = 32  # of a line of a metric
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_SHARE = 0.005  # phases smaller than this on all ranks have no column


def render(record: RunRecord, verdict: Verdict, *, whole: WholeRun | None = None) -> RenderableType:
    """All of it, for a ``rich`` console.

    Args:
        record: The run, or the round of it that the verdict is about.
        verdict: What the diagnosis says of it.
        whole: The run with all its rounds and incidents, if it has more than one.
    """
    record = finite(record)
    every = finite(whole.joined) if whole is not None and len(whole.rounds) > 1 else record
    ranks = breakdowns(record)
    marks = marks_of(verdict)
    parts: list[RenderableType] = [of_verdict(verdict)]
    if ranks:
        parts += [_speed(throughput(record)), _phases(ranks, marks)]
    if whole is not None:
        parts += incident_lines(whole)
    parts.append(_series(all_series(every, shown_ranks=[rank.header.rank for rank in ranks])))
    parts += [Text(problem, style="yellow") for problem in every.problems]
    return Group(*parts)


def of_verdict(verdict: Verdict) -> Panel:
    """The verdict alone."""
    good = verdict.main is not None and verdict.main.cause is Cause.COMPUTE_BOUND
    lines = list(_sentences(verdict))
    return Panel(
        Group(*lines),
        title="verdict",
        title_align="left",
        border_style="green" if good else "yellow" if verdict.main is None else "red",
    )


def sparkline(values: Sequence[float], columns: int = COLUMNS) -> str:
    """Values as blocks, from 0 to the largest; each column shows the largest value of its stretch."""
    tops = [max(values[first:end]) for first, end in stretches_of(len(values), columns)]
    most = max(tops, default=0.0)
    if most <= 0:
        return _BLOCKS[0] * len(tops)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, max(0, int(top / most * len(_BLOCKS))))] for top in tops)


def _sentences(verdict: Verdict) -> Iterator[RenderableType]:
    if verdict.main is None:
        yield Text("No verdict", style="bold")
        yield Text(verdict.no_verdict or "The data do not allow one.")
    else:
        yield from _finding(verdict.main)
    for finding in verdict.others:
        yield Text()
        yield from _finding(finding)
    if verdict.missing:
        yield Text()
        yield from (Text(f"not looked at: {sentence}", style="dim") for sentence in verdict.missing)


def _finding(finding: Finding) -> Iterator[RenderableType]:
    head = Text(words.title(finding), style="bold")
    said = [f"{text(finding.share, SHARE)} of the step", words.gain(finding), f"confidence {words.confidence(finding)}"]
    yield head
    yield Text("; ".join(part for part in said if part is not None), style="dim")
    yield Text(finding.summary)
    yield from (Text(f"  · {sentence}") for sentence in finding.evidence)
    yield from (Text(f"  → {sentence}", style="cyan") for sentence in finding.advice)


def _speed(of: Throughput) -> Text:
    figures = (
        ("median step", of.step_s, "s"),
        ("samples/s", of.samples_per_s, "count"),
        ("tokens/s", of.tokens_per_s, "count"),
        ("batches", of.bytes_per_s, "bytes/s"),
        ("MFU", of.mfu, SHARE),
    )
    return Text("  ".join(f"{name} {text(value, form)}" for name, value, form in figures if value is not None))


def _phases(ranks: Sequence[Breakdown], marks: Mapping[int, str]) -> Table:
    shown = apart(ranks, at_most=RANKS, always=marks)
    columns = [phase for phase in words.PHASES if any((rank.share(phase) or 0.0) >= _LEAST_SHARE for rank in ranks)]
    left_out = f"; {len(shown)} of {len(ranks)} ranks" if len(shown) < len(ranks) else ""
    table = Table(title=f"mean step by phase{left_out}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rank")
    table.add_column("host")
    table.add_column("step", justify="right")
    for phase in columns:
        table.add_column(words.PHASES[phase].lower(), justify="right")
    for rank in shown:
        marked = rank.header.rank in marks
        cells = [_cell(rank.phases.get(phase), rank.step_s) for phase in columns]
        name = f"{rank.header.rank} ◆" if marked else str(rank.header.rank)
        table.add_row(Text(name), Text(rank.header.host), text(rank.step_s, "s"), *cells, style="red" if marked else "")
    if len(ranks) > 1:
        step_s = statistics.fmean(rank.step_s for rank in ranks)
        means: Mapping[Phase, float | None] = mean_of(ranks)
        cells = [_cell(means[phase], step_s) for phase in columns]
        table.add_section()
        table.add_row("all", "", text(step_s, "s"), *cells)
    return table


def _cell(seconds: float | None, step_s: float) -> str:
    return "-" if seconds is None or step_s <= 0 else text(seconds / step_s, SHARE)


def _series(series: Sequence[Series]) -> Table:
    table = Table(title="over the run", title_justify="left", box=box.SIMPLE_HEAD)
    for heading, justify in (("", "right"), ("metric", "left"), ("", "left"), ("median", "right"), ("most", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for each in series:
        number = str(each.number or "")
        if each.lines:
            curve = sparkline(_heights(each))
            table.add_row(number, each.title, curve, text(each.median, each.form), text(each.most, each.form))
        else:
            table.add_row(number, each.title, Text(f"unavailable: {each.why}", style="dim"), "", "")
    return table


def _heights(series: Series) -> list[float]:
    """The largest value of all ranks, in order of time."""
    if series.band:
        return [stretch.high for stretch in series.band]
    tops: dict[int, float] = {}
    for line in series.lines:
        for point in line.points:
            tops[point.step] = max(point.value, tops.get(point.step, point.value))
    return [tops[step] for step in sorted(tops)]
