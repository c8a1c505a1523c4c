"""The head that shards of MosaicML Streaming and of LitData share: the number of samples, and where each begins."""

from __future__ import annotations

import numpy as np

from lightning_dist.data.index import Chunk, Numbers
from lightning_dist.data.placed_bytes import describe
from lightning_dist.errors import UnreadableShardError


def sample_bounds(data: memoryview, chunk: Chunk) -> Numbers:
    """(samples + 1,) where samples begin, and where the last one ends.

    Args:
        data: The shard.
        chunk: Which it is.

    Raises:
        UnreadableShardError: They are not those of the index, or do not lie in the shard.
    """
    count, head = chunk.num_samples, 4 * (chunk.num_samples + 2)
    found = int(np.frombuffer(data, "<u4", 1)[0]) if len(data) >= 4 else None
    if found != count:
        raise UnreadableShardError(
            f"{describe(chunk)} has {found} samples, and {count} by the index: it is another file"
        )
    if len(data) < head:
        raise UnreadableShardError(f"{describe(chunk)} was cut off in its list of samples")
    bounds = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
    if bounds[0] < head or bounds[-1] > len(data) or (np.diff(bounds) < 0).any():
        raise UnreadableShardError(
            f"{describe(chunk)} has samples from byte {bounds[0]} to {bounds[-1]} of {len(data)}: it was cut off, or "
            "is damaged"
        )
    return bounds
