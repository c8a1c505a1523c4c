"""Coverage: tilings pass; a block that is moved, dropped, doubled, resized or outside is found."""

from __future__ import annotations

import random

import pytest

from lightning_dist.checkpoint.coverage import Block, fault
from tests.support.saves import tiling


def blocks(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Block]:
    return [Block(*block) for block in tiling(shape, cuts, rng)]


@pytest.mark.parametrize("shape", [(), (1,), (13,), (7, 5), (4, 5, 6), (3, 4, 5, 2)])
def test_random_tilings_pass_and_any_change_is_found(shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    for _ in range(50):
        tiles = blocks(shape, rng.randrange(12), rng)
        rng.shuffle(tiles)
        assert fault(shape, tiles) is None
        index = rng.randrange(len(tiles))
        assert fault(shape, tiles[:index] + tiles[index + 1 :])
        assert fault(shape, [*tiles, tiles[index]])
        if shape:
            dim, tile = rng.randrange(len(shape)), tiles[index]
            for by in (-1, 1):
                offsets, sizes = list(tile.offsets), list(tile.sizes)
                offsets[dim] += by
                assert fault(shape, [*tiles[:index], Block(tuple(offsets), tile.sizes), *tiles[index + 1 :]])
                sizes[dim] += by
                assert fault(shape, [*tiles[:index], Block(tile.offsets, tuple(sizes)), *tiles[index + 1 :]])


def test_a_tiling_that_no_straight_cut_divides_passes() -> None:
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert fault((3, 3), [Block(*block) for block in wheel]) is None


def test_equal_volume_is_not_enough() -> None:
    halves = [Block((0, 0), (2, 4)), Block((1, 0), (2, 4)), Block((3, 0), (1, 2)), Block((3, 2), (1, 2))]
    assert fault((5, 4), halves) == "[0:2, 0:4] and [1:3, 0:4] overlap"
    assert fault((4,), [Block((0,), (2,)), Block((0,), (2,))]) == "[0:2] and [0:2] overlap"
    assert fault((4,), [Block((0,), (2,))]) == "blocks hold 2 of 4 values"


def test_blocks_without_values_count_for_nothing() -> None:
    assert fault((0, 5), []) is None
    assert fault((0, 5), [Block((0, 0), (0, 5))]) is None
    assert fault((4,), [Block((0,), (4,)), Block((4,), (0,))]) is None
    assert fault((4,), []) == "blocks hold 0 of 4 values"
    assert fault((), []) == "blocks hold 0 of 1 values"


def test_ten_thousand_ranks_in_two_dims() -> None:
    grid = [Block((8 * r, 4 * c), (8, 4)) for r in range(100) for c in range(100)]
    assert fault((800, 400), grid) is None
    assert fault((800, 400), [*grid[:5000], *grid[5001:], grid[0]]) == "[0:8, 0:4] and [0:8, 0:4] overlap"
