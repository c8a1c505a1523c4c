"""A picture of a schedule as it ran: one row a rank, a box for each piece of work; one HTML file without others."""

from __future__ import annotations

import html

from lightning_dist.parallel.pipeline.report import PipelineReport
from lightning_dist.parallel.pipeline.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Slot

COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", BACKWARD_INPUT: "#e45756", BACKWARD_WEIGHT: "#72b7b2"}
WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward, gradients of inputs",
    BACKWARD_WEIGHT: "backward, gradients of weights",
}
_WIDTH, _ROW, _LABEL, _TOP, _KEYS, _KEY = 1100, 34, 130, 24, 26, 220

_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    "svg text{font-size:11px;fill:#222}.n{fill:#fff;font-size:9px;text-anchor:middle}"
)


def draw(report: PipelineReport) -> str:
    """The picture and the numbers as HTML."""
    rows = "".join(
        f"<tr><td>rank {rank}, stage {', '.join(map(str, stages))}</td><td>{idle:.1%}</td></tr>"
        for rank, stages, idle in zip(report.ranks, report.stages, report.idle_shares, strict=True)
    )
    title = html.escape(f"Pipeline: {report.schedule}, {report.micro_batches} micro-batches")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>A typical step of "
        f"{report.typical.length_s * 1e3:.1f} ms; white is idle. Numbers are micro-batches.</p>{svg(report)}"
        f"<h2>Idle share</h2><table><tr><th>of</th><th>idle</th></tr>{rows}"
        f"<tr><td>mean</td><td>{report.idle_share:.1%}</td></tr>"
        f"<tr><td>formula (P-1)/(VM+P-1)</td><td>{report.formula:.1%}</td></tr>"
        f"<tr><td>the schedule's order with the measured times</td><td>{report.predicted:.1%}</td></tr></table>"
        f"<p>Medians over {report.batches} batches.</p></body></html>\n"
    )


def svg(report: PipelineReport) -> str:
    """The picture alone, with the key to its colours, for pages of others; the style of its text is theirs."""
    timeline = report.typical
    scale = (_WIDTH - _LABEL) / timeline.length_s if timeline.length_s else 0.0
    parts = []
    for index, (row, rank, stages) in enumerate(zip(timeline.rows, report.ranks, report.stages, strict=True)):
        top = _TOP + index * _ROW
        label = f"rank {rank}, stage {', '.join(map(str, stages))}"
        parts.append(f'<text x="0" y="{top + 19}">{html.escape(label)}</text>')
        parts.append(
            f'<rect x="{_LABEL}" y="{top}" width="{_WIDTH - _LABEL}" height="{_ROW - 6}" fill="none" stroke="#ccc"/>'
        )
        parts += [_box(slot, top, scale) for slot in row]
    bottom = _TOP + len(timeline.rows) * _ROW
    ends = f'<text x="{_LABEL}" y="14">0</text><text x="{_WIDTH - 60}" y="14">{timeline.length_s * 1e3:.1f} ms</text>'
    drawn = f"{ends}{''.join(parts)}{_keys(report, bottom)}"
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + _KEYS}" width="100%" role="img">{drawn}</svg>'


def _keys(report: PipelineReport, top: int) -> str:
    used = [kind for kind in COLOURS if any(slot.action.kind == kind for row in report.typical.rows for slot in row)]
    return "".join(
        f'<rect x="{_LABEL + number * _KEY}" y="{top + 8}" width="11" height="11" fill="{COLOURS[kind]}"/>'
        f'<text x="{_LABEL + number * _KEY + 16}" y="{top + 17}">{WORDS[kind]}</text>'
        for number, kind in enumerate(used)
    )


def _box(slot: Slot, top: int, scale: float) -> str:
    action = slot.action
    left, width = _LABEL + slot.start_s * scale, max(0.5, (slot.end_s - slot.start_s) * scale)
    said = (
        f"{WORDS[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}: "
        f"{(slot.end_s - slot.start_s) * 1e3:.2f} ms"
    )
    number = (
        f'<text class="n" x="{left + width / 2:.1f}" y="{top + 18}">{action.micro_batch}</text>' if width > 12 else ""
    )
    return (
        f'<g><title>{said}</title><rect x="{left:.2f}" y="{top + 1}" width="{width:.2f}" height="{_ROW - 8}" '
        f'fill="{COLOURS[action.kind]}" stroke="#fff" stroke-width=".5"/>{number}</g>'
    )
