"""One pass over shards whose format does not say how many samples they hold.

Shards are read side by side by threads, each from front to back, in blocks: what is in memory does not grow with a
shard. Checksums of what is read come along.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import place_of
from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import ForeignDataError, UnreadableShardError

_BLOCK_BYTES = 4 << 20


class Piece(NamedTuple):
    """A chunk, before it has a number.

    Attributes:
        start: First byte in the shard.
        size_bytes: How many.
        samples: In it.
        crc32: Of its bytes.
    """

    start: int
    size_bytes: int
    samples: int
    crc32: int | None


class ShardStream(io.RawIOBase):
    """A shard from front to back; counts and sums what was read.

    Args:
        folder: Where it is.
        name: Of the file.
        size_bytes: How much of it.
        start: First byte.
    """

    def __init__(self, folder: ReadFolder, name: str, size_bytes: int, *, start: int = 0) -> None:
        self._folder = folder
        self._name = name
        self._next = start
        self._end = start + size_bytes
        self._block = memoryview(b"")
        self.crc32 = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill from the next bytes; 0 at the end."""
        if not self._block:
            count = min(_BLOCK_BYTES, self._end - self._next)
            if count == 0:
                return 0
            self._block = memoryview(self._folder.read_range(self._name, self._next, count))
            self._next += count
            self.crc32 = zlib.crc32(self._block, self.crc32)
        count = min(len(target), len(self._block))
        target[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def drain(self) -> None:
        """Read to the end, for the checksum."""
        rest = bytearray(_BLOCK_BYTES)
        while self.readinto(rest):
            pass


Progress = Callable[[int], None]
"""Told how many bytes more are done; called from several threads."""


def names_ending(folder: ReadFolder, endings: Sequence[str], format_name: str) -> dict[str, int]:
    """Files of a folder by their ending -> size; hidden files are not data.

    Raises:
        ForeignDataError: There are none.
    """
    found = {
        name: size
        for name, size in folder.sizes().items()
        if name.lower().endswith(tuple(endings)) and not any(part.startswith(".") for part in name.split("/"))
    }
    if not found:
        raise ForeignDataError(
            f"{folder.url} has no files of the format {format_name}; their names would end in {', '.join(endings)}"
        )
    return found


def survey(
    folder: ReadFolder,
    names: Mapping[str, int],
    look: Callable[[ReadFolder, str, int], Iterable[Piece]],
    *,
    workers: int,
    progress: Progress | None = None,
) -> dict[str, list[Piece]]:
    """Look at all shards.

    Args:
        folder: Where they are.
        names: Of the shards -> size.
        look: Gives the chunks of one shard; called in threads.
        workers: How many shards at a time.
        progress: Told when a shard is done.

    Raises:
        UnreadableShardError: Of the first shard, in the order of names, that could not be read.
    """

    def one(name: str) -> list[Piece]:
        pieces = list(look(folder, name, names[name]))
        if progress is not None:
            progress(names[name])
        return pieces

    executor = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="hierdist-survey")
    try:
        return dict(zip(names, executor.map(one, names), strict=True))
    finally:
        executor.shutdown(cancel_futures=True)


def index_of(
    format_name: str, pieces: Mapping[str, Sequence[Piece]], properties: Mapping[str, Any] | None = None
) -> DatasetIndex:
    """An index made of the chunks of shards; chunks without samples are left out, the shards' names are not."""
    shard_of, kept = [], []
    for number, of_shard in enumerate(pieces.values()):
        with_samples = [piece for piece in of_shard if piece.samples]
        kept += with_samples
        shard_of += [number] * len(with_samples)
    table = np.asarray([(p.start, p.size_bytes, p.samples) for p in kept], dtype=np.int64).reshape(-1, 3)
    sums = [piece.crc32 for piece in kept]
    return DatasetIndex(
        format=format_name,
        shards=tuple(pieces),
        shard_of=np.asarray(shard_of, dtype=np.int64),
        starts=table[:, 0].copy(),
        sizes=table[:, 1].copy(),
        samples=table[:, 2].copy(),
        crc32=None if None in sums else np.asarray(sums, dtype=np.int64),
        properties=dict(properties or {}),
    )


def damaged(folder: ReadFolder, name: str, error: object) -> UnreadableShardError:
    """A shard that is not in its format."""
    return UnreadableShardError(f"{place_of(folder, name)} cannot be read: {error}")
