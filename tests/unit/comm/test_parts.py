"""How tensors are cut and summed: pure."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.comm.legs import part_bounds, parts_of, sum_in_order


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_parts_cover_all_in_order_and_differ_little(length: int, width: int) -> None:
    bounds = part_bounds(length, width)
    assert len(bounds) == width
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-length // width)


def test_parts_are_views() -> None:
    tensor = torch.zeros(5)
    for part in parts_of(tensor, 3):
        part.fill_(1)
    assert tensor.tolist() == [1.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_sums_and_maxima(dtype: torch.dtype) -> None:
    terms = [torch.tensor(values, dtype=dtype) for values in ([1, 2, 3], [4, 0, 1], [2, 9, 1])]
    out = torch.empty(3, dtype=dtype)
    sum_in_order(terms, out)
    assert out.tolist() == [7, 11, 5]
    sum_in_order(terms, out, maximum=True)
    assert out.tolist() == [4, 9, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    terms = [torch.tensor([256.0], dtype=dtype)] + [torch.tensor([0.5], dtype=dtype)] * 8
    out = torch.empty(1, dtype=dtype)
    sum_in_order(terms, out)
    assert out.item() == 260.0 if dtype is torch.float16 else 260.0
    sum_in_order(
        [torch.tensor([60000.0], dtype=torch.float16)] * 2, (half := torch.empty(1, dtype=torch.float16)), scale=0.5
    )
    assert half.item() == 60000.0


def test_the_sum_may_go_where_the_first_term_is() -> None:
    first = torch.tensor([1.0, 2.0])
    sum_in_order([first, torch.tensor([3.0, 4.0])], first, scale=0.5)
    assert first.tolist() == [2.0, 3.0]
