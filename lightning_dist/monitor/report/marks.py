"""Which ranks a report marks."""

from __future__ import annotations

from lightning_dist.monitor.verdict import Cause, Verdict


def marks_of(verdict: Verdict) -> dict[int, str]:
    """Rank -> why it is marked: those that hold others up, and since when."""
    findings = [finding for finding in (verdict.main, *verdict.others) if finding is not None]
    return {
        rank: "slower than the others" + ("" if finding.since_step is None else f" since step {finding.since_step}")
        for finding in findings
        if finding.cause is Cause.STRAGGLER
        for rank in finding.ranks
    }
