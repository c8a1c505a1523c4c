"""The dims that a plan cuts: of weights and of biases, and of layers that share a weight."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.errors import CombinationError
from lightning_dist.parallel.tensor.cuts import cut_dims


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.words.weight


PLAN = {"words": "embedding", "up": "column", "down": "row", "out": "head"}


def test_a_row_layers_bias_is_whole() -> None:
    model = Small()
    dims = {"words.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "out.weight": 0}
    assert cut_dims(model, size=2, plan=PLAN) == dims
    assert model.up.weight.shape == (6, 4)  # nothing was split


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CombinationError, match="over 4 ranks"):
        cut_dims(Small(), size=4, plan=PLAN)
