"""A comparison for a terminal: the verdict, and a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_dist.experiment.arms import Experiment, RunName, said
from lightning_dist.experiment.comparison import Comparison
from lightning_dist.experiment.store import Outcome
from lightning_dist.experiment.verdict import Answer
from lightning_dist.experiment.words import HEADINGS, advice, metric_words, row

COLOURS = {Answer.SAFE: "green", Answer.NOT_SAFE: "red", Answer.NOT_ENOUGH: "yellow"}


def render(
    experiment: Experiment, comparison: Comparison, failed: Mapping[RunName, Outcome] | None = None
) -> RenderableType:
    """All of it, for a ``rich`` console.

    Args:
        experiment: What was run.
        comparison: What it says.
        failed: The runs that cannot be compared.
    """
    judgement = comparison.judgement
    sentences = [Text(judgement.answer.value, style="bold"), Text(judgement.why)]
    said_advice = advice(comparison)
    if said_advice is not None:
        sentences.append(Text(f"→ {said_advice}", style="cyan"))
    verdict = Panel(
        Group(*sentences), title="verdict", title_align="left", border_style=COLOURS[judgement.answer], expand=True
    )
    pairs = f"{len(comparison.pairs)} pair{'' if len(comparison.pairs) == 1 else 's'}"
    table = Table(title=f"{metric_words(comparison)}; {pairs}, {comparison.steps} steps", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for quantity in comparison.quantities:
        table.add_row(*row(quantity))
    return Group(
        Text(f"a: {said(experiment.a)}"),
        Text(f"b: {said(experiment.b)}"),
        verdict,
        table,
        *(Text(note, style="yellow") for note in comparison.notes),
        *(Text(f"{name} is left out: {outcome.why}", style="yellow") for name, outcome in (failed or {}).items()),
    )


def failure(name: RunName, outcome: Outcome) -> RenderableType:
    """What went wrong in a run, with its last words."""
    return Panel(
        Text("\n".join(outcome.last_words) or "it printed nothing"),
        title=f"{name}: {outcome.why}",
        title_align="left",
        border_style="red",
    )
