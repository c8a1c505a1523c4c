"""Chunks in the cache of a host, as one process sees them: found, waited for, or fetched.

Note: evicted before it is open. A place is a path, and another process may remove the file before it is opened: it is
the one used last, but only until others are. That shows as a missing file, and
:func:`~lightning_dist.data.reading.open_chunk` then places it again. What this process has placed last is not removed
in order to fetch ahead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from pathlib import Path

from lightning_dist.data.cache.cached_files import CachedFile, CachedFiles
from lightning_dist.data.cache.failures import note_failure, raise_recent
from lightning_dist.data.cache.fetching import FetchAhead
from lightning_dist.data.cache.host_lock import HostLock
from lightning_dist.data.cache.private_folder import default_folder, private_folder
from lightning_dist.data.cache.room import Room
from lightning_dist.data.index.dataset_index import Chunk
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.data.storage.shards import with_sleep
from lightning_dist.errors import DataCacheError, UnreadableShardError

Count = Callable[[str, float], None]
"""Told the name of a counter and what is to be added to it; ``EventStream.count`` is one.

``data.shared_bytes``
    Bytes read from storage.
``data.cache_bytes``
    Bytes of chunks placed that this process did not fetch for that.
``data.fetch_s``
    Seconds spent fetching, in all threads.
``data.waits``, ``data.wait_s``
    Chunks that another process was fetching when they were asked for, and seconds waited for it.
``data.evictions``
    Files removed to make room.
``data.refetches``
    Cached files that were torn or changed, and are fetched again.
