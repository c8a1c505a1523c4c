"""Chunks of data that are on this host's disk already: where they lie, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lightning_dist.data.index.dataset_index import Chunk
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import UnreadableShardError


class LocalChunks:
    """Chunks of a local folder; see :class:`~lightning_dist.data.reading.Chunks`.

    Args:
        folder: Of the data set.
    """

    def __init__(self, folder: ReadFolder) -> None:
        self._folder = folder

    def place(self, chunk: Chunk) -> Place:
        """See ``Chunks``: the shard itself. Its size is looked at, its checksum is not."""
        path = self._folder.local_path(chunk.shard)
        if path is None:
            raise UnreadableShardError(f"{self._folder.url} is not on this host: open it with a cache")
        try:
            size_bytes = os.stat(path).st_size
        except OSError as error:
            raise UnreadableShardError(f"{path} cannot be read: {error.strerror}") from error
        if size_bytes < chunk.start + chunk.size_bytes:
            raise UnreadableShardError(
                f"{path} has {size_bytes} bytes, and the index says that a chunk reaches to byte "
                f"{chunk.start + chunk.size_bytes}; it is cut short, or the index is of other files"
            )
        return Place(path, chunk.start, chunk.size_bytes)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """See ``Chunks``: nothing to do."""

    def close(self) -> None:
        """See ``Chunks``: nothing to do."""
