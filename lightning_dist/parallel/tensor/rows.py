"""Where the rows of a fused projection live; pure.

A fused projection is several projections in one weight, row block after row block: ``[q; k; v]``. To give each rank a
part of each, rows are put in the order ``[q_0; k_0; v_0; q_1; k_1; v_1; ...]``, where the index is that of the rank,
and then cut into equal runs. On each rank ``output.chunk(3, -1)`` is then the rank's own q, k and v.
"""

from __future__ import annotations

from torch import Tensor


def to_rank_order(tensor: Tensor, *, parts: int, size: int) -> Tensor:
    """Rows by part -> rows by rank.

    Args:
        tensor: [rows, ...], rows a multiple of parts * size.
        parts: Projections fused into one.
        size: Ranks that share them.
    """
    by_part: Tensor = tensor.unflatten(0, (parts, size, -1))
    return by_part.transpose(0, 1).flatten(0, 2)


def to_part_order(tensor: Tensor, *, parts: int, size: int) -> Tensor:
    """The inverse of :func:`to_rank_order`: rows by rank -> rows by part."""
    by_rank: Tensor = tensor.unflatten(0, (size, parts, -1))
    return by_rank.transpose(0, 1).flatten(0, 2)


def rank_ranges(rows: int, *, parts: int, size: int, rank: int) -> list[tuple[int, int]]:
    """Which rows one rank has, (first, one behind the last) of each part, in the order of :func:`to_rank_order`.

    Args:
        rows: Of the whole tensor; with one part, any number: the last ranks may have fewer.
        parts: Projections fused into one.
        size: Ranks that share them.
        rank: One of them.
    """
    of_part = rows // parts
    share = -(-of_part // size)
    low, high = min(rank * share, of_part), min((rank + 1) * share, of_part)
    return [(part * of_part + low, part * of_part + high) for part in range(parts)]
