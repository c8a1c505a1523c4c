"""Token shards once more, as packed documents: a sample is a row of whole documents; see
:mod:`lightning_dist.data.packing`.

Documents are told apart by the token that ends each. So a chunk's bytes are all that is needed to pack it, and shards
that other tools have written can be packed too. The index is a file of its own beside that of the windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.tokens import (
    CHUNK_BYTES,
    DTYPES,
    ENDINGS,
    checked_dtype,
    layout_of,
    tokens_of,
)
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import (
    INDEX_NAME,
    PACKED_NAME,
    is_index,
    place_of,
    read_index,
    read_json,
    refuse_half_written,
)
from lightning_dist.data.index.survey import Piece, Progress, index_of, names_ending, survey
from lightning_dist.data.packing import PackedRow, cut_documents, document_lengths, num_rows, pack, packed_row
from lightning_dist.data.placed_bytes import describe
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ConfigError, ForeignDataError, UnreadableShardError


@dataclass(frozen=True)
class PackedFormat:
    """Token shards, as packed documents.

    Args:
        seq_len: For :meth:`survey`: positions of a row; ``None``: as the index of the windows says. An index is of one
            length: for another one, write another.
        eos: For :meth:`survey`: the token that ends documents; ``None``: as the index of the windows says.
        dtype: For :meth:`survey` of ``.bin`` files that have no index: their type.
        chunk_bytes: For :meth:`survey`: about how much is fetched at once.
    """

    name = "packed"

    seq_len: int | None = None
    eos: int | None = None
    dtype: str | None = None
    chunk_bytes: int | None = None

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        index = read_index(folder, format_name=self.name, name=PACKED_NAME)
        checked_dtype(index.properties, folder.url)
        if self.seq_len not in (None, index.properties["seq_len"]):
            raise ForeignDataError(
                f"{place_of(folder, PACKED_NAME)} packs rows of {index.properties['seq_len']}, not {self.seq_len}: "
                f"write another with hierdist data index {folder.url} --format packed --seq-len {self.seq_len}"
            )
        return index

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index, by one pass over the tokens."""
        refuse_half_written(folder)
        found = read_json(folder, INDEX_NAME)
        known: Mapping[str, Any] = found["properties"] if is_index(found) and found["format"] == "tokens" else {}
        seq_len = self.seq_len if self.seq_len is not None else known.get("seq_len")
        eos = self.eos if self.eos is not None else known.get("eos")
        if seq_len is None or eos is None:
            raise ConfigError(
                "packing needs the length of rows and the token that ends documents: --seq-len 1024 --eos 50256; "
                "hierdist data write --eos writes one after each document"
            )
        chunk_bytes = int(self.chunk_bytes or known.get("chunk_bytes") or CHUNK_BYTES)
        names = names_ending(folder, ENDINGS, self.name)
        layouts = {
            name: layout_of(folder, name, size, self.dtype or known.get("dtype")) for name, size in names.items()
        }
        dtypes = {layout.dtype for layout in layouts.values()}
        if len(dtypes) > 1:
            raise ForeignDataError(f"{folder.url} has tokens of several types: {', '.join(sorted(dtypes))}")
        dtype = dtypes.pop()
        if not 0 <= eos <= np.iinfo(DTYPES[dtype]).max:
            raise ConfigError(f"--eos {eos}: tokens here are {dtype}, and none of them can be that")
        with_ends = []

        def look(folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
            layout = layouts[name]
            data = folder.read_range(name, layout.start, size_bytes - layout.start)
            tokens = np.frombuffer(data, dtype=DTYPES[dtype])
            with_ends.append(bool((tokens == eos).any()))
            return packed_pieces(tokens, start=layout.start, eos=eos, seq_len=seq_len, chunk_bytes=chunk_bytes)

        pieces = survey(folder, names, look, workers=workers, progress=progress)
        if not any(with_ends):
            raise ForeignDataError(
                f"{folder.url} nowhere has the token {eos}, which was to end documents: give another"
            )
        return packed_index(
            pieces,
            dtype=dtype,
            seq_len=seq_len,
            eos=eos,
            chunk_bytes=chunk_bytes,
            tokens=sum(layout.tokens for layout in layouts.values()),
            vocab_size=known.get("vocab_size"),
        )

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenPacked:
        """See :class:`~lightning_dist.data.reading.Format`."""
        tokens = tokens_of(place, chunk, properties)
        return OpenPacked(tokens, chunk, eos=int(properties["eos"]), seq_len=int(properties["seq_len"]))


class OpenPacked:
    """Rows of a chunk.

    Args:
        tokens: Of the chunk.
        chunk: Which it is.
        eos: Token that ends documents.
        seq_len: Positions of a row.
    """

    def __init__(self, tokens: NDArray[Any], chunk: Chunk, *, eos: int, seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._rows = pack(document_lengths(tokens, eos), seq_len=seq_len)
        if len(self._rows) != chunk.num_samples:
            raise UnreadableShardError(
                f"{describe(chunk)} has {len(self._rows)} rows of packed documents, and {chunk.num_samples} by the "
                "index: the shard was written anew; write the index again with hierdist data index --format packed"
            )

    def sample(self, index: int) -> PackedRow:
        """Row ``index``."""
        if not 0 <= index < len(self._rows):
            raise IndexError(f"sample {index} of {len(self._rows)}")
        return packed_row(self._tokens, self._rows[index], seq_len=self._seq_len)

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._rows = []
        self._tokens = np.zeros(0, dtype=np.uint8)


def packed_pieces(tokens: NDArray[Any], *, start: int, eos: int, seq_len: int, chunk_bytes: int) -> list[Piece]:
    """Chunks of a shard.

    Args:
        tokens: Of the shard.
        start: First byte of the tokens in its file.
        eos: Token that ends documents.
        seq_len: Positions of a row.
        chunk_bytes: About how much is fetched at once.
    """
    item = tokens.dtype.itemsize
    pieces, first = [], 0
    for stop in cut_documents(document_lengths(tokens, eos), chunk_tokens=max(1, chunk_bytes // item)):
        part = tokens[first:stop]
        rows = num_rows(document_lengths(part, eos), seq_len=seq_len)
        pieces.append(Piece(start + first * item, len(part) * item, rows, crc32(part.data)))
        first = stop
    return pieces


def packed_index(
    pieces: Mapping[str, list[Piece]],
    *,
    dtype: str,
    seq_len: int,
    eos: int,
    chunk_bytes: int,
    tokens: int,
    vocab_size: int | None,
) -> DatasetIndex:
    """The index of packed shards, alike whether made while they are written or afterwards."""
    properties = {"dtype": dtype, "seq_len": seq_len, "eos": eos, "chunk_bytes": chunk_bytes, "tokens": tokens}
    if vocab_size is not None:
        properties["vocab_size"] = vocab_size
    return index_of("packed", pieces, properties)
