"""Figures of a comparison as people read them. Pure."""

from __future__ import annotations

import math

from lightning_dist.experiment.comparison import Comparison, Quantity
from lightning_dist.experiment.curves import LOSS
from lightning_dist.experiment.paired import Interval
from lightning_dist.experiment.verdict import Answer
from lightning_dist.monitor.report.quantities import text

HEADINGS = ("", "a", "b", "b against a", "95 % (t)", "95 % (bootstrap)")


def metric_words(comparison: Comparison) -> str:
    """What is judged: ``training loss, mean of the last 20 steps``."""
    if comparison.metric != LOSS:
        return f"{comparison.metric}, as validation logged it last"
    if comparison.window == 1:
        return "training loss of the last step"
    return f"training loss, mean of the last {comparison.window} steps"


def row(quantity: Quantity) -> tuple[str, ...]:
    """A line of the table, as :data:`HEADINGS` say."""
    change = quantity.change
    if quantity.is_ratio:
        said = f"x {change.mean:.3g}"
    elif quantity.a:
        said = f"{change.mean:+.4f} ({change.mean / abs(quantity.a):+.2%})"
    else:
        said = f"{change.mean:+.4f}"
    return (
        quantity.name,
        *(value_text(value, quantity.unit) for value in (quantity.a, quantity.b)),
        said,
        *(interval_text(each, is_ratio=quantity.is_ratio) for each in (change.t, change.bootstrap)),
    )


def value_text(value: float, unit: str) -> str:
    """A figure with its unit; of a loss, four digits."""
    return f"{value:.4f}" if unit == "loss" and math.isfinite(value) else text(value, unit)


def interval_text(interval: Interval | None, *, is_ratio: bool) -> str:
    """Its ends; of too few pairs a dash."""
    if interval is None:
        return "-"
    if is_ratio:
        return f"{interval.low:.3g} to {interval.high:.3g}"
    return f"{interval.low:+.4f} to {interval.high:+.4f}"


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    return f"{comparison.judgement.answer.value}: {comparison.judgement.why}"


def advice(comparison: Comparison) -> str | None:
    """What to do, where there are not enough runs."""
    judgement = comparison.judgement
    if judgement.answer is not Answer.NOT_ENOUGH:
        return None
    if judgement.wanted_pairs is not None:
        return (
            f"were mean and spread as seen, {judgement.wanted_pairs} pairs would tell with a chance of 80 %: the same "
            f"command with --seeds {judgement.wanted_pairs} goes on from here"
        )
    return "the same command with more --seeds goes on from here"
