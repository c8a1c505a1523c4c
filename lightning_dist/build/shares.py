"""Who writes what of what ranks hold, and where the reader puts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_dist.checkpoint.host_pieces import Held, HostPiece, dtype_name
from lightning_dist.checkpoint.pieces import Piece, deal
from lightning_dist.parallel.boxes import Box, Spread
from lightning_dist.parallel.held_state import HeldTensor, TensorToFill


class Share(NamedTuple):
    """A piece that this rank writes.

    Attributes:
        piece: Which.
        number: Of the tensor it belongs to.
        inside: Index of its values in this rank's part of the tensor.
    """

    piece: Piece
    number: int
    inside: tuple[slice, ...]


def share_of(tensors: Sequence[HeldTensor], rank: int, *, chunk_bytes: int) -> tuple[Share, ...]:
    """What a rank writes of what it holds: what it alone holds, and its share of what several do.

    Args:
        tensors: The same in the same order on ranks that hold the same.
        rank: This one.
        chunk_bytes: The largest piece.
    """
    by_holders: dict[tuple[int, ...], list[tuple[Piece, int, Box]]] = {}
    for number, held in enumerate(tensors):
        boxes = by_holders.setdefault(tuple(sorted(held.holders)), [])
        boxes += [(piece, number, box) for piece, box in _pieces_of(held.names[0], held.local, held.spread)]
    share = []
    for holders, found in by_holders.items():
        by_name: dict[str, list[tuple[Piece, int, Box]]] = {}
        for each in found:
            by_name.setdefault(each[0].name, []).append(each)
        for piece in deal([whole for whole, _, _ in found], holders, max_bytes=chunk_bytes)[rank]:
            whole, number, box = next(each for each in by_name[piece.name] if each[0].holds(piece))
            share.append(Share(piece, number, _index_in(whole, box, piece)))
    return tuple(share)


def to_read(to_fill: TensorToFill) -> Held:
    """Where the reader puts the values of a tensor."""
    part = to_fill.part
    assert part is not None, "wanted here"
    pieces = _pieces_of(to_fill.name, part, to_fill.spread)
    return Held(tuple(HostPiece(piece, part[box.in_part]) for piece, box in pieces))


def _index_in(whole: Piece, box: Box, piece: Piece) -> tuple[slice, ...]:
    return tuple(
        slice(start + offset - first, start + offset - first + size)
        for start, first, offset, size in zip(box.starts, whole.offsets, piece.offsets, piece.sizes, strict=True)
    )


def _pieces_of(name: str, part: torch.Tensor, spread: Spread) -> list[tuple[Piece, Box]]:
    dtype = dtype_name(part.dtype)
    return [(Piece(name, dtype, spread.shape, box.offsets, box.sizes), box) for box in spread.boxes]
