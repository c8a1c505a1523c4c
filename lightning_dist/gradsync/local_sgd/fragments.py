"""Parameters dealt to fragments; pure."""

from __future__ import annotations

from collections.abc import Sequence

_STRIPES = 4  # a fragment has about so many pieces of the model, at even distances


def deal(sizes: Sequence[int], fragments: int) -> list[int]:
    """The fragment of each parameter, in model order.

    Successive parameters make pieces of about equal bytes, and pieces go round the fragments, each to the one that has
    least so far: of equal layers every fragment gets each k-th, as in Streaming DiLoCo (Douillard et al. 2025).

    Args:
        sizes: Bytes of each parameter; the same on all ranks.
        fragments: How many there are; with fewer parameters some stay empty.
    """
    pieces = _pieces(sizes, fragments)
    loads, dealt = [0] * fragments, [0] * len(sizes)
    for piece in pieces:
        chosen = loads.index(min(loads))
        for index in piece:
            dealt[index] = chosen
            loads[chosen] += sizes[index]
    return dealt


def _pieces(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Runs of successive parameters; single ones where there are too few for every fragment to get a run."""
    limit = sum(sizes) / (fragments * _STRIPES)
    pieces: list[list[int]] = []
    current: list[int] = []
    size = 0
    for index, own in enumerate(sizes):
        current.append(index)
        size += own
        if size >= limit:
            pieces.append(current)
            current, size = [], 0
    if current:
        pieces.append(current)
    return pieces if len(pieces) >= fragments else [[index] for index in range(len(sizes))]
