"""Chunks from storage in a cache that all processes of a host share: ranks, their workers, several runs.

Whoever asks first for a chunk fetches it, the others wait; :mod:`lightning_dist.data.cache.host_chunks` does that for
one process, :mod:`lightning_dist.data.cache.room` says what is on disk.

Note: forks. A process gets threads and knowledge of its own with its first call, and inherits none. The chunks can be
pickled, too, if the folder and the counter can.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dist.data.cache.host_chunks import Count, HostChunks, uncounted
from lightning_dist.data.cache.local_chunks import LocalChunks
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.reading import Chunks, Place, ReadFolder
from lightning_dist.errors import ConfigError, DataCacheError

_making = threading.Lock()


@dataclass(frozen=True)
class CacheOptions:
    """How data that are not on this host are kept there.

    Attributes:
        folder: On a disk of this host, not on one that hosts share. Made with mode 0700. ``None`` is
            ``$XDG_CACHE_HOME/lightning_dist/data``, by default in ``~/.cache``.
        limit_bytes: Of all chunks in that folder together, those being fetched included.
        ahead_bytes: How much a process fetches before it is asked for; at most half of the limit is used.
        threads: That fetch ahead, in each process; 0 fetches nothing ahead.
        wait_s: How long another process that fetches a chunk may go without a byte, in seconds.
        failure_s: How long a chunk that could not be read is not asked for again, by any process, in seconds.
    """

    folder: Path | None = None
    limit_bytes: int = 64 << 30
    ahead_bytes: int = 256 << 20
    threads: int = 2
    wait_s: float = 300.0
    failure_s: float = 10.0


def open_chunks(
    folder: ReadFolder, index: DatasetIndex, *, options: CacheOptions | None = None, count: Count = uncounted
) -> Chunks:
    """The chunks of a data set on this host: where they are, or through the cache.

    Args:
        folder: Of the data set.
        index: Of the data set.
        options: Of the cache; local data need none.
        count: Told what is read, see :data:`~lightning_dist.data.cache.host_chunks.Count`; also from threads.

    Raises:
        ConfigError: The cache may hold less than the largest chunk.
        DataCacheError: Its folder cannot be used.
    """
    if folder.local_path("") is not None:
        return LocalChunks(folder)
    options = options if options is not None else CacheOptions()
    largest = int(index.sizes.max(initial=0))
    if largest > options.limit_bytes:
        raise ConfigError(
            f"the cache of training data may hold {options.limit_bytes} bytes, and the largest chunk of {folder.url} "
            f"has {largest}: allow at least that, better several times as much, as all processes of a host share it"
        )
    return CachedChunks(folder, index.fingerprint, options, count)


class CachedChunks:
    """Chunks through the cache; see :class:`~lightning_dist.data.reading.Chunks`. Made by :func:`open_chunks`.

    Args:
        folder: Of the data set.
        fingerprint: Of its index: other data have other places in the cache.
        options: Of the cache.
        count: Told what is read.
    """

    def __init__(self, folder: ReadFolder, fingerprint: str, options: CacheOptions, count: Count) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._options = options
        self._count = count
        self._closed = False
        self._here: HostChunks | None = None
        self._this_process()

    def place(self, chunk: Chunk) -> Place:
        """See ``Chunks``.

        Raises:
            UnreadableShardError: It cannot be fetched, or is not what the index says.
            DataCacheError: The cache cannot hold it, or another process does not get on with fetching it.
        """
        return self._this_process().place(chunk)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """See ``Chunks``."""
        self._this_process().expect(chunks)

    def close(self) -> None:
        """See ``Chunks``."""
        self._closed = True
        here = self._here
        if here is not None and here.pid == os.getpid():
            here.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None}

    def _this_process(self) -> HostChunks:
        here = self._here
        if here is None or here.pid != os.getpid():
            with _making:
                here = self._here
                if here is None or here.pid != os.getpid():
                    here = self._here = self._opened()
        if self._closed:
            raise DataCacheError(f"the chunks of {self._folder.url} are closed")
        return here

    def _opened(self) -> HostChunks:
        options = self._options
        return HostChunks(
            self._folder,
            self._fingerprint,
            root=options.folder,
            limit_bytes=options.limit_bytes,
            ahead_bytes=min(options.ahead_bytes, options.limit_bytes // 2),
            num_threads=options.threads,
            wait_s=options.wait_s,
            failure_s=options.failure_s,
            count=self._count,
        )


def _unlock_in_child() -> None:
    """The thread that held it does not exist in a forked child."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)
