"""A value in shared memory that one process writes and others read, without a lock.

Note: two slots and a checksum.
    The writer fills the slot that does not hold the newest value, under the next number. A reader takes the slot with
    the higher number whose checksum holds. So no reader waits for a writer, a writer that is killed or stopped in the
    middle of it leaves the value before, and nothing rests on the order in which another core sees what was written.
    A reader that was overtaken by two writes finds neither slot whole, or only a value that is older than one it has
    seen, and looks again.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Any

_HEAD = struct.Struct("<Q")  # number of the value, from 1
_TAIL = struct.Struct("<I")  # checksum
_LOOKS = 1000


class Record:
    """One value, made of fields of fixed size. One thread at a time writes it.

    Args:
        memory: Where it lies.
        offset: Its first byte; zeros there mean that nothing was written yet.
        fields: As of :mod:`struct`, without a byte order.
    """

    def __init__(self, memory: mmap.mmap, offset: int, fields: struct.Struct) -> None:
        self._memory = memory
        self._fields = fields
        self._size = fields.size + _HEAD.size
        slot_size = slot_bytes(fields)
        self._offsets = (offset, offset + slot_size)
        self._number: int | None = None
        self._seen = 0

    def write(self, *values: Any) -> None:
        """Replace the value."""
        if self._number is None:  # a process before this one may have written here
            self._number = max((number for number, _ in self._whole()), default=0)
        self._number += 1
        packed = _HEAD.pack(self._number) + self._fields.pack(*values)
        start = self._offsets[self._number % 2]
        self._memory[start : start + self._size + _TAIL.size] = packed + _TAIL.pack(zlib.crc32(packed))

    def read(self) -> tuple[Any, ...] | None:
        """The newest value; ``None``: nothing was written, or it changes faster than it can be read."""
        for _ in range(_LOOKS):
            whole = self._whole()
            if whole and max(whole)[0] >= self._seen:
                self._seen, packed = max(whole)
                return self._fields.unpack_from(packed, _HEAD.size)
            if not any(self._number_in(start) for start in self._offsets):
                return None
        return None

    def _whole(self) -> list[tuple[int, bytes]]:
        found = []
        for start in self._offsets:
            packed = self._memory[start : start + self._size]
            (checksum,) = _TAIL.unpack_from(self._memory, start + self._size)
            (number,) = _HEAD.unpack_from(packed)
            if number and zlib.crc32(packed) == checksum:
                found.append((number, packed))
        return found

    def _number_in(self, start: int) -> int:
        number: int = _HEAD.unpack_from(self._memory, start)[0]
        return number


def slot_bytes(fields: struct.Struct) -> int:
    """Of one of the two slots, so that the next begins on a cache line."""
    return -(-(_HEAD.size + fields.size + _TAIL.size) // 64) * 64
