"""One file in memory: a ``memfd``, which has no name that a crash could leave behind.

The kernel takes its memory back when the last process that has it open ends. So one that a rank has filled and handed
over outlives the rank, without a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

_GRAIN_BYTES = 64 << 10


class KeptFile:
    """A file that is being written, or whole.

    Args:
        descriptor: Of memory that somebody has filled; it is closed with the file. ``None``: there is none yet.

    Attributes:
        size_bytes: What is in it.
        room_bytes: Memory that it takes.
        readers: How many have it open.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._fd = os.memfd_create("hierdist-kept", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self.size_bytes = 0
        self.room_bytes = os.fstat(self._fd).st_size
        self.readers = 0

    @property
    def descriptor(self) -> int:
        """Of its memory."""
        return self._fd

    @property
    def is_mapped(self) -> bool:
        """Whether it has been filled in place, and can be once more."""
        return self._map is not None

    def append(self, data: memoryview) -> None:
        """Write more at its end."""
        while data:
            count = os.write(self._fd, data)
            self.size_bytes += count
            self.room_bytes = self.size_bytes
            data = data[count:]

    @contextlib.contextmanager
    def room(self, size_bytes: int) -> Iterator[memoryview]:
        """Inside, so much of its memory, to be filled; what was there before is there until then.

        Memory that has been filled once is not asked of the kernel again, which takes longer than filling it.
        """
        needed_bytes = room_for(size_bytes)
        if self._map is None or needed_bytes > len(self._map):
            self._unmap()
            os.ftruncate(self._fd, needed_bytes)
            self._map = mmap.mmap(self._fd, needed_bytes)
            self.room_bytes = needed_bytes
        with memoryview(self._map) as whole, whole[:size_bytes] as part:
            yield part

    def duplicate(self) -> int:
        """A descriptor of the same memory, which stays when the file is dropped; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Give the memory back, once nobody else has it open."""
        self._unmap()
        os.close(self._fd)

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def room_for(size_bytes: int) -> int:
    """What a file of a size takes if it is filled in place: a little more, so that the next may be a little larger."""
    return -(-max(1, size_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
