"""Batches cut into micro-batches and put together again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.pipeline.micro_batches import join, samples_of, split_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def nested(size: int) -> dict[str, Any]:
    return {
        "pair": Pair(torch.arange(size), torch.randn(size, 3)),
        "list": [torch.ones(size, 2, 2), "name"],
        "scale": torch.tensor(2.0),
    }


@given(size=st.integers(1, 20), count=st.integers(1, 20))
def test_parts_make_the_whole(size: int, count: int) -> None:
    count = min(size, count)
    batch = nested(size)
    parts = split_batch(batch, count)
    sizes = [part.samples for part in parts]
    assert len(parts) == count
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    whole = join([part.values for part in parts], [part.samples for part in parts])
    assert isinstance(whole["pair"], Pair)
    assert torch.equal(whole["pair"].x, batch["pair"].x)
    assert torch.equal(whole["pair"].y, batch["pair"].y)
    assert torch.equal(whole["list"][0], batch["list"][0])
    assert whole["list"][1] == "name"
    assert whole["scale"] == 2.0
    assert len({part.signature for part in parts}) == len(set(sizes))


@pytest.mark.parametrize("batch", [{}, [torch.ones(2), torch.ones(3)], torch.tensor(1.0)])
def test_batches_without_a_first_dim_of_their_own_are_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="give all tensors of a batch the same first dim"):
        samples_of(batch)


def test_values_without_a_dim_are_means_over_samples_and_counts_are_added() -> None:
    parts = [
        {"loss": torch.tensor(1.0), "right": torch.tensor(2)},
        {"loss": torch.tensor(4.0), "right": torch.tensor(1)},
    ]
    whole = join(parts, [2, 1])
    assert whole["loss"] == 2.0
    assert whole["loss"].dtype == torch.float32
    assert whole["right"] == 3
