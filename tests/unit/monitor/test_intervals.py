"""Sets of moments against the same sets written out moment by moment."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.monitor.intervals import Interval, difference, intersection, length, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


def is_canonical(intervals: list[Interval]) -> bool:
    apart = all(a[1] < b[0] for a, b in itertools.pairwise(intervals))
    return apart and all(start < end for start, end in intervals)


@given(INTERVALS)
def test_a_union_has_the_moments_of_all_and_no_others(intervals: list[Interval]) -> None:
    found = union(intervals)
    assert moments(found) == moments(intervals)
    assert is_canonical(found)
    assert length(found) == len(moments(intervals))


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_divide_a_set(one: list[Interval], other: list[Interval]) -> None:
    a, b = union(one), union(other)
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    assert length(intersection(a, b)) + length(difference(a, b)) == length(a)
