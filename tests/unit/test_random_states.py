"""The random state of a rank, on as many ranks as saved it and on others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import _collect_rng_states

from lightning_dist.checkpoint.objects import decode, encode
from lightning_dist.modes import random_states
from lightning_dist.modes.random_states import Successor


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.random())  # the process's own


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = random_states.collect()
    yield
    random_states.restore(before, None, turn=0)


def test_whose_state_a_rank_goes_on_with() -> None:
    assert [Successor.of(rank, 2) for rank in range(4)] == [
        Successor(0, 1, 0), Successor(1, 0, 0), Successor(0, 1, 1), Successor(1, 0, 1),
    ]  # fmt: skip
    assert Successor.of(1, 4) == Successor(1, 2, 0)
    assert Successor.of(3, 1) == Successor(0, 0, 3)


def test_the_first_goes_on_and_the_others_draw_something_else_each_time_the_same() -> None:
    seed(2)
    other = random_states.collect()
    seed(1)
    saved = random_states.collect()
    expected = draw()
    drawn = []
    for turn in (0, 1, 2, 1):
        seed(5)
        random_states.restore(saved, other, turn=turn)
        drawn.append(draw())
    assert drawn[0] == expected
    assert drawn[1] == drawn[3]
    for numbers in zip(*drawn[:3], strict=True):
        assert len(set(numbers)) == 3


def test_ranks_that_had_drawn_alike_still_do() -> None:
    seed(1)
    saved, other = random_states.collect(), random_states.collect()
    expected = draw()
    for turn in range(3):
        random_states.restore(saved, other, turn=turn)
        assert draw() == expected


@pytest.mark.parametrize("collect", [random_states.collect, _collect_rng_states])
def test_they_go_on_from_a_checkpoint_also_from_one_that_has_them_as_lightning_collects_them(
    collect: Callable[[], dict[str, Any]],
) -> None:
    draw()
    random.gauss(0, 1)  # leaves a number for the next call
    saved = encode(collect(), "random")
    expected = draw(), random.gauss(0, 1)
    random_states.restore(decode(saved.data, "random"), None, turn=0)
    assert (draw(), random.gauss(0, 1)) == expected
