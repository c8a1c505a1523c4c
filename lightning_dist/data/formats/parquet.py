"""Parquet files, by pyarrow. A file is a chunk, a row a sample.

A row group's bytes could be fetched alone, but not read alone: its place and its schema are at the end of the file. So
files should not be much larger than what a host fetches at once: 64 to 512 MB. Row groups are decoded one at a time,
and held as long as memory allows.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from lightning_dist.data.decoded import Decoded, Sized
from lightning_dist.data.formats.columns import Rows, pyarrow
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import read_index
from lightning_dist.data.index.survey import Piece, Progress, ShardStream, damaged, index_of, names_ending, survey
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ForeignDataError, UnreadableShardError

ENDINGS = (".parquet", ".pq")


@dataclass(frozen=True)
class ParquetFormat:
    """Parquet files.

    Args:
        columns: To read; ``None``: all.
    """

    name = "parquet"

    columns: tuple[str, ...] | None = None

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        pyarrow("reading Parquet")
        return read_index(folder, format_name=self.name)

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index: counts from the ends of the files, checksums of all bytes."""
        pyarrow("reading Parquet")
        names = names_ending(folder, ENDINGS, self.name)
        return index_of(self.name, survey(folder, names, _look, workers=workers, progress=progress))

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenParquet:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return OpenParquet(map_place(place, chunk), chunk, self.columns, decoded)


class OpenParquet:
    """Rows of a file.

    Args:
        data: All of it.
        chunk: Which it is.
        columns: To read; ``None``: all.
        decoded: Has its row groups.
    """

    def __init__(self, data: memoryview, chunk: Chunk, columns: tuple[str, ...] | None, decoded: Decoded) -> None:
        self._parts = decoded.of_chunk()
        arrow, parquet = pyarrow("reading Parquet"), pyarrow("reading Parquet", "pyarrow.parquet")
        self._chunk = chunk
        self._columns = columns
        try:
            self._file = parquet.ParquetFile(arrow.BufferReader(arrow.py_buffer(data)))
        except (arrow.ArrowException, OSError) as error:
            raise UnreadableShardError(f"{describe(chunk)} is no Parquet file, or is damaged: {error}") from error
        metadata = self._file.metadata
        if columns is not None:
            check_columns(columns, self._file.schema_arrow.names, chunk)
        self._ends = np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])
        if metadata.num_rows != chunk.num_samples:
            raise UnreadableShardError(
                f"{describe(chunk)} has {metadata.num_rows} rows, and {chunk.num_samples} by the index: "
                "the file was written anew; write the index again with hierdist data index"
            )

    def sample(self, index: int) -> dict[str, Any]:
        """Row ``index``, by column.

        Raises:
            UnreadableShardError: Its row group cannot be decoded.
        """
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        group = int(np.searchsorted(self._ends, index, side="right"))
        rows = self._parts.get(group, partial(self._decode, group))
        return rows.row(index - (int(self._ends[group - 1]) if group else 0))

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._parts.drop()
        self._file = None

    def _decode(self, group: int) -> Sized[Rows]:
        arrow = pyarrow("reading Parquet")
        try:
            columns = None if self._columns is None else list(self._columns)
            rows = Rows(self._file.read_row_group(group, columns=columns, use_threads=False), self._columns)
        except (arrow.ArrowException, OSError) as error:
            raise UnreadableShardError(f"row group {group} of {describe(self._chunk)}: {error}") from error
        return Sized(rows, rows.size_bytes)


def check_columns(columns: Iterable[str], there: Iterable[str], chunk: Chunk) -> None:
    """Refuse columns that a file does not have."""
    names = list(there)
    missing = [name for name in columns if name not in names]
    if missing:
        raise ForeignDataError(f"{chunk.shard} has no column {', '.join(missing)}; it has {', '.join(names)}")


def _look(folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
    arrow, parquet = pyarrow("reading Parquet"), pyarrow("reading Parquet", "pyarrow.parquet")
    stream = ShardStream(folder, name, size_bytes)
    stream.drain()
    try:
        file = arrow.PythonFile(cast(io.IOBase, SeekableShard(folder, name, size_bytes)), mode="r")
        samples = parquet.read_metadata(file).num_rows
    except (arrow.ArrowException, OSError) as error:
        raise damaged(folder, name, error) from error
    return [Piece(0, size_bytes, samples, stream.crc32)]


class SeekableShard(io.RawIOBase):
    """A shard that is read in any order, a range at a time.

    Args:
        folder: Where it is.
        name: Of the file.
        size_bytes: Of the file.
    """

    def __init__(self, folder: ReadFolder, name: str, size_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See :class:`io.IOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = min(max(0, base + offset), self._size_bytes)
        return self._at

    def tell(self) -> int:
        """See :class:`io.IOBase`."""
        return self._at

    def read(self, size_bytes: int | None = -1) -> bytes:
        """See :class:`io.RawIOBase`."""
        left = self._size_bytes - self._at
        count = left if size_bytes is None or size_bytes < 0 else min(size_bytes, left)
        found = self._folder.read_range(self._name, self._at, count) if count else b""
        self._at += len(found)
        return found
