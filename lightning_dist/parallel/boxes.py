"""Which values of a whole tensor a rank holds: boxes of it, and where each lies in the rank's part; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """Values of a whole tensor that lie together, in a rank's part too.

    Attributes:
        offsets: Where it begins in the whole tensor, by dim.
        sizes: How long it is.
        starts: Where it begins in the part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.sizes)

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """Index of its values in the whole tensor."""
        return tuple(slice(low, low + size) for low, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def in_part(self) -> tuple[slice, ...]:
        """Index of its values in the part."""
        return tuple(slice(low, low + size) for low, size in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread.

    Attributes:
        shape: Of the whole.
        boxes: This rank's part.
        axes: Of the layout, along which ranks hold different parts; along the others they hold the same.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    axes: frozenset[str]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    zeros = (0,) * len(shape)
    return Box(zeros, tuple(shape), zeros)


def boxes_along(shape: Sequence[int], dim: int, ranges: Iterable[tuple[int, int]]) -> tuple[Box, ...]:
    """A part made of some runs of a tensor along one dim, one after another.

    Args:
        shape: Of the whole tensor.
        dim: Which it is cut along.
        ranges: (first, one behind the last) of each run, in the order of the part.
    """
    boxes, start = [], 0
    for low, high in ranges:
        if high > low:
            everything = whole_box(shape)
            boxes.append(
                Box(
                    _with(everything.offsets, dim, low),
                    _with(everything.sizes, dim, high - low),
                    _with(everything.starts, dim, start),
                )
            )
        start += max(0, high - low)
    return tuple(boxes)


def rows_of(boxes: Iterable[Box], low: int, high: int) -> tuple[Box, ...]:
    """The part of a part that is its rows from ``low`` to before ``high``.

    Args:
        boxes: Of the part; of one dim at least.
        low: The first row.
        high: One behind the last.
    """
    found = []
    for box in boxes:
        first, behind = max(low, box.starts[0]), min(high, box.starts[0] + box.sizes[0])
        if behind > first:
            found.append(
                Box(
                    _with(box.offsets, 0, box.offsets[0] + first - box.starts[0]),
                    _with(box.sizes, 0, behind - first),
                    _with(box.starts, 0, first - low),
                )
            )
    return tuple(found)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
