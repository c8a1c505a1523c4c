"""Rows on their way: read where they lie, written where they are wanted."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.comm.segments import Segments

ROWS = torch.arange(10.0).view(5, 2)


def held(**arguments: object) -> Segments:
    return Segments((0, 2, 3, 5, 8), ROWS.clone(), {}, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("destinations", "rows", "is_view"),
    [
        ((0, 2, 3, 5, 8), [0, 1, 2, 3, 4], True),
        ((2, 3), [1, 2], True),
        ((0, 3, 8), [0, 2, 4], True),
        ((5,), [3], True),
        ((), [], True),
        ((0, 2, 5), [0, 1, 3], False),
        ((3, 2), [2, 1], False),
        ((2, 2), [1, 1], False),
    ],
)
def test_rows_are_read_where_they_lie_evenly(destinations: tuple[int, ...], rows: list[int], is_view: bool) -> None:
    segments = held()
    some = segments.of(destinations)
    assert torch.equal(some, ROWS[rows])
    assert (some.untyped_storage().data_ptr() == segments.rows.untyped_storage().data_ptr()) == is_view


def test_parts_are_copied_together_into_the_goal() -> None:
    goal = torch.zeros(3, 2)
    segments = Segments((4,), torch.full((1, 2), 4.0), {}, goal=goal, final=(1, 4, 6))
    segments.hold([((4,), segments.rows), ((6, 1), torch.tensor([[6.0, 6.0], [1.0, 1.0]]))])
    assert (segments.destinations, segments.rows is goal) == ((1, 4, 6), True)
    assert goal[:, 0].tolist() == [1, 4, 6]


def test_rows_that_came_in_one_part_arrive_at_the_goal() -> None:
    goal = torch.zeros(1, 2)
    segments = held(goal=goal, final=(3,))
    segments.hold([((3,), segments.of((3,))), ((), ROWS[:0])])
    assert goal.eq(0).all()
    segments.arrive()
    assert torch.equal(goal, ROWS[2:3])


def test_room_is_the_goal_only_where_nothing_is_read_from_it() -> None:
    goal = torch.zeros(1, 2)
    segments = held(goal=goal, final=(3,))
    assert segments.room_for((3,), torch.float32) is goal
    assert segments.room_for((2,), torch.float32) is not goal
    assert segments.room_for((3,), torch.bfloat16).dtype is torch.bfloat16
    segments.hold([((3,), goal)])
    assert segments.room_for((3,), torch.float32) is not goal
