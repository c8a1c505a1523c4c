"""Token shards: raw little-endian whole numbers (``.bin``), or one-dimensional ``.npy`` arrays of them.

A sample is ``seq_len + 1`` tokens; see :mod:`lightning_dist.data.formats.windows`. ``hierdist data write`` makes such
shards from text; for those that others have written (``numpy.ndarray.tofile`` does), ``hierdist data index`` makes the
index.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.windows import Cut, cut_windows
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import read_index, refuse_half_written
from lightning_dist.data.index.survey import Piece, Progress, ShardStream, damaged, index_of, names_ending, survey
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ConfigError, ForeignDataError, UnreadableShardError

DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
ENDINGS = (".bin", ".npy")
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TokensFormat:
    """Token shards, as windows.

    Args:
        seq_len: Tokens that a sample predicts; ``None``: as the index says. Another length than the index's gives up
            its checksums, which are of other chunks.
        dtype: For :meth:`survey` of ``.bin`` files that have no index: a key of :data:`DTYPES`.
        chunk_bytes: For :meth:`survey`: about how much is fetched at once.
    """

    name = "tokens"

    seq_len: int | None = None
    dtype: str | None = None
    chunk_bytes: int = CHUNK_BYTES

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        index = read_index(folder, format_name=self.name)
        checked_dtype(index.properties, folder.url)
        if self.seq_len is None or self.seq_len == index.properties["seq_len"]:
            return index
        return recut(index, self.seq_len)

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """An index of shards that have none, by one pass."""
        refuse_half_written(folder)
        names = names_ending(folder, ENDINGS, self.name)
        if self.seq_len is None:
            raise ConfigError("an index of token shards needs the length of samples: --seq-len 1024")
        layouts = {name: layout_of(folder, name, size, self.dtype) for name, size in names.items()}
        dtypes = {layout.dtype for layout in layouts.values()}
        if len(dtypes) > 1:
            raise ForeignDataError(f"{folder.url} has tokens of several types: {', '.join(sorted(dtypes))}")
        seq_len = self.seq_len
        properties: dict[str, Any] = {
            "dtype": dtypes.pop(),
            "seq_len": seq_len,
            "chunk_bytes": self.chunk_bytes,
            "shard_tokens": [layout.tokens for layout in layouts.values()],
        }
        if any(layout.start for layout in layouts.values()):
            properties["shard_starts"] = [layout.start for layout in layouts.values()]

        def look(folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
            layout = layouts[name]
            item = np.dtype(DTYPES[layout.dtype]).itemsize
            cuts = cut_windows(layout.tokens, seq_len=seq_len, chunk_tokens=self.chunk_bytes // item)
            for cut in cuts:
                start, size = layout.start + cut.first * item, cut.tokens * item
                stream = ShardStream(folder, name, size, start=start)
                stream.drain()
                yield Piece(start, size, cut.windows, stream.crc32)

        return index_of(self.name, survey(folder, names, look, workers=workers, progress=progress), properties)

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenTokens:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return OpenTokens(tokens_of(place, chunk, properties), chunk, seq_len=int(properties["seq_len"]))


class OpenTokens:
    """Windows of a chunk.

    Args:
        tokens: Of the chunk.
        chunk: Which it is.
        seq_len: Tokens that a sample predicts.
    """

    def __init__(self, tokens: NDArray[Any], chunk: Chunk, *, seq_len: int) -> None:
        if len(tokens) < chunk.num_samples * seq_len + 1:
            raise UnreadableShardError(
                f"{describe(chunk)} has {len(tokens)} tokens; {chunk.num_samples} samples of {seq_len} need "
                f"{chunk.num_samples * seq_len + 1}"
            )
        self._tokens = tokens
        self._seq_len = seq_len
        self._num_samples = chunk.num_samples

    def sample(self, index: int) -> torch.Tensor:
        """(seq_len + 1,) int64, which embeddings and losses take as it is."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = index * self._seq_len
        return torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(np.int64))

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._num_samples = 0
        self._tokens = np.zeros(0, dtype=np.uint8)