"""

_PIECE_BYTES = 8 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_CLOSE_S = 30.0  # for a request that is on its way; what waits to try again ends at once
_EXIT_S = 3.0  # the same, when the process ends
_SPARED = 4


def uncounted(name: str, value: float) -> None:
    """A :data:`Count` that forgets."""


class HostChunks:
    """One process's view of a data set's chunks in the cache. Any thread may use it.

    Args:
        folder: Of the data set.
        fingerprint: Of its index.
        root: Of the cache; ``None`` is the user's own.
        limit_bytes: Of all chunks in it.
        ahead_bytes: How much is fetched and not yet asked for.
        num_threads: That fetch ahead.
        wait_s: How long another process may fetch without getting a byte, in seconds.
        failure_s: How long a failure is remembered, in seconds.
        count: Told what is read.

    Raises:
        DataCacheError: The cache's folder cannot be used.
    """

    def __init__(
        self,
        folder: ReadFolder,
        fingerprint: str,
        *,
        root: Path | None,
        limit_bytes: int,
        ahead_bytes: int,
        num_threads: int,
        wait_s: float,
        failure_s: float,
        count: Count,
    ) -> None:
        self.pid = os.getpid()
        self._folder = with_sleep(folder, self._sleep)
        self._wait_s, self._failure_s, self._count = wait_s, failure_s, count
        self._set = f"{hashlib.blake2b(folder.origin.encode(), digest_size=8).hexdigest()}-{fingerprint}"
        self._closing = threading.Event()
        self._released = threading.Condition()
        self._unasked: set[int] = set()  # fetched ahead by this process
        self._placed: deque[str] = deque(maxlen=_SPARED)
        root = private_folder(root if root is not None else default_folder())
        self._room = Room(root, limit_bytes=limit_bytes, evicted=self._count_evicted)
        self._clean()
        self._files = self._room.on_disk(lambda: CachedFiles(self._room, self._set))
        self._ahead = FetchAhead(self._fetch_ahead, num_threads=num_threads, ahead_bytes=ahead_bytes)
        # Also at the end of a process that forgets to; it runs before threads are cut off.
        self._at_exit = util.Finalize(None, self._end, args=(_EXIT_S,), exitpriority=1)

    def place(self, chunk: Chunk) -> Place:
        """See :class:`~lightning_dist.data.reading.Chunks`."""
        self._ahead.asked(chunk)
        file, fetched = self._files.known(chunk.number), False
        if file is None:
            file, fetched = self._obtained(chunk)
        file.touch()
        self._placed.append(file.path)
        if chunk.number in self._unasked:
            self._unasked.discard(chunk.number)
        elif not fetched:
            self._count("data.cache_bytes", chunk.size_bytes)
        return file.place

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """See :class:`~lightning_dist.data.reading.Chunks`."""
        self._ahead.expect(chunks)

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.Chunks`.

        Raises:
            DataCacheError: A request to storage has not ended.
        """
        left = self._end(_CLOSE_S)
        self._at_exit.cancel()
        if left:
            raise DataCacheError(
                f"a request to {self._folder.url} has not ended {_CLOSE_S:g} s after its data were closed: set a "
                "timeout in the storage options"
            )

    def _end(self, wait_s: float) -> list[str]:
        self._closing.set()
        self._tell_waiting()
        return self._ahead.close(wait_s=wait_s)

    def _fetch_ahead(self, chunk: Chunk) -> None:
        """In a thread: what goes wrong goes wrong again, and is told, when the chunk is asked for."""
        with contextlib.suppress(Exception):
            file = self._files.known(chunk.number) or self._files.sealed(chunk)
            if file is None:
                lock = self._room.lock(self._set, chunk.number)
                if not lock.try_acquire():
                    return  # another process has taken it on
                with self._releasing(lock):
                    file, _ = self._locked(chunk, is_asked=False)
            file.touch()

    def _obtained(self, chunk: Chunk) -> tuple[CachedFile, bool]:
        """The file of a chunk that is asked for, and whether it was fetched for that."""
        file = self._files.sealed(chunk)
        if file is not None:
            return file, False
        lock = self._room.lock(self._set, chunk.number)
        self._acquire(lock, chunk)
        with self._releasing(lock), self._ahead.urgent():
            return self._locked(chunk, is_asked=True)

    def _locked(self, chunk: Chunk, *, is_asked: bool) -> tuple[CachedFile, bool]:
        """The same, when this thread is the one that may fetch it."""
        file = self._room.on_disk(lambda: self._files.sealed(chunk) or self._files.checked(chunk))
        if file is not None:
            return file, False
        if self._room.on_disk(lambda: self._files.remove(chunk)):
            self._count("data.refetches", 1)
        failure = self._room.failure(self._set, chunk.number)
        raise_recent(failure, within_s=self._failure_s)
        part = self._room.part(self._set, chunk.number)
        self._reserve(chunk, part, is_asked=is_asked)
        try:
            if not is_asked:
                self._unasked.add(chunk.number)  # before others can see the file, and ask for it
            file = self._fetched(chunk, part)
        except BaseException as error:
            self._unasked.discard(chunk.number)
            if isinstance(error, UnreadableShardError):
                note_failure(failure, error)
            raise
        finally:
            self._room.on_disk(lambda: self._room.drop(part))  # it is not there any more if all went well
        failure.unlink(missing_ok=True)
        return file, True

    def _fetched(self, chunk: Chunk, part: Path) -> CachedFile:
        start_s = time.monotonic()
        try:
            crc32 = self._download(chunk, part)
            if chunk.crc32 not in (None, crc32):
                crc32 = self._download(chunk, part)  # storage or the network may have erred once
        finally:
            self._count("data.fetch_s", time.monotonic() - start_s)
        if chunk.crc32 is not None and chunk.crc32 != crc32:
            raise UnreadableShardError(
                f"{self._named(chunk)} has the checksum {crc32:08x}, and the index says {chunk.crc32:08x}: it is "
                "damaged, or the index is of other files"
            )
        return self._room.on_disk(lambda: self._files.add(chunk, part, crc32))

    def _download(self, chunk: Chunk, part: Path) -> int:
        """Write the bytes of a chunk, piece by piece; their checksum."""
        crc32 = done = 0
        descriptor = self._room.on_disk(lambda: os.open(part, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            while done < chunk.size_bytes:
                if self._closing.is_set():
                    self._sleep(0)
                data = self._folder.read_range(
                    chunk.shard, chunk.start + done, min(_PIECE_BYTES, chunk.size_bytes - done)
                )
                self._count("data.shared_bytes", len(data))
                crc32 = zlib.crc32(data, crc32)
                self._room.write(descriptor, data, done)
                done += len(data)
        finally:
            os.close(descriptor)
        return crc32

    def _reserve(self, chunk: Chunk, part: Path, *, is_asked: bool) -> None:
        """Get room for a chunk; if it is asked for, wait while what others fetch fills the cache."""
        spared = () if is_asked else tuple(self._placed)
        patience = _Patience(self._wait_s)
        while not self._room.on_disk(lambda: self._room.reserve(part, chunk.size_bytes, spared=spared)):
            if not is_asked:
                raise DataCacheError("there is no room to fetch ahead")
            self._clean()
            if patience.is_over(self._room.progress()):
                raise DataCacheError(
                    f"there is no room for {self._named(chunk)}: other processes are fetching what fills the "
                    f"{self._room.limit_bytes} bytes that the cache {self._room.root} may hold, and have got no byte "
                    f"for {self._wait_s:g} s; allow it more"
                )
            self._pause(patience.pause_s())

    def _acquire(self, lock: HostLock, chunk: Chunk) -> None:
        """Get the lock of a chunk that is asked for, as soon as whoever has it lets go or is dead."""
        patience, start_s, others = _Patience(self._wait_s), time.monotonic(), False
        part = self._room.part(self._set, chunk.number)
        while not self._room.on_disk(lock.try_acquire):
            holder = lock.holder()
            others = others or (holder is not None and holder.pid != self.pid)
            if patience.is_over((holder, self._room.progress(part))):
                raise DataCacheError(
                    f"{self._named(chunk)} is being fetched by {holder or 'an unknown process'}, and no byte has come "
                    f"for {self._wait_s:g} s; is it stopped? End it, and others go on"
                )
            self._pause(patience.pause_s())
        if others:
            self._count("data.waits", 1)
            self._count("data.wait_s", time.monotonic() - start_s)

    def _clean(self) -> None:
        self._room.on_disk(lambda: self._room.clean(failures_before_s=time.time() - self._failure_s))

    @contextlib.contextmanager
    def _releasing(self, lock: HostLock) -> Iterator[None]:
        try:
            yield
        finally:
            lock.release()
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        with self._released:
            self._released.notify_all()

    def _pause(self, pause_s: float) -> None:
        """Wait for another thread to be done, or so long: other processes do not tell."""
        with self._released:
            self._released.wait(pause_s)
        if self._closing.is_set():
            self._sleep(0)

    def _sleep(self, wait_s: float) -> None:
        """Wait, also between two tries of the folder's; ends when the chunks are closed."""
        if self._closing.wait(wait_s):
            raise DataCacheError(f"the chunks of {self._folder.url} are closed")

    def _named(self, chunk: Chunk) -> str:
        end = chunk.start + chunk.size_bytes
        return f"chunk {chunk.number} of {self._folder.url} (bytes {chunk.start} to {end} of {chunk.shard})"

    def _count_evicted(self, num_files: int) -> None:
        if num_files:
            self._count("data.evictions", num_files)


class _Patience:
    """Waiting for others as long as they get on."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._seen: object = None
        self._end = time.monotonic() + wait_s
        self._pause_s = _FIRST_PAUSE_S

    def is_over(self, seen: object) -> bool:
        """Whether nothing has changed for too long."""
        if seen != self._seen:
            self._seen, self._end = seen, time.monotonic() + self._wait_s
        return time.monotonic() > self._end

    def pause_s(self) -> float:
        """How long to wait before the next look, in seconds: each time longer."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s
