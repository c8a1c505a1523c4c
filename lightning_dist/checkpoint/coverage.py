"""Do blocks make up their tensor: each index once, none twice, none outside? Pure, and linear in their number.

Note: corners. Write f for the number of blocks that hold an index. Counted modulo two, f is fixed by the corners that
belong to an odd number of blocks: f is one inside the tensor and zero outside exactly if these are the corners of the
tensor itself. Then each index is held by one, three, ... blocks, and if the blocks have as many values as the tensor,
by one. So it is enough to toggle the corners of all blocks in a set and to add up volumes; nothing is sorted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """Where a block lies: first index and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def fault(shape: Sequence[int], blocks: Sequence[Block]) -> str | None:
    """What is wrong with the blocks of a tensor, in words; ``None`` if they hold each of its values once.

    Blocks without values count for nothing.
    """
    for block in blocks:
        if not len(block.offsets) == len(block.sizes) == len(shape):
            return f"a block of {len(block.sizes)} dims in a tensor of {len(shape)}"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(block.offsets, block.sizes, shape, strict=True)):
            return f"{_text(block)} reaches out of the tensor"
    filled = [block for block in blocks if math.prod(block.sizes)]
    values, held = math.prod(shape), sum(math.prod(block.sizes) for block in filled)
    if held == values and (not values or _corners(filled, _varying(shape, filled)) == _outer(shape, filled)):
        return None
    pair = _overlap(filled)
    if pair is not None:
        return f"{_text(pair[0])} and {_text(pair[1])} overlap"
    return f"blocks hold {held} of {values} values"


def _varying(shape: Sequence[int], blocks: Sequence[Block]) -> list[int]:
    """Dims along which the tensor is divided; the others double the number of corners and say nothing."""
    return [dim for dim, size in enumerate(shape) if any(block.sizes[dim] != size for block in blocks)]


def _corners(blocks: Sequence[Block], dims: Sequence[int]) -> set[tuple[int, ...]]:
    odd: set[tuple[int, ...]] = set()
    for block in blocks:
        ends = [(block.offsets[dim], block.offsets[dim] + block.sizes[dim]) for dim in dims]
        odd.symmetric_difference_update(itertools.product(*ends))
    return odd


def _outer(shape: Sequence[int], blocks: Sequence[Block]) -> set[tuple[int, ...]]:
    return set(itertools.product(*((0, shape[dim]) for dim in _varying(shape, blocks))))


def _overlap(blocks: Sequence[Block]) -> tuple[Block, Block] | None:
    """The first two that overlap, by a sweep along dim 0; only called when something is wrong."""
    if blocks and not blocks[0].sizes:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    active: list[Block] = []
    for block in sorted(blocks):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > block.offsets[0]]
        for other in active:
            if all(
                o < p + q and p < o + s
                for o, s, p, q in zip(block.offsets, block.sizes, other.offsets, other.sizes, strict=True)
            ):
                return other, block
        active.append(block)
    return None


def _text(block: Block) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(block.offsets, block.sizes, strict=True)) + "]"
