"""Sets of moments as sorted lists of intervals that do not touch; pure. Bounds are whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""From the first moment to the one after the last."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that are in any of some intervals, in any order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """All moments that are in both; both are sets as :func:`union` makes them."""
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """All moments of the first that are not in the second; both are sets as :func:`union` makes them."""
    left: list[Interval] = []
    j = 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k, at = j, start
        while k < len(other) and other[k][0] < end:
            if other[k][0] > at:
                left.append((at, other[k][0]))
            at = max(at, other[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """How long all together, in nanoseconds."""
    return sum(end - start for start, end in intervals)
