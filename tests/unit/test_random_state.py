"""Random generators go on where they were saved, also from a checkpoint that has them as Lightning collects them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_dist.checkpoint.objects import decode, encode
from lightning_dist.modes import random_state


@pytest.fixture(autouse=True)
def _left_alone() -> Iterator[None]:
    states = _collect_rng_states()
    yield
    _set_rng_states(states)


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(1))]


@pytest.mark.parametrize("collect", [random_state.collected, _collect_rng_states])
def test_they_go_on(collect: Callable[[], dict[str, Any]]) -> None:
    drawn()
    saved = encode(collect(), "random")
    wanted = drawn()
    drawn()
    random_state.restore(decode(saved.data, "random"))
    assert drawn() == wanted
