"""The files of a data set in the cache: which are known to be good, which turn out to be, and how new ones get there.

Note: what a look costs. A file that this process has found good before is looked at with one ``stat``: its size and
the time of its modification are what they were. Another is looked up in the seals. Only a file that nobody has checked
since the machine was started, or that something has written to since, is read whole for its checksum, once for all
processes of the host: half a second a gigabyte. So what a power cut tore or a program changed is found at once; bytes
that a disk loses without a word are found after the next start.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from lightning_dist.data.cache.room import Room
from lightning_dist.data.cache.seals import Seal, Seals, this_boot
from lightning_dist.data.index.dataset_index import Chunk
from lightning_dist.data.reading import Place

_CHECK_BYTES = 1 << 20


class CachedFile(NamedTuple):
    """A file that is good.

    Attributes:
        place: For readers.
        path: Of the file, as text.
        mtime_ns: When it was written, by the file system's clock.
    """

    place: Place
    path: str
    mtime_ns: int

    def touch(self) -> None:
        """It is used now: the access time says so to whoever makes room."""
        with contextlib.suppress(OSError):  # removed meanwhile, or on a disk that is read-only by now
            os.utime(self.path, ns=(time.time_ns(), self.mtime_ns))


class CachedFiles:
    """Files of one data set. Any thread may use it.

    Args:
        room: Where they are.
        name: Of the data set in the cache.
    """

    def __init__(self, room: Room, name: str) -> None:
        self._room = room
        self._folder = room.folder(name)
        self._seals = Seals(self._folder / "seals")
        self._known: dict[int, CachedFile] = {}
        with room.changing():
            self._seals.shorten(room.spare(name))

    def known(self, number: int) -> CachedFile | None:
        """The file of a chunk, if this process has found it good before, and nobody has changed or removed it since."""
        file = self._known.get(number)
        if file is None:
            return None
        try:
            status = os.stat(file.path)
            if status.st_mtime_ns == file.mtime_ns and status.st_size == file.place.size_bytes:
                return file
        except OSError:
            pass
        self._known.pop(number, None)
        return None

    def sealed(self, chunk: Chunk) -> CachedFile | None:
        """The file of a chunk, if any process has found it good since the machine was started."""
        seal = self._seals.get(chunk.number)
        if seal is None or seal.boot != this_boot() or chunk.crc32 not in (None, seal.crc32):
            return None
        path = self._path(chunk)
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError:
            return None
        if status.st_size != chunk.size_bytes or status.st_mtime_ns != seal.mtime_ns:
            return None
        return self._found(chunk, seal.mtime_ns)

    def checked(self, chunk: Chunk) -> CachedFile | None:
        """The file of a chunk, if its bytes are right. The lock of the chunk is held."""
        path, seal = self._path(chunk), self._seals.get(chunk.number)
        right = chunk.crc32 if chunk.crc32 is not None else seal.crc32 if seal is not None else None
        try:
            status = os.stat(path, follow_symlinks=False)
            if right is None or status.st_size != chunk.size_bytes or _crc32(path) != right:
                return None
        except OSError:  # it is not there, or the disk cannot read it
            return None
        with self._room.changing():
            self._seals.append(chunk.number, Seal(right, this_boot(), status.st_mtime_ns))
        return self.sealed(chunk)

    def remove(self, chunk: Chunk) -> bool:
        """Remove the file of a chunk, which is no good; whether there was one. The lock of the chunk is held."""
        return self._room.drop(self._path(chunk))

    def add(self, chunk: Chunk, part: Path, crc32: int) -> CachedFile:
        """A part is whole: it becomes the file of a chunk. The lock of the chunk is held.

        It is not made to reach the disk: after a power cut its checksum tells whether it has.
        """
        with self._room.changing():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            now_ns = time.time_ns()
            os.utime(part, ns=(now_ns, now_ns))
            mtime_ns = os.stat(part, follow_symlinks=False).st_mtime_ns  # as coarse as the file system has it
            self._seals.append(chunk.number, Seal(crc32, this_boot(), mtime_ns))
            os.rename(part, self._path(chunk))
        return self._found(chunk, mtime_ns)

    def _found(self, chunk: Chunk, mtime_ns: int) -> CachedFile:
        path = self._path(chunk)
        file = self._known[chunk.number] = CachedFile(Place(path, 0, chunk.size_bytes), str(path), mtime_ns)
        return file

    def _path(self, chunk: Chunk) -> Path:
        return self._folder / str(chunk.number)


def _crc32(path: Path) -> int:
    crc32 = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb", buffering=0) as file:
        while piece := file.read(_CHECK_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
