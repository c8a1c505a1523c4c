"""The bytes of a chunk, mapped into memory."""

from __future__ import annotations

import mmap
import os

from lightning_dist.data.index.dataset_index import Chunk
from lightning_dist.data.reading import Place
from lightning_dist.errors import UnreadableShardError


def map_place(place: Place, chunk: Chunk) -> memoryview:
    """The bytes of a chunk; the mapping ends with the last view of it, whatever becomes of the file's name.

    Raises:
        UnreadableShardError: The file is not there, or ends before the chunk does.
    """
    if place.size_bytes == 0:
        return memoryview(b"")
    try:
        with open(place.path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            # Touching mapped bytes behind the end of a file kills the process.
            if found < place.start + place.size_bytes:
                raise UnreadableShardError(
                    f"{describe(chunk)} ends at byte {found} of {place.path}, "
                    f"{place.start + place.size_bytes} were expected: it was cut off, or is another file"
                )
            offset = place.start - place.start % mmap.ALLOCATIONGRANULARITY
            length = place.start + place.size_bytes - offset
            mapped = mmap.mmap(file.fileno(), length, offset=offset, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UnreadableShardError(f"{describe(chunk)} cannot be read from {place.path}: {error}") from error
    return memoryview(mapped)[place.start - offset :]


def describe(chunk: Chunk) -> str:
    """A chunk, for messages."""
    return f"chunk {chunk.number} ({chunk.shard}, bytes {chunk.start} to {chunk.start + chunk.size_bytes})"
