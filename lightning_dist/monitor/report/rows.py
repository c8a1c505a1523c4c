"""Spans of one lane laid into rows, so that no two of a row are on top of each other."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.monitor.record import Span


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """As few rows as are needed; operations in flight together come to lie below each other.

    Args:
        spans: Of one lane, in any order. Those that end before they start are left out.

    Returns:
        Rows, each in order of time; in each, a span starts when the one before has ended.
    """
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: (each.start_ns, each.end_ns)):
        if span.end_ns < span.start_ns:
            continue
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
