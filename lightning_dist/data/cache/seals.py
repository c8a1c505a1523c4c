"""What is known of cached files: their checksum, and whether they are as they were when it was checked.

One file of lines a data set, appended to; the last line of a chunk counts. A file is known to be good if its line is
of this boot of the machine and names the time of its last modification: then nothing has written to it since, and no
power cut came between. Lines of earlier boots give the checksum to check by, for indexes that have none. A line that is
torn or wrong makes a file suspect, never good, as the time would have to be the same.

Whoever appends or rewrites holds the lock of the cache; anybody reads.
"""

from __future__ import annotations

import functools
import os
import threading
import uuid
from pathlib import Path
from typing import NamedTuple

_LINES_TO_SPARE = 20_000  # a megabyte


class Seal(NamedTuple):
    """What was found when a file was written or checked.

    Attributes:
        crc32: Of its bytes.
        boot: In which boot of the machine, see :func:`this_boot`.
        mtime_ns: Last modification, by the file system's clock.
    """

    crc32: int
    boot: str
    mtime_ns: int


@functools.cache
def this_boot() -> str:
    """A word for this boot of the machine; where it cannot be known, for this process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return uuid.uuid4().hex


class Seals:
    """The seals of a data set's cached chunks. Any thread may use it.

    Args:
        path: Of the file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()
        self._seals: dict[int, Seal] = {}
        self._num_lines = 0
        self._inode = self._position = 0

    def get(self, number: int) -> Seal | None:
        """The seal of a chunk, also one that another process has just written."""
        with self._guard:
            self._read_on()
            return self._seals.get(number)

    def append(self, number: int, seal: Seal) -> None:
        """Add one."""
        with self._guard, open(self._path, "ab", buffering=0) as file:
            file.write(_line(number, seal))

    def shorten(self, spare: Path) -> None:
        """Write the file anew if most of its lines count no more.

        Args:
            spare: A path to write to first, on the same disk.
        """
        with self._guard:
            self._read_on()
            if self._num_lines <= 2 * len(self._seals) + _LINES_TO_SPARE:
                return
            spare.write_bytes(b"".join(_line(number, seal) for number, seal in self._seals.items()))
            spare.replace(self._path)

    def _read_on(self) -> None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._forget(0)
            return
        if status.st_ino != self._inode or status.st_size < self._position:
            self._forget(status.st_ino)
        if status.st_size == self._position:
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            whole, _, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._num_lines += 1
            try:
                number, crc32, boot, mtime_ns = line.split()
                self._seals[int(number)] = Seal(int(crc32, 16), boot.decode("ascii"), int(mtime_ns))
            except ValueError:  # torn by a power cut
                continue

    def _forget(self, inode: int) -> None:
        self._seals.clear()
        self._num_lines = self._position = 0
        self._inode = inode


def _line(number: int, seal: Seal) -> bytes:
    return f"{number} {seal.crc32:08x} {seal.boot} {seal.mtime_ns}\n".encode()