def tokens_of(place: Place, chunk: Chunk, properties: Mapping[str, Any]) -> NDArray[Any]:
    """A chunk's tokens, where the file is mapped.

    Raises:
        UnreadableShardError: The bytes are no whole number of tokens.
    """
    dtype = np.dtype(DTYPES[properties["dtype"]])
    data = map_place(place, chunk)
    if len(data) % dtype.itemsize:
        raise UnreadableShardError(f"{describe(chunk)} is no whole number of tokens of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype=dtype)


def checked_dtype(properties: Mapping[str, Any], url: str) -> None:
    """Refuse an index that lacks what reading needs.

    Raises:
        ForeignDataError: It does.
    """
    dtype, seq_len = properties.get("dtype"), properties.get("seq_len")
    if not isinstance(dtype, str) or dtype not in DTYPES or type(seq_len) is not int or seq_len < 1:
        raise ForeignDataError(
            f"the index of {url} has dtype={dtype!r} and seq_len={seq_len!r}; allowed are {', '.join(DTYPES)}, and a "
            "length of at least 1: write it again with hierdist data index"
        )


def recut(index: DatasetIndex, seq_len: int) -> DatasetIndex:
    """An index of the same shards for samples of another length; without checksums, and without reading a shard."""
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len}: must be at least 1")
    properties = {**index.properties, "seq_len": seq_len}
    item = np.dtype(DTYPES[index.properties["dtype"]]).itemsize
    counts: Any = properties.get("shard_tokens")
    chunk_bytes: Any = properties.get("chunk_bytes")
    starts = properties.get("shard_starts", [0] * len(index.shards))
    if not (_are_counts(counts, len(index.shards)) and _are_counts(starts, len(index.shards))):
        raise ForeignDataError(
            "an index of tokens does not say how many each shard has, so it can be read with its own "
            f"seq_len={index.properties['seq_len']} only: write it again with hierdist data index"
        )
    chunk_tokens = (chunk_bytes if _are_counts([chunk_bytes], 1) else CHUNK_BYTES) // item
    pieces = {
        name: [_piece(start, cut, item) for cut in cut_windows(count, seq_len=seq_len, chunk_tokens=chunk_tokens)]
        for name, start, count in zip(index.shards, starts, counts, strict=True)
    }
    return index_of(index.format, pieces, properties)


def _are_counts(values: Any, length: int) -> bool:
    return isinstance(values, list) and len(values) == length and all(type(n) is int and n >= 0 for n in values)


def _piece(start: int, cut: Cut, item: int) -> Piece:
    return Piece(start + cut.first * item, cut.tokens * item, cut.windows, None)


@dataclass(frozen=True)
class Layout:
    """Where tokens lie in a file.

    Attributes:
        dtype: Key of :data:`DTYPES`.
        start: First byte.
        tokens: How many.
    """

    dtype: str
    start: int
    tokens: int


def layout_of(folder: ReadFolder, name: str, size_bytes: int, dtype: str | None) -> Layout:
    """Where tokens lie in a file that has no index.

    Raises:
        ForeignDataError: They are of a type that is not read.
        ConfigError: Nobody said which type they are.
    """
    if name.lower().endswith(".npy"):
        return _npy_layout(folder, name, size_bytes)
    if dtype not in DTYPES:
        raise ConfigError(
            f"{name} does not say which type its tokens have, and --dtype is {dtype!r}: "
            f"give one of {', '.join(DTYPES)}, e.g. --dtype uint16"
        )
    item = np.dtype(DTYPES[dtype]).itemsize
    if size_bytes % item:
        raise damaged(folder, name, f"its {size_bytes} bytes are no whole number of {dtype}: cut off, or another type")
    return Layout(dtype, 0, size_bytes // item)


def _npy_layout(folder: ReadFolder, name: str, size_bytes: int) -> Layout:
    """Read a header as ``numpy.lib.format`` documents it; objects, which would be pickled, are refused."""
    head = folder.read_range(name, 0, min(size_bytes, 12))
    if len(head) < 12 or head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise damaged(folder, name, "it is no .npy file")
    length, first = struct.unpack_from("<H", head, 8)[0], 10
    if head[6] > 1:
        length, first = struct.unpack_from("<I", head, 8)[0], 12
    start = first + length
    if start > size_bytes or length > 1 << 16:
        raise damaged(folder, name, "its header is longer than the file")
    try:
        header = ast.literal_eval(folder.read_range(name, first, length).decode("latin1"))
        text, shape = str(header["descr"]), tuple(header["shape"])
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise damaged(folder, name, f"its header cannot be read: {error}") from error
    dtype = next((key for key, value in DTYPES.items() if text in (value, value.replace("<u1", "|u1"))), None)
    if dtype is None or len(shape) != 1:
        raise ForeignDataError(
            f"{name} is an array of {text} of {len(shape)} dimensions; tokens are one-dimensional arrays of "
            f"{', '.join(DTYPES)}: save it again with numpy.save(path, array.reshape(-1).astype('uint16'))"
        )
    if size_bytes - start != shape[0] * np.dtype(DTYPES[dtype]).itemsize:
        raise damaged(folder, name, f"it should have {shape[0]} tokens, and {size_bytes - start} bytes are left")
    return Layout(dtype, start, shape[0])
