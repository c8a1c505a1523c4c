"""Placements given in tests, and the variables made from them."""

from __future__ import annotations

import pytest

from tests.support.placement import PLACEMENTS, Placement


def test_a_cyclic_placement_seats_each_rank_on_its_host() -> None:
    seats = PLACEMENTS["cyclic"].seats()
    assert [(s.rank, s.host, s.local_rank, s.node_rank) for s in seats] == [
        (0, "a", 0, 0),
        (1, "b", 0, 1),
        (2, "a", 1, 0),
        (3, "b", 1, 1),
    ]


def test_the_environment_is_a_launchers() -> None:
    assert PLACEMENTS["3+1"].seats()[3].environment() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }


def test_mapping_pairs_and_a_number_are_understood() -> None:
    assert Placement.of({"a": [0, 1]}) == Placement.of([["a", [0, 1]]])
    assert Placement.of(3).as_dict() == {"localhost": [0, 1, 2]}


@pytest.mark.parametrize("wrong", [{"a": [0, 2]}, {"a": [0, 1], "b": [1]}, {}], ids=["gap", "twice", "empty"])
def test_a_placement_without_each_rank_once_is_refused(wrong: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="holds each rank"):
        Placement.of(wrong)
