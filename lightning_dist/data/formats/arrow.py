"""Arrow IPC files and streams, by pyarrow; ``datasets`` of Hugging Face saves such. A file is a chunk, a row a sample.

What was written without compression is not copied: columns are where the file is mapped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from lightning_dist.data.decoded import Decoded, Sized
from lightning_dist.data.formats.columns import Rows, pyarrow
from lightning_dist.data.formats.parquet import SeekableShard, check_columns
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex, Numbers
from lightning_dist.data.index.index_file import read_index
from lightning_dist.data.index.survey import Piece, Progress, ShardStream, damaged, index_of, names_ending, survey
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import UnreadableShardError

ENDINGS = (".arrow", ".feather", ".ipc")
_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class ArrowFormat:
    """Arrow IPC files and streams.

    Args:
        columns: To read; ``None``: all.
    """

    name = "arrow"

    columns: tuple[str, ...] | None = None

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        pyarrow("reading Arrow")
        return read_index(folder, format_name=self.name)

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index, by one pass over all bytes."""
        pyarrow("reading Arrow")
        names = names_ending(folder, ENDINGS, self.name)
        return index_of(self.name, survey(folder, names, _look, workers=workers, progress=progress))

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenArrow:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return OpenArrow(map_place(place, chunk), chunk, self.columns, decoded)


class OpenArrow:
    """Rows of a file.

    Args:
        data: All of it.
        chunk: Which it is.
        columns: To read; ``None``: all.
        decoded: Has its record batches, where they are compressed.
    """

    def __init__(self, data: memoryview, chunk: Chunk, columns: tuple[str, ...] | None, decoded: Decoded) -> None:
        self._data = data
        self._chunk = chunk
        self._columns = columns
        self._parts = decoded.of_chunk()
        self._parts.get(0, self._decode)

    def sample(self, index: int) -> dict[str, Any]:
        """Row ``index``, by column."""
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        batches, ends = self._parts.get(0, self._decode)
        batch = int(np.searchsorted(ends, index, side="right"))
        return batches[batch].row(index - (int(ends[batch - 1]) if batch else 0))

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._parts.drop()
        self._data = memoryview(b"")

    def _decode(self) -> Sized[_Batches]:
        arrow, chunk = pyarrow("reading Arrow"), self._chunk
        try:
            mapped = arrow.py_buffer(self._data)
            is_file = bytes(self._data[:6]) == _FILE_MAGIC
            batches = list(_batches(arrow.BufferReader(mapped), is_file=is_file))
        except (arrow.ArrowException, OSError) as error:
            raise UnreadableShardError(f"{describe(chunk)} is no Arrow file, or is damaged: {error}") from error
        if self._columns is not None and batches:
            check_columns(self._columns, batches[0].schema.names, chunk)
        ends = np.cumsum([batch.num_rows for batch in batches])
        found = int(ends[-1]) if len(ends) else 0
        if found != chunk.num_samples:
            raise UnreadableShardError(
                f"{describe(chunk)} has {found} rows, and {chunk.num_samples} by the index: "
                "the file was written anew; write the index again with hierdist data index"
            )
        size_bytes = sum(_bytes_beside(batch, mapped) for batch in batches)
        return Sized(_Batches([Rows(batch, self._columns) for batch in batches], ends), size_bytes)


class _Batches(NamedTuple):
    rows: list[Rows]
    ends: Numbers


def _bytes_beside(batch: Any, mapped: Any) -> int:
    """What a batch takes in memory beside the mapped file: its buffers that were decompressed."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    first, last = mapped.address, mapped.address + mapped.size
    return sum(buffer.size for buffer in buffers if not first <= buffer.address <= last)


def _batches(source: Any, *, is_file: bool) -> Iterator[Any]:
    ipc = pyarrow("reading Arrow", "pyarrow.ipc")
    if not is_file:
        yield from ipc.open_stream(source)
        return
    reader = ipc.open_file(source)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _look(folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
    arrow = pyarrow("reading Arrow")
    stream = ShardStream(folder, name, size_bytes)
    stream.drain()
    try:
        is_file = size_bytes >= len(_FILE_MAGIC) and folder.read_range(name, 0, len(_FILE_MAGIC)) == _FILE_MAGIC
        source = arrow.PythonFile(cast(io.IOBase, SeekableShard(folder, name, size_bytes)), mode="r")
        samples = sum(batch.num_rows for batch in _batches(source, is_file=is_file))
    except (arrow.ArrowException, OSError) as error:
        raise damaged(folder, name, error) from error
    return [Piece(0, size_bytes, samples, stream.crc32)]
