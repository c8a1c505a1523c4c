"""The legs of a hierarchical all-reduce: each takes a chunk one level up or down.

An inner leg sums a tensor over its group and leaves each of the first ``width`` members with one part (reduce), and
later brings the parts back to all members (gather). The top leg sums each part over its owners. A leg is a few steps,
each run by the lane of its name; a step of one chunk runs while other steps of its neighbours do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_dist.comm.collectives import Pending
from lightning_dist.comm.feedback import Account


@dataclass
class Chunk:
    """A piece of a tensor on its way through the legs.

    Attributes:
        data: [n], contiguous; a view of the tensor, which receives the result in place.
        sequence: Number of the chunk, counted alike on all ranks.
        maximum: Whether the values are combined by maximum instead of sum (bool as uint8).
        scale: Factor for the finished sum, or ``None``.
        scale_first: Whether ``scale`` is applied before the values leave the host (fp16, whose sum could overflow).
        attributes: What else events should say: bucket, chunk.
        start: Of ``data`` in the tensor: its first element.
        account: What is owed of the tensor; ``None``: nothing is kept of it.
        held: What this rank holds after each inner leg; ``None`` where it owns no part.
        starts: Of each of ``held``: its first element in the tensor.
    """

    data: torch.Tensor
    sequence: int
    maximum: bool = False
    scale: float | None = None
    scale_first: bool = False
    attributes: dict[str, int] = field(default_factory=dict)
    start: int = 0
    account: Account | None = None
    held: list[torch.Tensor | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    pending: Pending | None = None
    encoded: torch.Tensor | None = None

    @property
    def top(self) -> torch.Tensor | None:
        """What this rank holds at the present level."""
        return self.held[-1] if self.held else self.data

    @property
    def top_start(self) -> int:
        """The first element of :attr:`top` in the tensor."""
        return self.starts[-1] if self.starts else self.start

    def rise(self, part: torch.Tensor | None, low: int) -> None:
        """Hold a part of :attr:`top` from now on, which begins there at ``low``."""
        self.starts.append(self.top_start + low)
        self.held.append(part)

    def sink(self) -> torch.Tensor | None:
        """Hold again what was held before :meth:`rise`; returns the part."""
        self.starts.pop()
        return self.held.pop()


HALF_DTYPES = (torch.float16, torch.bfloat16)  # summed in fp32, rounded once

ChunkStep = Callable[[Chunk], None]


@dataclass(frozen=True)
class NamedStep:
    """A step and the lane it belongs to."""

    lane: str
    run: ChunkStep


class Leg(Protocol):
    """One level: steps on the way up, and on the way down. A top leg has no way down."""

    @property
    def up(self) -> Sequence[NamedStep]:
        """Steps that reduce, in order."""

    @property
    def down(self) -> Sequence[NamedStep]:
        """Steps that bring the result back, in order."""

    @property
    def description(self) -> str:
        """What it does, by what means; a few words for people."""

    def abort(self, reason: str) -> None:
        """Free whoever waits in this leg, here and at the peers."""

    def close(self) -> None:
        """Release what the leg holds. Safe to call twice."""


def part_bounds(length: int, width: int) -> list[tuple[int, int]]:
    """Cut ``length`` elements into ``width`` runs, the first ones of equal size, the last ones shorter or empty."""
    size = -(-length // width)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in range(width)]


def part_start(length: int, width: int, index: int) -> int:
    """Where run ``index`` of :func:`part_bounds` begins."""
    return min(index * -(-length // width), length)


def parts_of(tensor: torch.Tensor, width: int) -> list[torch.Tensor]:
    """The runs of :func:`part_bounds` as views of a flat tensor."""
    return [tensor[low:high] for low, high in part_bounds(tensor.numel(), width)]


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Let memory that another CUDA stream allocated live until what the current one does with it is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def sum_in_order(
    terms: Sequence[torch.Tensor], out: torch.Tensor, *, maximum: bool = False, scale: float | None = None
) -> None:
    """``out`` = the sum of ``terms`` in their order, times ``scale``; or their maximum.

    Half types are summed in fp32 and rounded once, so that the error does not grow with the number of terms.

    Args:
        terms: [n] each, of one type.
        out: [n] of the same type, or fp32; must not share memory with a term but the first.
        maximum: Take the maximum instead.
        scale: Factor, floating types only.
    """
    half = out.dtype in HALF_DTYPES
    total = torch.empty_like(out, dtype=torch.float32) if half else out
    combine = torch.maximum if maximum else torch.add
    if len(terms) > 1 and terms[0].dtype == total.dtype:
        combine(terms[0], terms[1], out=total)  # one pass over memory less than copying first
        rest = terms[2:]
    else:
        total.copy_(terms[0])
        rest = terms[1:]
    for term in rest:
        combine(total, term.to(total.dtype), out=total)
    if scale is not None:
        total.mul_(scale)
    if half:
        out.copy_(total)
