"""Looking ahead: which chunks the next batches need, before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from lightning_dist.data.loading.batches import BatchPlan

ChunkKey = tuple[int, int]
"""Source and chunk."""

_MOST_PLANS = 512


def looked_ahead(
    plans: Iterable[BatchPlan],
    *,
    size_of: Callable[[ChunkKey], int],
    ahead_bytes: int,
    expect: Callable[[list[ChunkKey]], None],
) -> Iterator[BatchPlan]:
    """The plans themselves; before one is given, what it and those after it need is told.

    Args:
        plans: Of batches, in their order.
        size_of: Bytes of a chunk.
        ahead_bytes: How far to look: until the chunks of the plans that are held back have so many bytes.
        expect: Called with these chunks, in the order in which they are needed first, whenever they change.
    """
    waiting: deque[tuple[BatchPlan, list[ChunkKey]]] = deque()
    uses: dict[ChunkKey, int] = {}  # in the order of first use
    size_bytes = 0
    source = iter(plans)
    is_changed = True
    while True:
        while len(waiting) < _MOST_PLANS and (not waiting or size_bytes < ahead_bytes):
            plan = next(source, None)
            if plan is None:
                break
            keys = _chunks_of(plan)
            waiting.append((plan, keys))
            for key in keys:
                if key not in uses:
                    size_bytes += size_of(key)
                    is_changed = True
                uses[key] = uses.get(key, 0) + 1
        if not waiting:
            return
        if is_changed:
            expect(list(uses))
            is_changed = False
        plan, keys = waiting.popleft()
        yield plan
        for key in keys:
            uses[key] -= 1
            if not uses[key]:
                del uses[key]
                size_bytes -= size_of(key)


def _chunks_of(plan: BatchPlan) -> list[ChunkKey]:
    """In the order of first use."""
    return list(dict.fromkeys(zip(plan.sources.tolist(), plan.chunks.tolist(), strict=True)))
