"""The verdict as it stands on the page: the main cause and what to do, the others, what could not be looked at."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.monitor.report import words
from lightning_dist.monitor.report.markup import Markup, element, joined
from lightning_dist.monitor.report.pieces import counted, figures_of, folded, listed, ranks_text
from lightning_dist.monitor.report.quantities import SHARE, text
from lightning_dist.monitor.verdict import Cause, Finding, Verdict


def verdict_section(said: Verdict) -> Markup:
    """The main cause and what to do, the others, and what could not be looked at."""
    return element(
        "section",
        element("h2", "Verdict", class_="over", id="verdict"),
        _main(said) if said.main is not None else _none(said),
        _others(said.others),
        folded("What could not be looked at", said.missing),
        class_="verdict" + (" good" if said.main is not None and said.main.cause is Cause.COMPUTE_BOUND else ""),
        aria_labelledby="verdict",
    )


def _main(said: Verdict) -> Markup:
    finding = said.main
    assert finding is not None
    figures: list[tuple[str, str]] = [("of the step", text(finding.share, SHARE))]
    if words.gain(finding) is not None:
        figures.append(("times faster without it, at most", words.times(finding.speedup_at_most)))
    figures.append(("confidence", words.confidence(finding)))
    if said.step_s is not None:
        figures.append((f"median of {counted(said.steps, 'step')}", text(said.step_s, "s")))
    return joined(
        element("p", words.title(finding), class_="said"),
        element("p", finding.summary, class_="summary"),
        figures_of(figures),
        element("div", listed("What to change", finding.advice), listed("Evidence", _evidence(finding)), class_="pair"),
    )


def _none(said: Verdict) -> Markup:
    return joined(
        element("p", "No verdict", class_="said"),
        element("p", said.no_verdict or "The data do not allow one.", class_="summary"),
    )


def _evidence(finding: Finding) -> list[str]:
    found = list(finding.evidence)
    if finding.ranks and finding.cause is not Cause.STRAGGLER:
        found.append(f"Seen on {ranks_text(finding.ranks)}.")
    if finding.since_step is not None:
        found.append(f"Since step {finding.since_step}.")
    return found


def _others(findings: Sequence[Finding]) -> Markup | None:
    if not findings:
        return None
    items = [
        element(
            "details",
            element("summary", element("b", words.title(finding)), " ", text(finding.share, SHARE), " of the step"),
            element("p", finding.summary),
            element(
                "div", listed("What to change", finding.advice), listed("Evidence", _evidence(finding)), class_="pair"
            ),
        )
        for finding in findings
    ]
    return element("div", element("h3", "Beside it" if len(findings) == 1 else "Besides"), *items, class_="others")
