"""What is needed next is told in time, in order, and only when it changes."""

from __future__ import annotations

import numpy as np

from lightning_dist.data.loading.ahead import looked_ahead
from lightning_dist.data.loading.batches import BatchPlan


def _plans(*chunks: list[int]) -> list[BatchPlan]:
    def column(values: list[int]) -> np.ndarray:
        return np.asarray(values, dtype=np.int64)

    return [
        BatchPlan(number, column(each), column([0] * len(each)), column(each), column([0] * len(each)))
        for number, each in enumerate(chunks)
    ]


def test_a_plan_comes_after_what_it_needs_was_told() -> None:
    told: list[list[int]] = []
    plans = _plans([3, 1, 3], [1, 2], [5], [5])
    seen = []
    ahead = looked_ahead(
        plans, size_of=lambda key: 10, ahead_bytes=30, expect=lambda keys: told.append([chunk for _, chunk in keys])
    )
    for plan in ahead:
        assert set(plan.chunks.tolist()) <= set(told[-1])
        seen.append(plan.start)
    assert seen == [0, 1, 2, 3]
    assert told == [[3, 1, 2], [1, 2, 5]]  # in the order of first use; not again for what has only gone


def test_it_looks_no_further_than_it_may() -> None:
    told: list[int] = []
    taken = 0

    def counted() -> object:
        nonlocal taken
        for plan in _plans(*([number] for number in range(100))):
            taken += 1
            yield plan

    ahead = looked_ahead(counted(), size_of=lambda key: 10, ahead_bytes=35, expect=lambda keys: told.append(len(keys)))
    next(ahead)
    assert (taken, told) == (4, [4])
    assert len(list(ahead)) == 99
    assert max(told) <= 4


def test_without_reading_ahead_each_plan_is_told_alone() -> None:
    told: list[int] = []
    ahead = looked_ahead(
        _plans([1], [2], []), size_of=lambda key: 10, ahead_bytes=0, expect=lambda keys: told.append(len(keys))
    )
    assert [plan.start for plan in ahead] == [0, 1, 2]
    assert told == [1, 1]
