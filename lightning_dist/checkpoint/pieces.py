"""Pieces of tensors as values: where a block lies in its tensor, how it is cut, and which rank writes it.

Pure: no torch, no processes. All ranks that hold the same values compute the same deal, so nothing is communicated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_dist.errors import CheckpointError

#: Name of a type, as torch prints it without ``torch.``, -> bytes of one element.
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
        **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    }
)


@dataclass(frozen=True)
class Piece:
    """A block of a tensor.

    Attributes:
        name: Of the tensor.
        dtype: A key of :data:`ELEMENT_BYTES`.
        shape: Of the whole tensor.
        offsets: First index of the block in each dim.
        sizes: Of the block in each dim.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise CheckpointError(
                f"tensor {self.name!r} is of type {self.dtype}, which has no plain bytes; "
                f"types that can be saved: {', '.join(ELEMENT_BYTES)}"
            )
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise CheckpointError(f"{self!r}: offsets or sizes have another number of dims than the shape")
        for whole, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise CheckpointError(f"{self} reaches out of its tensor")

    @classmethod
    def whole(cls, name: str, dtype: str, shape: Iterable[int]) -> Piece:
        """The piece that is all of the tensor."""
        sizes = tuple(shape)
        return cls(name, dtype, sizes, (0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Values in the block; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return self.numel * ELEMENT_BYTES[self.dtype]

    def holds(self, other: Piece) -> bool:
        """Whether another block of the tensor is inside this one."""
        return all(
            first <= offset and offset + size <= first + held
            for first, held, offset, size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{ranges}] of {self.dtype}{list(self.shape)}"


def cut(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """Cut a block into blocks of at most so many bytes, in the order of its values.

    It is cut along dim 0; where a single row is too large, the row is cut along dim 1, and so on. In a contiguous
    tensor of the block's values each cut is therefore contiguous too. A block is never cut below one value.

    Args:
        piece: An empty one yields itself.
        max_bytes: At least 1.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    if piece.size_bytes <= max_bytes or piece.numel <= 1:
        yield piece
        return
    dim = next(d for d, size in enumerate(piece.sizes) if size > 1)
    row_bytes = piece.size_bytes // piece.sizes[dim]
    rows = max(max_bytes // row_bytes, 1)
    for start in range(0, piece.sizes[dim], rows):
        part = _narrow(piece, dim, start, min(rows, piece.sizes[dim] - start))
        yield from cut(part, max_bytes)


def deal(pieces: Iterable[Piece], holders: Collection[int], *, max_bytes: int) -> dict[int, list[Piece]]:
    """Who writes what, of values that several ranks hold alike: cut, and dealt to them balanced by bytes.

    The largest piece goes to the rank that has the least so far (Graham, "Bounds on multiprocessing timing anomalies",
    1969), so no rank writes more than the mean and one cut. Depends on the arguments only: every holder computes it for
    itself. Ranks keep the order in which pieces were given.

    Args:
        pieces: The same on all holders, in the same order.
        holders: Ranks, in any order.
        max_bytes: As in :func:`cut`.
    """
    ranks = sorted(set(holders))
    if not ranks:
        raise ValueError("nobody holds the pieces: holders is empty")
    cuts = [part for piece in pieces for part in cut(piece, max_bytes)]
    loads = [(0, rank) for rank in ranks]
    chosen: dict[int, list[int]] = {rank: [] for rank in ranks}
    for index in sorted(range(len(cuts)), key=lambda i: (-cuts[i].size_bytes, i)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cuts[index].size_bytes, rank))
        chosen[rank].append(index)
    return {rank: [cuts[index] for index in sorted(indices)] for rank, indices in chosen.items()}


def _narrow(piece: Piece, dim: int, start: int, size: int) -> Piece:
    offsets, sizes = list(piece.offsets), list(piece.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return replace(piece, offsets=tuple(offsets), sizes=tuple(sizes))
