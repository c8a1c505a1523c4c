"""What the mean step is made of: a bar a rank, a table of phases, a table of communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dist.monitor.record import Phase, Traffic
from lightning_dist.monitor.report import words
from lightning_dist.monitor.report.breakdown import Breakdown, mean_of
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import swatch
from lightning_dist.monitor.report.quantities import SHARE, text

_DENSE = 16  # bars that have room to breathe


def shares_section(ranks: Sequence[Breakdown], shown: Sequence[Breakdown], marks: Mapping[int, str]) -> Markup:
    """A bar a rank: what its step is made of; and the same as numbers over all ranks."""
    longest = max((rank.step_s for rank in shown), default=0.0)
    rows = [
        element(
            "tr",
            element("th", str(rank.header.rank), _mark(marks.get(rank.header.rank)), scope="row"),
            element("td", rank.header.host, class_="host"),
            element("td", _bar(rank, longest), class_="wide"),
            element("td", text(rank.step_s, "s"), class_="number"),
            class_="marked" if rank.header.rank in marks else None,
        )
        for rank in shown
    ]
    heads = (("rank", None), ("host", "host"), ("mean step, by phase", None), ("step", "number"))
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in heads))
    left_out = len(ranks) - len(shown)
    note = (
        f"{len(shown)} of {len(ranks)} ranks: those marked, those with most and with least of each phase, and others "
        "evenly between."
        if left_out
        else None
    )
    return joined(
        element(
            "table",
            element("thead", head),
            element("tbody", *rows),
            class_="bars" + (" dense" if len(shown) > _DENSE else ""),
        ),
        element("p", note, class_="note") if note else None,
        _phases(ranks),
        _communication(ranks),
    )


def _mark(mark: str | None) -> Markup | None:
    return None if mark is None else element("span", " ◆", class_="mark", title=mark, aria_label=mark, role="img")


def _bar(rank: Breakdown, longest_s: float) -> Markup:
    boxes, at = [], 0.0
    for phase, title in words.PHASES.items():
        seconds = rank.phases.get(phase) or 0.0
        width = 1000 * seconds / longest_s if longest_s > 0 else 0.0
        if width > 0:
            tip = element("title", f"{title}: {text(seconds, 's')}, {text(rank.share(phase), SHARE)}")
            boxes.append(
                element("rect", tip, x=f"{at:.1f}", width=f"{width:.1f}", height=10, class_=f"p-{phase.value}")
            )
            at += width
    said = ", ".join(
        f"{words.PHASES[phase]} {text(rank.share(phase), SHARE)}"
        for phase in words.PHASES
        if (rank.share(phase) or 0.0) >= 0.01
    )
    return element(
        "svg", *boxes, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar", role="img", aria_label=said
    )


def _phases(ranks: Sequence[Breakdown]) -> Markup:
    step_s = sum(rank.step_s for rank in ranks) / len(ranks) if ranks else 0.0
    rows = []
    for phase, mean in mean_of(ranks).items():
        known = [(seconds, rank.header.rank) for rank in ranks if (seconds := rank.phases.get(phase)) is not None]
        if mean is None or not known:
            cells = [element("td", f"unavailable: {_why(ranks, phase)}", colspan=4, class_="none")]
        else:
            least, most = min(known), max(known)
            cells = [
                element("td", text(mean, "s"), class_="number"),
                element("td", text(mean / step_s if step_s else None, SHARE), class_="number"),
                element("td", *_of_rank(*least), class_="number spare"),
                element("td", *_of_rank(*most), class_="number"),
            ]
        rows.append(element("tr", element("th", swatch(phase.value), words.PHASES[phase], scope="row"), *cells))
    heads = (
        ("phase", None),
        ("mean", "number"),
        ("of the step", "number"),
        ("least", "number spare"),
        ("most", "number"),
    )
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in heads))
    return element("table", element("thead", head), element("tbody", *rows), class_="plain")


def _of_rank(seconds: float, rank: int) -> tuple[str, Markup | None]:
    return text(seconds, "s"), element("span", f" (rank {rank})", class_="spare") if seconds else None


def _why(ranks: Sequence[Breakdown], phase: Phase) -> str:
    for rank in ranks:
        if phase.value in rank.header.unavailable:
            return str(rank.header.unavailable[phase.value])
    return "not told apart from the others"


def _communication(ranks: Sequence[Breakdown]) -> Markup:
    by_tier: dict[str, list[Traffic]] = {}
    for rank in ranks:
        if rank.communication is not None:
            by_tier.setdefault("all", []).append(rank.communication)
        for name, traffic in rank.tiers.items():
            by_tier.setdefault(name, []).append(traffic)
    if not by_tier:
        return element("p", f"Communication is unavailable: {_why_none(ranks)}.", class_="note")
    rows = []
    for name, all_of in by_tier.items():
        sizes = [traffic.size_bytes for traffic in all_of if traffic.size_bytes is not None]
        count = len(all_of)
        cells = (
            (text(sum(traffic.total_s for traffic in all_of) / count, "s"), "number"),
            (text(sum(traffic.exposed_s for traffic in all_of) / count, "s"), "number"),
            (text(sum(traffic.overlapped_s for traffic in all_of) / count, "s"), "number"),
            (text(sum(sizes) / len(sizes), "bytes") if sizes else "unknown", "number spare"),
            (text(sum(traffic.operations for traffic in all_of) / count, "count"), "number spare"),
        )
        rows.append(
            element(
                "tr", element("th", name, scope="row"), *(element("td", value, class_=kind) for value, kind in cells)
            )
        )
    heads = (
        ("communication, tier", None),
        ("total", "number"),
        ("exposed", "number"),
        ("hidden", "number"),
        ("bytes a rank", "number spare"),
        ("operations", "number spare"),
    )
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in heads))
    return element("table", element("thead", head), element("tbody", *rows), class_="plain")


def _why_none(ranks: Sequence[Breakdown]) -> str:
    for rank in ranks:
        if "communication" in rank.header.unavailable:
            return str(rank.header.unavailable["communication"])
    return "no step recorded any"
