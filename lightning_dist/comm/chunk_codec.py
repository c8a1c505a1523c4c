"""A codec at work on the chunks of an all-reduce: what of them is encoded where, and what is owed of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dist.comm.account import SUM, Place
from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.codecs.dither import seed_of
from lightning_dist.comm.legs import Chunk, part_bounds


class ChunkCodec:
    """Rows of a chunk as they cross: encoded, or as they are while the codec warms up and where it does not apply.

    Args:
        codec: How values are encoded.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    @property
    def name(self) -> str:
        """Of the codec."""
        return self._codec.name

    def is_exact(self, chunk: Chunk) -> bool:
        """Whether this chunk crosses as it is."""
        is_warm_up = chunk.account is not None and chunk.account.is_exact
        return is_warm_up or not self._codec.applies_to(chunk.data.dtype)

    def row_length(self, chunk: Chunk, columns: int) -> int:
        """Elements of a row of so many values, as it crosses."""
        return columns if self.is_exact(chunk) else self._codec.encoded_bytes(columns)

    def encode(self, rows: torch.Tensor, chunk: Chunk, place: Place) -> torch.Tensor:
        """[rows, m] of [rows, n]; bytes, or the values themselves."""
        if self.is_exact(chunk):
            return self.own(rows, chunk, place) if place.kind != SUM else rows.to(chunk.data.dtype)
        if chunk.account is not None:
            return chunk.account.encode(self._codec, rows, place)
        return self._codec.encode(rows.float(), seed=seed_of(chunk.sequence, place.starts[0]))

    def own(self, rows: torch.Tensor, chunk: Chunk, place: Place) -> torch.Tensor:
        """Rows that are not encoded, as they go into a sum: with their momentum, if there is any."""
        account = chunk.account
        if account is None or account.momentum == 0 or not rows.dtype.is_floating_point:
            return rows
        return account.accelerated(rows, place).to(rows.dtype)

    def decode(self, rows: torch.Tensor, chunk: Chunk, length: int) -> torch.Tensor:
        """[rows, length] of what has crossed."""
        return rows if self.is_exact(chunk) else self._codec.decode(rows, length)

    # -- sums on their way back ----------------------------------------------------------------------------------------

    def code_length(self, chunk: Chunk, length: int, cuts: Sequence[int]) -> int:
        """Elements that a sum of so many values has while it is encoded.

        Args:
            chunk: On its way.
            length: Values.
            cuts: Parts that the legs above cut it into, from the next one to the top.
        """
        if len(cuts) == 1:
            return cuts[0] * self.row_length(chunk, -(-length // cuts[0]))
        return sum(self.code_length(chunk, high - low, cuts[1:]) for low, high in part_bounds(length, cuts[0]))

    def decode_sum(self, code: torch.Tensor, chunk: Chunk, length: int, cuts: Sequence[int]) -> torch.Tensor:
        """[length] of the code of a sum, in one dimension; arguments as for :meth:`code_length`."""
        if len(cuts) == 1:
            return self.decode(code.view(cuts[0], -1), chunk, -(-length // cuts[0])).reshape(-1)[:length]
        lengths = [high - low for low, high in part_bounds(length, cuts[0])]
        codes = code.split([self.code_length(chunk, part, cuts[1:]) for part in lengths])
        parts = [self.decode_sum(c, chunk, part, cuts[1:]) for c, part in zip(codes, lengths, strict=True)]
        return torch.cat(parts)


def place_of(kind: str, chunk: Chunk, columns: int, pieces: Sequence[int], unit: float) -> Place:
    """Where pieces of what a chunk holds are, in the tensor."""
    low, part = chunk.top_start, chunk.top
    assert part is not None
    return Place(kind, tuple(low + piece * columns for piece in pieces), low + part.numel(), unit)


def even_pieces(part: torch.Tensor, size: int) -> torch.Tensor:
    """[size, columns]: the part cut into rows of one length, with zeros behind the last."""
    missing = -part.numel() % size
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.view(size, -1)


def without(rows: torch.Tensor, index: int) -> torch.Tensor:
    """All rows but one."""
    if index in (0, len(rows) - 1):  # as they lie
        return rows[1:] if index == 0 else rows[:-1]
    return torch.cat([rows[:index], rows[index + 1 :]])
