"""Small pieces that the sections of the page are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_dist.monitor.report import words
from lightning_dist.monitor.report.markup import Markup, element


def figures_of(figures: Iterable[tuple[str, str]]) -> Markup:
    """Large numbers, each with what it is."""
    items = [element("div", element("dt", name), element("dd", value)) for name, value in figures]
    return element("dl", *items, class_="figures")


def listed(name: str, sentences: Sequence[str]) -> Markup | None:
    """Sentences below a heading; nothing if there are none."""
    if not sentences:
        return None
    items = element("ul", *(element("li", sentence) for sentence in sentences))
    return element("div", element("h3", name), items)


def folded(name: str, sentences: Sequence[str], *, open_: bool = False) -> Markup | None:
    """Sentences that a click unfolds; nothing if there are none."""
    if not sentences:
        return None
    items = element("ul", *(element("li", sentence) for sentence in sentences))
    return element("details", element("summary", name), items, open=open_)


def legend() -> Markup:
    """The colours of phases."""
    items = [
        element("li", swatch(phase.value), title, title=words.MEANINGS[phase]) for phase, title in words.PHASES.items()
    ]
    items.append(element("li", swatch("lane"), "Communication, in its lanes"))
    return element("ul", *items, class_="legend", aria_label="Colours")


def swatch(colour: str) -> Markup:
    """A small square of a phase's colour."""
    square = element("rect", width=10, height=10, rx=2, class_=f"p-{colour}")
    return element("svg", square, viewBox="0 0 10 10", class_="swatch", aria_hidden="true")


def counted(number: int, what: str) -> str:
    """``1 rank``, ``2,000 steps``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 others``."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} others" if len(ranks) > 8 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
