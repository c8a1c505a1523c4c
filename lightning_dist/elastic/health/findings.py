"""What a check of a host has measured and found, as values; and how hosts are compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPARED = ("compute_flops", "accelerator_flops")
"""Figures in which a host is compared with itself and others; more is better. The rest has fixed limits: what a disk or
a link gives depends on who else uses it meanwhile."""


@dataclass(frozen=True)
class Finding:
    """Why a host is not fit.

    Attributes:
        check: Which check says so.
        text: What was seen and what is allowed, in words.
    """

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True)
class Outcome:
    """Of one check.

    Attributes:
        findings: Why the host is not fit.
        figures: What was measured, in the units of the names.
        notes: What could not be checked, and why.
    """

    findings: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """Of a host.

    Attributes:
        findings: Why it is not fit; empty: it is.
        figures: What was measured, in the units of the names.
        notes: What could not be checked, and why.
        seconds: How long it took.
    """

    findings: tuple[Finding, ...]
    figures: Mapping[str, float]
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_fit(self) -> bool:
        """Whether the host may train."""
        return not self.findings

    def __str__(self) -> str:
        if self.findings:
            return "; ".join(map(str, self.findings))
        return f"fit, checked in {self.seconds:.1f} s"


def beside_earlier(figures: Mapping[str, float], earlier: Mapping[str, float], factor: float) -> list[Finding]:
    """What is slower than this host's own best by more than ``factor``."""
    return [
        Finding("compare", f"{name} {figures[name]:.3g}, earlier {earlier[name]:.3g}; {factor:g} times less is allowed")
        for name in COMPARED
        if name in figures and name in earlier and figures[name] * factor < earlier[name]
    ]


def beside_others(
    figures: Mapping[str, float], others: Mapping[str, Mapping[str, float]], factor: float
) -> list[Finding]:
    """What is slower than other hosts in the median by more than ``factor``.

    Args:
        figures: Of the host that is judged.
        others: Of the others, by their names.
        factor: See ``HealthLimits.slow_factor``.
    """
    found = []
    for name in COMPARED:
        known = [theirs[name] for theirs in others.values() if name in theirs]
        if name in figures and known and figures[name] * factor < statistics.median(known):
            seen = (
                f"{name} {figures[name]:.3g}, {statistics.median(known):.3g} in the median of {len(known)} other hosts"
            )
            found.append(Finding("compare", f"{seen}; {factor:g} times less is allowed"))
    return found


def best_of(known: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The best of each figure that is compared."""
    names = {name for figures in known for name in figures if name in COMPARED}
    return {name: max(figures[name] for figures in known if name in figures) for name in sorted(names)}
