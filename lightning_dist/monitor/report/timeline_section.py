"""Where the script draws one step: the choice of steps, the buttons, the canvas."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.monitor.report.breakdown import Breakdown
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import legend
from lightning_dist.monitor.report.shown import Shown

_FOLDED_LANES = 8  # with more ranks, only the main lane is open at first
_BUTTONS = (
    ("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "before", "the step before"),
    ("\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", "after", "the next step"),
    ("\N{MINUS SIGN}", "out", "zoom out (key -)"),
    ("+", "in", "zoom in (key +)"),
    ("all", "all", "the whole step (key 0)"),
)
_KEYS = (
    "Drag moves, pinch or Ctrl with the wheel zooms. Keys: arrows go from box to box, + and - zoom, Enter zooms to the "
    "box, 0 shows all."
)


def timeline_section(shown: Sequence[Shown], ranks: Sequence[Breakdown]) -> Markup:
    """The timeline of the steps shown, first the average."""
    if not shown:
        return element("p", "No step was recorded; StepTimeline() among the callbacks records them.", class_="note")
    options = [element("option", _option(each), value=index) for index, each in enumerate(shown)]
    buttons = [
        element("button", sign, id=name, aria_label=said, title=said, type="button") for sign, name, said in _BUTTONS
    ]
    lanes = element("input", type="checkbox", id="lanes", checked=len(ranks) <= _FOLDED_LANES)
    tools = element(
        "div",
        element("label", "Step ", element("select", *options, id="which")),
        element("span", *buttons, class_="buttons"),
        element("label", lanes, " lanes"),
        class_="tools",
    )
    canvas = element(
        "canvas", id="timeline", tabindex=0, role="application", aria_describedby="keys", aria_label="Timeline"
    )
    return joined(
        tools,
        element("div", canvas, class_="scroll"),
        element("output", " ", id="said", aria_live="polite"),
        legend(),
        element("p", "", id="kind", class_="note"),
        element("p", _KEYS, id="keys", class_="note"),
        element("noscript", element("p", "The timeline and the curves are drawn by a script in this file.")),
    )


def _option(shown: Shown) -> str:
    if shown.step is None:
        return "average of all"
    notes = [*shown.notes, *(["in detail"] if shown.with_spans else [])]
    return f"{shown.step:,}" + (f" ({', '.join(notes)})" if notes else "")
