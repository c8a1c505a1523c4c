"""The bytes of one rank's file: chunk after chunk, aligned, with checksums taken on the way to the disk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_dist.checkpoint.crc import combined

#: Chunks begin at multiples of this, so that they can be used where they lie in a mapped file.
ALIGNMENT_BYTES = 64
_ZEROS = bytes(ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Source:
    """Bytes to come.

    Attributes:
        size_bytes: How many.
        read: Gives them; called when they are about to be written, and again if the file is.
    """

    size_bytes: int
    read: Callable[[], memoryview]


class ShardStream:
    """A file's bytes, to be iterated by what writes them.

    The checksum of each buffer is taken just before it is written. That of the whole file is computed from those of
    its parts.

    Attributes:
        starts: First byte of each source.
        crcs: CRC-32 of each source that has been iterated.
        crc32: Of all bytes that have been iterated.
        size_bytes: Of the file.

    Args:
        sources: In the order of the file.
        written: Called with the size of each source when the one after it is asked for; also of another try.
    """

    def __init__(self, sources: Sequence[Source], *, written: Callable[[int], None] = lambda size_bytes: None) -> None:
        self._sources = sources
        self._written = written
        self.starts, self.size_bytes = starts_of([source.size_bytes for source in sources])
        self.crcs: list[int] = []
        self.crc32 = 0

    def __iter__(self) -> Iterator[memoryview | bytes]:
        self.crcs, self.crc32 = [], 0
        end = 0
        for source, start in zip(self._sources, self.starts, strict=True):
            padding = _ZEROS[: start - end]
            if padding:
                self.crc32 = zlib.crc32(padding, self.crc32)
                yield padding
            data = source.read()
            if len(data) != source.size_bytes:
                raise ValueError(f"{source.size_bytes} bytes were announced, {len(data)} came")
            crc = zlib.crc32(data)
            self.crcs.append(crc)
            self.crc32 = combined(self.crc32, crc, len(data))
            yield data
            self._written(len(data))
            end = start + source.size_bytes


def starts_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where chunks of these sizes begin in a file, and its size, all in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end + -end % ALIGNMENT_BYTES if size else end)
        end = starts[-1] + size
    return starts, end
