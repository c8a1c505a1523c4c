"""What shards of MosaicML Streaming and of LitData share: a head with the number of samples, and where each begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_dist.data.decoded import Decoded, Sized
from lightning_dist.data.formats.compression import decompressed
from lightning_dist.data.index.dataset_index import Chunk, Numbers
from lightning_dist.data.placed_bytes import describe
from lightning_dist.errors import UnreadableShardError


class BoundedShard:
    """Bytes of each sample of a shard.

    Args:
        data: All of it, as it is stored.
        kind: How it is compressed; see :func:`~lightning_dist.data.formats.compression.decompressed`.
        chunk: Which it is.
        decoded: Has it decompressed, and where samples begin.

    Raises:
        UnreadableShardError: It is damaged, or another one than the index says.
    """

    def __init__(self, data: memoryview, kind: str | None, chunk: Chunk, decoded: Decoded) -> None:
        self._data = data
        self._kind = kind
        self._chunk = chunk
        self._parts = decoded.of_chunk()
        self._parts.get(0, self._decode)

    def sample(self, index: int) -> memoryview:
        """Bytes of a sample."""
        found = self._parts.get(0, self._decode)
        return found.data[found.bounds[index] : found.bounds[index + 1]]

    def close(self) -> None:
        """None is asked for any more. Safe to call twice."""
        self._parts.drop()
        self._data = memoryview(b"")

    def _decode(self) -> Sized[_Bounded]:
        data = decompressed(self._data, self._kind, describe(self._chunk))
        bounds = sample_bounds(data, self._chunk)
        return Sized(_Bounded(data, bounds), bounds.nbytes + (data.nbytes if self._kind is not None else 0))


class _Bounded(NamedTuple):
    data: memoryview
    bounds: Numbers


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
