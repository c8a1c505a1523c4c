"""The room that cached chunks of all data sets have on a host: what is there, how many bytes, who goes first.

::

    ROOT/lock                    held for each change of what is there; says who holds it
    ROOT/total                   bytes of all chunks, those being fetched too
    ROOT/fetching/SET-7.lock     chunk 7 is being fetched or checked; says by whom
    ROOT/fetching/SET-7.part     its bytes so far; the file has its full size from the start
    ROOT/fetching/SET-7.failed   it could not be fetched a moment ago; says why
    ROOT/sets/SET/7              chunk 7; read last at its access time, which we set
    ROOT/sets/SET/seals          see :mod:`lightning_dist.data.cache.seals`

Note: the bound. A chunk that is to be fetched gets its room first: others are removed until the sum of all sizes, with
those of all chunks being fetched, is within the limit; if what is being fetched leaves no room, it waits. So chunks
never exceed the limit. What readers have open stays on disk until they close it, and is not counted.

Note: the total. It is written before bytes are added and after they are removed, so that whoever is killed in between
leaves it too large, never too small; it is counted anew when it says that there is no room, and after a boot, as a
power cut may lose what was written last.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning_dist.data.cache.host_lock import HostLock, held
from lightning_dist.data.cache.seals import this_boot
from lightning_dist.errors import DataCacheError

_MOMENT_S = 60.0  # how long anybody may hold the lock; longer is a process that is stopped
_SPARE_SHARE = 64  # up to a 64th of the limit is freed beyond need, so that not every fetch looks at all files
_PART, _LOCK, _FAILED, _SPARE = ".part", ".lock", ".failed", ".spare"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_FULL_BYTES = 8 << 20  # freed at once when the disk is full
_FETCHING = re.compile(r"(?P<stem>.+)\.(?:part|lock|failed|spare)")

_T = TypeVar("_T")


class _File(NamedTuple):
    path: str
    size_bytes: int
    used_ns: int


class Room:
    """Room for chunks in a folder, shared by all processes that use it.

    Args:
        root: The folder; ours alone.
        limit_bytes: Of all chunks together. Processes may have different limits; each makes room within its own.
        evicted: Told how many files were removed to make room.
    """

    def __init__(self, root: Path, *, limit_bytes: int, evicted: Callable[[int], None]) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._evicted = evicted
        self._sets, self._fetching, self._total = root / "sets", root / "fetching", root / "total"
        for folder in (self._sets, self._fetching):
            self.on_disk(functools.partial(folder.mkdir, mode=0o700, exist_ok=True))

    def on_disk(self, action: Callable[[], _T]) -> _T:
        """What ``action`` returns, which writes to the cache; on a full disk, what was used least lately goes first.

        Args:
            action: Can be begun again. It holds no lock when it is called.

        Raises:
            DataCacheError: The disk is full of other things, or refuses for another reason.
        """
        while True:
            try:
                return action()
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._refused(error) from error
                try:
                    made_room = self.evict(_FULL_BYTES)
                except OSError as second:
                    raise self._refused(second) from second
                if not made_room:
                    raise DataCacheError(
                        f"the disk of the cache {self.root} is full ({error.strerror}), and nothing of the cache is "
                        "left to remove: make room there, or name another folder for the cache of training data"
                    ) from error

    def write(self, descriptor: int, data: bytes, start: int) -> None:
        """Write bytes of a part, from byte ``start`` on."""
        rest = memoryview(data)
        while rest:
            count = self.on_disk(functools.partial(os.pwrite, descriptor, rest, start))
            rest, start = rest[count:], start + count

    def progress(self, part: Path | None = None) -> object:
        """Something that changes with each byte that comes for a part; if there is no such part yet, for any."""
        with contextlib.suppress(OSError):
            if part is not None:
                return os.stat(part, follow_symlinks=False).st_mtime_ns
        seen = set()
        for entry in os.scandir(self._fetching):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(_PART):
                    seen.add((entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
        return seen

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of all changes; for a moment only, and never while waiting for another lock."""
        return held(self.root / "lock", wait_s=_MOMENT_S)

    def folder(self, name: str) -> Path:
        """Of a data set's chunks."""
        return self._sets / name

    def part(self, name: str, number: int) -> Path:
        """Where a chunk is written to."""
        return self._fetching / f"{name}-{number}{_PART}"

    def lock(self, name: str, number: int) -> HostLock:
        """Who holds it fetches or checks a chunk; without it, no chunk's part is touched."""
        return HostLock(self._fetching / f"{name}-{number}{_LOCK}")

    def failure(self, name: str, number: int) -> Path:
        """The note of a failed fetch."""
        return self._fetching / f"{name}-{number}{_FAILED}"

    def spare(self, name: str) -> Path:
        """A path for rewriting a file of a data set."""
        return self._fetching / f"{name}-seals{_SPARE}"

    def reserve(self, part: Path, size_bytes: int, *, spared: Collection[str] = ()) -> bool:
        """Make the file of a chunk to be fetched, at its full size; remove what was used least lately for it.

        Args:
            part: See :meth:`part`; its lock is held.
            size_bytes: Of the chunk; at most the limit.
            spared: Files that are not to be removed.

        Returns:
            Whether there was room. If not, others are fetching, or all the rest is spared.
        """
        with self.changing():
            self._drop(part)  # of a process that was killed
            total = self._read_total()
            if total is None or total + size_bytes > self.limit_bytes:
                total = self._make_room(size_bytes, spared)
            if total + size_bytes > self.limit_bytes:
                return False
            self._write_total(total + size_bytes)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(descriptor, size_bytes)
            finally:
                os.close(descriptor)
        return True

    def drop(self, path: Path) -> bool:
        """Remove a chunk or what there is of one; whether there was anything. Its lock is held."""
        if not path.exists():
            return False
        with self.changing():
            return self._drop(path)

    def evict(self, size_bytes: int) -> bool:
        """Remove what was used least lately, at least so many bytes if there are; whether anything was."""
        with self.changing():
            files, _ = self._look()
            files = [file for file in sorted(files, key=_by_use) if file.size_bytes]
            freed = count = 0
            while count < len(files) and freed < size_bytes:
                freed += self._remove(files[count])
                count += 1
            self._count_anew()
        self._evicted(count)
        return count > 0

    def clean(self, *, failures_before_s: float) -> None:
        """Remove what dead processes left: parts, locks, and notes of failures older than a time since 1970."""
        stems = set()
        for entry in os.scandir(self._fetching):
            match = _FETCHING.fullmatch(entry.name)
            if match is None:
                continue
            if not entry.name.endswith(_FAILED):
                stems.add(match["stem"])
                continue
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < failures_before_s:
                    os.unlink(entry.path)
        for stem in stems:
            lock = HostLock(self._fetching / f"{stem}{_LOCK}")
            if lock.try_acquire():
                try:
                    self.drop(self._fetching / f"{stem}{_PART}")
                    with self.changing():  # whoever rewrites holds this lock all the while
                        (self._fetching / f"{stem}{_SPARE}").unlink(missing_ok=True)
                finally:
                    lock.release()

    def _make_room(self, size_bytes: int, spared: Collection[str]) -> int:
        """Remove files until there is room, none if there cannot be; the new total."""
        files, total = self._look()
        goal = self.limit_bytes - size_bytes
        removable = [file for file in sorted(files, key=_by_use) if file.path not in spared]
        count = 0
        if total > goal and total - sum(file.size_bytes for file in removable) <= goal:
            for file in removable:
                if total <= goal and total - file.size_bytes < goal - self.limit_bytes // _SPARE_SHARE:
                    break
                total -= self._remove(file)
                count += 1
        self._write_total(total)
        self._evicted(count)
        return total

    def _look(self) -> tuple[list[_File], int]:
        """All chunks, and the bytes of these and of those being fetched; folders of none are removed."""
        files: list[_File] = []
        for folder in os.scandir(self._sets):
            found = [file for file in _files(folder.path) if os.path.basename(file.path).isdigit()]
            files += found
            if not found:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder.path, "seals"))
                with contextlib.suppress(OSError):
                    os.rmdir(folder.path)
        parts = [file for file in _files(str(self._fetching)) if file.path.endswith(_PART)]
        return files, sum(file.size_bytes for file in files) + sum(file.size_bytes for file in parts)

    def _remove(self, file: _File) -> int:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)  # whoever has it open, or mapped, goes on reading
        return file.size_bytes

    def _drop(self, path: Path) -> bool:
        try:
            size_bytes = os.stat(path, follow_symlinks=False).st_size
            path.unlink()
        except FileNotFoundError:
            return False
        total = self._read_total()
        if total is not None:
            self._write_total(max(0, total - size_bytes))
        return True

    def _refused(self, error: OSError) -> DataCacheError:
        if error.errno in _NO_LOCKS:
            return DataCacheError(
                f"the cache {self.root} is on a file system without locks ({error.strerror}), as some that hosts share "
                "are: name a folder on a disk of this host for the cache of training data"
            )
        return DataCacheError(
            f"the cache {self.root} cannot be written: {error}; name another folder for the cache of training data"
        )

    def _count_anew(self) -> None:
        self._write_total(self._look()[1])

    def _read_total(self) -> int | None:
        try:
            boot, total = self._total.read_text().split()
            return int(total) if boot == this_boot() else None
        except (OSError, ValueError):
            return None

    def _write_total(self, total: int) -> None:
        descriptor = os.open(self._total, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(descriptor, f"{this_boot()} {total:020d}\n".encode(), 0)
        finally:
            os.close(descriptor)


def _files(folder: str) -> list[_File]:
    found = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append(_File(entry.path, status.st_size, status.st_atime_ns))
    return found


def _by_use(file: _File) -> int:
    return file.used_ns
