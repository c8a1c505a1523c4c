"""Which blocks to recompute so that activations fit a budget: pure values, no torch.

A block that is not recomputed keeps its input and its inner activations from forward to backward; one that is keeps its
input only. In backward the blocks are freed from the last to the first, and a recomputed block has all of its
activations again while its turn lasts. The most that is held at a time is therefore, over the blocks i,

    max_i  sum_{j<i} kept_j + input_i + inner_i,

which the end of the forward pass, the sum of all kept, never exceeds. What the model keeps outside of its blocks
(embeddings, logits, loss) comes on top and is not known here.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

_DECIMAL_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True)
class BlockCost:
    """What one block keeps for backward in a step, and what it costs to run it again.

    Attributes:
        name: Dotted path of the block.
        kind: Its class; blocks of one kind and size are taken to cost the same time.
        input_bytes: Kept in any case.
        inner_bytes: Kept in addition, unless the block is recomputed.
        forward_s: Seconds its forward takes in a step.
    """

    name: str
    kind: str
    input_bytes: int
    inner_bytes: int
    forward_s: float

    @property
    def is_measured(self) -> bool:
        """Whether the block ran at all."""
        return self.input_bytes > 0 or self.inner_bytes > 0 or self.forward_s > 0


@dataclass(frozen=True)
class Choice:
    """Blocks to recompute, and what is predicted of it.

    Attributes:
        recomputed: Names of the blocks, in the order given.
        kept_bytes: Activations of all blocks at the end of the forward pass.
        peak_bytes: The most in backward, with the block that is being recomputed.
        extra_s: Seconds that recomputation adds to a step.
        budget_bytes: What was asked for.
    """

    recomputed: tuple[str, ...]
    kept_bytes: int
    peak_bytes: int
    extra_s: float
    budget_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes


def choose_blocks(costs: Sequence[BlockCost], budget_bytes: int) -> Choice:
    """The blocks whose recomputation makes the peak fit, cheap ones (seconds a byte saved) first.

    Blocks are added by that ratio, the earlier first among equals (they are held longest), until the peak fits; then
    those that turned out needless are taken out again, the slowest first. If it does not fit with all of them, all are
    recomputed and :attr:`Choice.fits` is false.

    Args:
        costs: In the order of the forward pass.
        budget_bytes: Most that all blocks together may hold, at any time.
    """
    useful = [index for index, cost in enumerate(costs) if cost.inner_bytes > 0]
    by_ratio = sorted(useful, key=lambda index: (costs[index].forward_s / costs[index].inner_bytes, index))
    chosen: set[int] = set()
    for index in by_ratio:
        if peak_bytes(costs, chosen) <= budget_bytes:
            break
        chosen.add(index)
    if peak_bytes(costs, chosen) > budget_bytes:
        chosen = set(range(len(costs)))
    else:
        for index in sorted(chosen, key=lambda index: (-costs[index].forward_s, -index)):
            if peak_bytes(costs, chosen - {index}) <= budget_bytes:
                chosen.remove(index)
    return Choice(
        recomputed=tuple(costs[index].name for index in sorted(chosen)),
        kept_bytes=sum(_kept(cost, recomputed=index in chosen) for index, cost in enumerate(costs)),
        peak_bytes=peak_bytes(costs, chosen),
        extra_s=sum(costs[index].forward_s for index in chosen),
        budget_bytes=budget_bytes,
    )


def peak_bytes(costs: Sequence[BlockCost], recomputed: Collection[int]) -> int:
    """The most that all blocks hold at a time; ``recomputed`` are indices into ``costs``."""
    kept = peak = 0
    for index, cost in enumerate(costs):
        peak = max(peak, kept + _kept(cost, recomputed=False))
        kept += _kept(cost, recomputed=index in recomputed)
    return peak


def _kept(cost: BlockCost, *, recomputed: bool) -> int:
    return cost.input_bytes + (0 if recomputed else cost.inner_bytes)


def with_typical_times(costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Blocks of one kind that keep the same bytes get the median of their times.

    They do the same work; what differs is noise, and what the first of them alone pays (compilation, warming up).
    """
    times: dict[tuple[str, int, int], list[float]] = {}
    for cost in costs:
        times.setdefault((cost.kind, cost.input_bytes, cost.inner_bytes), []).append(cost.forward_s)
    return [
        replace(cost, forward_s=statistics.median_low(times[cost.kind, cost.input_bytes, cost.inner_bytes]))
        for cost in costs
    ]


def format_bytes(size_bytes: float) -> str:
    """A size as people read it, in decimal units: ``12.6 MB``."""
    for size, unit in _DECIMAL_UNITS:
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"
