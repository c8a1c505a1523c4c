"""Fewer points of a curve, with its peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def keep_extremes(values: Sequence[float], at_most: int) -> list[int]:
    """Which points of a curve to draw.

    The curve is cut into stretches of equal length; of each, the smallest and the largest value stay. So no peak is
    lost, however narrow. What is not finite does not count.

    Args:
        values: Of the curve, in order.
        at_most: How many points may stay; at least 4.

    Returns:
        Their indices, rising; the first and the last finite point are among them.
    """
    if at_most < 4:
        raise ValueError(f"at least 4 points are needed for a curve, got {at_most}")
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if len(finite) <= at_most:
        return finite
    inner = finite[1:-1]
    kept = {finite[0], finite[-1]}
    for first, end in stretches_of(len(inner), (at_most - 2) // 2):
        part = inner[first:end]
        kept.add(min(part, key=lambda index: values[index]))
        kept.add(max(part, key=lambda index: values[index]))
    return sorted(kept)


def stretches_of(count: int, at_most: int) -> list[tuple[int, int]]:
    """``count`` things in at most ``at_most`` stretches of as many each, one more or less: first index and end."""
    number = min(count, at_most)
    edges = [place * count // number for place in range(number + 1)] if number else [0]
    return list(pairwise(edges))


def spread_evenly(count: int, at_most: int) -> list[int]:
    """Indices of at most ``at_most`` of ``count`` things, as evenly as can be, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    if at_most <= 1:
        return [0] * at_most
    return [round(number * (count - 1) / (at_most - 1)) for number in range(at_most)]
