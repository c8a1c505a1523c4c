"""Lines of JSON: ``.jsonl``, also compressed as a whole (``.gz``, ``.zst``, ``.bz2``). A line is a sample.

A plain file is cut into chunks at the ends of lines; a compressed one is one chunk, since it cannot be entered in the
middle. Blank lines are no samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast
from zlib import crc32

import numpy as np

from lightning_dist.data.decoded import Decoded, Sized
from lightning_dist.data.formats.compression import compression_of, decompressed, is_damage, open_stream
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex, Numbers
from lightning_dist.data.index.index_file import read_index
from lightning_dist.data.index.survey import Piece, Progress, ShardStream, damaged, index_of, names_ending, survey
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import UnreadableShardError

ENDINGS = tuple(f"{line}{packed}" for line in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst", ".bz2"))
_BLOCK_BYTES = 4 << 20
_BLANKS = (0x20, 0x09, 0x0D)


@dataclass(frozen=True)
class JsonlFormat:
    """Lines of JSON.

    Args:
        chunk_bytes: For :meth:`survey`: about how much of a plain file is fetched at once.
    """

    name = "jsonl"

    chunk_bytes: int = 4 << 20

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return read_index(folder, format_name=self.name)

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index, by one pass over all bytes."""
        names = names_ending(folder, ENDINGS, self.name)
        return index_of(self.name, survey(folder, names, self._look, workers=workers, progress=progress))

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenLines:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return OpenLines(map_place(place, chunk), chunk, decoded)

    def _look(self, folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
        stream, kind = ShardStream(folder, name, size_bytes), compression_of(name)
        if kind is None:
            return list(self._plain(cast(IO[bytes], stream)))
        try:
            with open_stream(cast(IO[bytes], stream), kind) as lines:
                samples = sum(len(line_bounds(block)[0]) for block in _whole_lines(lines, _BLOCK_BYTES))
        except Exception as error:
            if not is_damage(error):
                raise
            raise damaged(folder, name, error) from error
        stream.drain()
        return [Piece(0, size_bytes, samples, stream.crc32)]

    def _plain(self, stream: IO[bytes]) -> Iterator[Piece]:
        start = 0
        for block in _whole_lines(stream, self.chunk_bytes):
            yield Piece(start, len(block), len(line_bounds(block)[0]), crc32(block))
            start += len(block)


class OpenLines:
    """Lines of a chunk.

    Args:
        data: All of them, as they are stored.
        chunk: Which it is.
        decoded: Has them decompressed, and where each is.
    """

    def __init__(self, data: memoryview, chunk: Chunk, decoded: Decoded) -> None:
        self._data = data
        self._chunk = chunk
        self._parts = decoded.of_chunk()
        self._parts.get(0, self._decode)

    def sample(self, index: int) -> Any:
        """What line ``index`` says.

        Raises:
            UnreadableShardError: It is not JSON.
        """
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        lines = self._parts.get(0, self._decode)
        line = bytes(lines.data[lines.starts[index] : lines.ends[index]])
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableShardError(f"line {index} of {describe(self._chunk)} is not JSON: {error}") from error

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._parts.drop()
        self._data = memoryview(b"")

    def _decode(self) -> Sized[_Lines]:
        chunk, kind = self._chunk, compression_of(self._chunk.shard)
        data = decompressed(self._data, kind, describe(chunk))
        lines = _Lines(data, *line_bounds(data))
        if len(lines.starts) != chunk.num_samples:
            raise UnreadableShardError(
                f"{describe(chunk)} has {len(lines.starts)} lines, and {chunk.num_samples} by the index: "
                "the file was written anew; write the index again with hierdist data index"
            )
        bounds_bytes = lines.starts.nbytes + lines.ends.nbytes
        return Sized(lines, bounds_bytes + (data.nbytes if kind is not None else 0))


class _Lines(NamedTuple):
    data: memoryview
    starts: Numbers
    ends: Numbers


def line_bounds(data: memoryview | bytes) -> tuple[Numbers, Numbers]:
    """Where lines that are not blank begin and end."""
    codes = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(codes == 0x0A)
    if len(codes) and (not len(ends) or ends[-1] != len(codes) - 1):
        ends = np.append(ends, len(codes))
    starts = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1] + 1])
    is_line = ends > starts
    is_line[is_line] = ~np.isin(codes[starts[is_line]], _BLANKS)
    # A line that begins with a blank may have more; few do.
    for number in np.flatnonzero((ends > starts) & ~is_line):
        is_line[number] = bool(bytes(data[starts[number] : ends[number]]).strip())
    return starts[is_line], ends[is_line]


def _whole_lines(stream: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    """Blocks of about a size that end with a line."""
    rest = b""
    while True:
        block = stream.read(block_bytes)
        if not block:
            break
        rest += block
        end = rest.rfind(b"\n") + 1
        if end and len(rest) >= block_bytes:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
