"""Boxes of whole tensors, against slices of numbered ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dist.parallel.boxes import Box, boxes_along, rows_of, whole_box
from lightning_dist.parallel.tensor.rows import rank_ranges, to_rank_order


def assert_boxes(boxes: tuple[Box, ...], whole: Tensor, part: Tensor) -> None:
    """They say of each value of the part, once, where it is in the whole."""
    seen = torch.zeros(part.shape, dtype=torch.int64)
    for box in boxes:
        assert torch.equal(whole[box.in_whole], part[box.in_part])
        seen[box.in_part] += 1
    assert bool((seen == 1).all())
    assert sum(box.numel for box in boxes) == part.numel()


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (7, 4, 2)])
def test_all_of_a_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    whole = numbered(*shape)
    assert_boxes((whole_box(shape),), whole, whole)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_runs_along_a_dim(dim: int) -> None:
    whole = numbered(6, 5, 7)
    ranges = [(1, 3), (3, 3), (4, 5)]
    part = torch.cat([whole.narrow(dim, low, high - low) for low, high in ranges], dim)
    assert_boxes(boxes_along(whole.shape, dim, ranges), whole, part)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_of_a_fused_projection_and_their_shards(parts: int, size: int, rows: int) -> None:
    """Layers split first, then rows of each part dealt in shards of as many rows, the last ones perhaps empty."""
    whole = numbered(parts * size * rows, 3)
    by_rank = to_rank_order(whole, parts=parts, size=size)
    for rank in range(size):
        part = by_rank.chunk(size)[rank]
        boxes = boxes_along(whole.shape, 0, rank_ranges(len(whole), parts=parts, size=size, rank=rank))
        assert_boxes(boxes, whole, part)
        for low in range(0, len(part) + 4, 4):
            assert_boxes(rows_of(boxes, low, low + 4), whole, part[low : low + 4])
