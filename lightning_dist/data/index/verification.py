"""Whether the bytes of a data set are those that its index was made of."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.survey import Progress
from lightning_dist.data.placed_bytes import describe
from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import DataError

_BLOCK_BYTES = 8 << 20


class Damage(NamedTuple):
    """A chunk that is not what the index says.

    Attributes:
        chunk: Which.
        reason: What was found.
    """

    chunk: Chunk
    reason: str


def verify(
    folder: ReadFolder, index: DatasetIndex, *, workers: int = 1, progress: Progress | None = None
) -> Iterator[Damage]:
    """Read all chunks and compare checksums; without checksums, only see whether the bytes are all there.

    Args:
        folder: Of the data set.
        index: Of it.
        workers: Chunks at a time.
        progress: Told how many bytes more are done; called from several threads.
    """

    def one(number: int) -> Damage | None:
        chunk = index.chunk(number)
        try:
            found = _crc32(folder, chunk)
        except DataError as error:
            return Damage(chunk, str(error))
        finally:
            if progress is not None:
                progress(chunk.size_bytes)
        if chunk.crc32 is None or found == chunk.crc32:
            return None
        return Damage(chunk, f"{describe(chunk)} has the checksum {found:08x}, not {chunk.crc32:08x}")

    executor = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="hierdist-verify")
    try:
        yield from (damage for damage in executor.map(one, range(index.num_chunks)) if damage is not None)
    finally:
        executor.shutdown(cancel_futures=True)


def _crc32(folder: ReadFolder, chunk: Chunk) -> int:
    crc, at, stop = 0, chunk.start, chunk.start + chunk.size_bytes
    while at < stop:
        block = folder.read_range(chunk.shard, at, min(_BLOCK_BYTES, stop - at))
        crc = zlib.crc32(block, crc)
        at += len(block)
    return crc
