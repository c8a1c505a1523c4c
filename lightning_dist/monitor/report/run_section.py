"""Which run it is: its heading, its speed, its options, versions and ranks, and what is not known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import counted, folded
from lightning_dist.monitor.report.quantities import SHARE, text
from lightning_dist.monitor.report.throughput import Throughput


def heading(record: RunRecord) -> Markup:
    """Which run it is."""
    facts = record.facts
    hosts = len({rank.header.host for rank in record.ranks.values()})
    steps = len({step.step for rank in record.ranks.values() for step in rank.steps})
    said = [
        counted(facts.world_size, "rank") + (f" on {counted(hosts, 'host')}" if hosts else ""),
        counted(steps, "step"),
        facts.started.replace("T", " "),
        f"run {facts.run_id}",
    ]
    return element(
        "header",
        element("p", "hierdist report", class_="over"),
        element("h1", facts.strategy or "a run"),
        element("p", joined(*(element("span", each) for each in said)), class_="meta"),
    )


def speed(of: Throughput) -> Markup:
    """The run's speed, each figure or why it is not there."""
    counted_not = "not counted"
    figures = [
        ("median step", of.step_s, "s", "no step was recorded"),
        ("samples a second", of.samples_per_s, "count", counted_not),
        ("tokens a second", of.tokens_per_s, "count", counted_not),
        ("bytes of batches a second", of.bytes_per_s, "bytes/s", counted_not),
        ("of the devices' peak (MFU)", of.mfu, SHARE, of.why_no_mfu or counted_not),
    ]
    items = [
        element(
            "div",
            element("dt", name),
            element("dd", text(value, form))
            if value is not None
            else element("dd", "unavailable", element("small", f": {why}"), class_="none"),
        )
        for name, value, form, why in figures
    ]
    return element("dl", *items, class_="figures run")


def about(record: RunRecord) -> Markup:
    """Options, versions, ranks, what could not be measured or read."""
    facts = record.facts
    versions: dict[str, Any] = {**facts.versions, "commit": facts.commit or "none", "options' hash": facts.config_hash}
    ranks = {
        f"rank {number}": f"{rank.header.host}, {rank.header.device}, process {rank.header.pid}"
        for number, rank in sorted(record.ranks.items())
    }
    unavailable: dict[str, str] = {}
    for rank in record.ranks.values():
        unavailable.update({name: str(why) for name, why in rank.header.unavailable.items()})
    return joined(
        folded("Not everything could be read", record.problems, open_=True),
        _pairs("Options", facts.options, open_=len(facts.options) <= 24),
        _pairs("Versions", versions, open_=True),
        _pairs(counted(len(ranks), "rank"), ranks, open_=len(ranks) <= 8),
        _pairs("Unavailable, and why", unavailable, open_=True) if unavailable else None,
    )


def _pairs(name: str, values: Mapping[str, Any], *, open_: bool) -> Markup:
    rows = [
        element("tr", element("th", key, scope="row"), element("td", _value(value))) for key, value in values.items()
    ]
    inside = element("table", element("tbody", *rows), class_="pairs") if rows else element("p", "none", class_="note")
    return element("details", element("summary", name), inside, open=open_)


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
