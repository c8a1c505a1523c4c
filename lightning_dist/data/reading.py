"""What parts of reading agree on: where bytes of a chunk lie on this host, and how a format makes samples of them.

The calls, in their order, in one process::

    index = format.index(folder)                  # once; a file, or what the files themselves say
    chunk = index.chunk(number)
    opened = open_chunk(chunks, format, chunk, index.properties, decoded)
        place = chunks.place(chunk)               # fetched first if it is not on this host; blocks
        format.open(place, chunk, index.properties, decoded)
    opened.sample(i); opened.sample(j); ...       # any order, any thread
    opened.close()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.errors import DataCacheError

_TRIES = 20


class Place(NamedTuple):
    """Bytes of a chunk on this host.

    Attributes:
        path: A file: the shard itself if it is local, else one in the cache.
        start: First byte of the chunk in that file.
        size_bytes: How many.
    """

    path: Path
    start: int
    size_bytes: int


class ReadFolder(Protocol):
    """A folder of a data set, on disk or at a URL; reading only.

    Attributes:
        url: As it was given, without secrets.
        origin: What tells its files from those of other folders: the URL, and the servers that options name.
    """

    url: str
    origin: str

    def read(self, name: str) -> bytes | None:
        """All of a file; ``None`` if there is none."""

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """A part of a file; a file that ends before is an :class:`~lightning_dist.errors.UnreadableShardError`."""

    def sizes(self) -> dict[str, int]:
        """Names of files, also in folders below -> size in bytes; in the order of names."""

    def local_path(self, name: str) -> Path | None:
        """Where a file lies on this host's disk; ``None`` if it is elsewhere."""


class Chunks(Protocol):
    """Chunks of one data set on this host."""

    def place(self, chunk: Chunk) -> Place:
        """Where it is; fetched first if it is not there. The bytes stay readable once the file is open.

        Raises:
            UnreadableShardError: It cannot be fetched, or is not what the index says.
        """

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """These are needed next, in this order; replaces what was expected before. Does not wait."""

    def close(self) -> None:
        """End threads; leave no lock and no half file. Safe to call twice."""


class OpenChunk(Protocol):
    """A chunk that is read from."""

    def sample(self, index: int) -> Any:
        """Sample ``index`` of the chunk. It does not share memory with the file."""

    def close(self) -> None:
        """No sample is asked for any more. Safe to call twice."""


class Format(Protocol):
    """How files of a data set hold samples.

    Attributes:
        name: Key in the table of formats, and in an index.
    """

    name: str

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """The index of a folder.

        Raises:
            ForeignDataError: The folder holds something else, or a package is missing.
            UnreadableShardError: A file cannot be read.
        """

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenChunk:
        """Open a chunk.

        Args:
            place: Where its bytes are.
            chunk: Which it is.
            properties: Of the index.
            decoded: Has what it decodes, so that all chunks together take no more memory than they may.

        Raises:
            UnreadableShardError: Its bytes are not in this format.
        """


def open_chunk(
    chunks: Chunks,
    format: Format,  # noqa: A002 - its name everywhere
    chunk: Chunk,
    properties: Mapping[str, Any],
    decoded: Decoded,
) -> OpenChunk:
    """Place a chunk and open it; again, if another process removed it from the cache in between.

    Raises:
        UnreadableShardError: It cannot be fetched, or its bytes are not in this format.
        DataCacheError: The cache cannot hold it, or not long enough to open it.
    """
    for _ in range(_TRIES):
        place = chunks.place(chunk)
        try:
            return format.open(place, chunk, properties, decoded)
        except Exception:
            if place.path.exists():
                raise
    raise DataCacheError(
        f"chunk {chunk.number} ({chunk.shard}) was removed from the cache {_TRIES} times before it could be opened: "
        "the processes of this host need more than the cache may hold; allow it more"
    )
