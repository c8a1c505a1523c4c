"""Pieces: any cut covers its piece, any deal gives each value to one rank, balanced, and the same on all ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.coverage import Block, fault
from lightning_dist.checkpoint.pieces import ELEMENT_BYTES, Piece, cut, deal
from lightning_dist.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
DTYPES = st.sampled_from(sorted(ELEMENT_BYTES))


@given(SHAPES, DTYPES, st.integers(1, 300))
def test_any_cut_covers_and_keeps_its_size(shape: tuple[int, ...], dtype: str, max_bytes: int) -> None:
    piece = Piece.whole("w", dtype, shape)
    parts = list(cut(piece, max_bytes))
    assert fault(shape, [Block(part.offsets, part.sizes) for part in parts]) is None
    assert all(part.size_bytes <= max_bytes or part.numel == 1 for part in parts)
    assert sum(part.size_bytes for part in parts) == piece.size_bytes == math.prod(shape) * ELEMENT_BYTES[dtype]


@given(SHAPES, st.integers(1, 300))
def test_cuts_follow_one_another_in_memory(shape: tuple[int, ...], max_bytes: int) -> None:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    end = 0
    for part in cut(Piece.whole("w", "float32", shape), max_bytes):
        if part.numel:
            assert sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True)) == end
        end += part.numel


@given(st.lists(SHAPES, max_size=5), st.sets(st.integers(0, 50), min_size=1, max_size=9), st.integers(4, 200))
def test_a_deal_gives_each_value_to_one_rank(shapes: list[tuple[int, ...]], holders: set[int], max_bytes: int) -> None:
    pieces = [Piece.whole(f"w{i}", "float32", shape) for i, shape in enumerate(shapes)]
    dealt = deal(pieces, holders, max_bytes=max_bytes)
    assert dealt == deal(pieces, sorted(holders, reverse=True), max_bytes=max_bytes)
    assert dealt.keys() == holders
    for piece in pieces:
        blocks = [Block(p.offsets, p.sizes) for part in dealt.values() for p in part if p.name == piece.name]
        assert fault(piece.shape, blocks) is None
    loads = [sum(p.size_bytes for p in part) for part in dealt.values()]
    assert max(loads) - min(loads) <= max_bytes


def test_ten_thousand_ranks_share_a_model() -> None:
    pieces = [Piece.whole(f"layer{i}", "float32", (4096, 1024)) for i in range(200)]
    loads = [sum(p.size_bytes for p in part) for part in deal(pieces, range(10_000), max_bytes=1 << 18).values()]
    assert sum(loads) == 200 * 4096 * 1024 * 4
    assert max(loads) <= sum(loads) / 10_000 + (1 << 18)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(CheckpointError, match="types that can be saved: bool, int8"):
        Piece.whole("w", "qint8", (3,))
    with pytest.raises(CheckpointError, match=r"w\[2:5\] of float32\[4\] reaches out"):
        Piece("w", "float32", (4,), (2,), (3,))
    with pytest.raises(CheckpointError, match="another number of dims"):
        Piece("w", "float32", (4,), (), (4,))
    with pytest.raises(ValueError, match="holders is empty"):
        deal([], [], max_bytes=1)
    with pytest.raises(ValueError, match="at least 1"):
        list(cut(Piece.whole("w", "float32", (4,)), 0))
