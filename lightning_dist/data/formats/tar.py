"""Tar files as WebDataset lays them out: files in a row that share a name up to its first dot are a sample.

A shard is a chunk. Fields are bytes unless they are decoded: by a few endings whose decoding runs no code of the file
(``basic``), or by functions of the user's.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_dist.data.decoded import Decoded, Sized
from lightning_dist.data.formats.compression import compression_of, decompressed, is_damage, open_stream
from lightning_dist.data.formats.tar_members import Buffer, Source, Stream, TarDamage, members
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import read_index
from lightning_dist.data.index.survey import Piece, Progress, ShardStream, damaged, index_of, names_ending, survey
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ConfigError, UnreadableShardError

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2")
Decoder = Callable[[bytes], Any]
_SAMPLE_BYTES, _FIELD_BYTES = 250, 200  # what the list of members takes in memory, measured

BASIC: dict[str, Decoder] = {
    "txt": lambda data: data.decode(),
    "text": lambda data: data.decode(),
    "json": json.loads,
    "cls": int,
    "index": int,
    "id": lambda data: data.decode().strip(),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}
"""Decoding by a field's ending. Pickles (``.pyd``, ``.pickle``) and torch files stay bytes: reading them runs code."""


class Field(NamedTuple):
    """A file of a sample.

    Attributes:
        ending: What follows the first dot of its name, in lower case.
        start: First byte in the tar file.
        size_bytes: How many.
    """

    ending: str
    start: int
    size_bytes: int


@dataclass(frozen=True)
class TarFormat:
    """Tar shards.

    Args:
        decode: ``None``: fields are bytes; ``basic``: :data:`BASIC`; or a function for each ending, others stay bytes.
            The last part of an ending counts, too: ``seg.json`` is decoded as ``json``.
    """

    name = "tar"

    decode: str | Mapping[str, Decoder] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.decode, str) and self.decode != "basic":
            raise ConfigError(f"decode={self.decode!r}: allowed are None, 'basic', or a function for each ending")

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        return read_index(folder, format_name=self.name)

    def survey(self, folder: ReadFolder, *, workers: int = 1, progress: Progress | None = None) -> DatasetIndex:
        """The index, by one pass over all bytes."""
        names = names_ending(folder, ENDINGS, self.name)
        return index_of(self.name, survey(folder, names, _look, workers=workers, progress=progress))

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenTar:
        """See :class:`~lightning_dist.data.reading.Format`."""
        decoders = BASIC if self.decode == "basic" else self.decode if isinstance(self.decode, Mapping) else {}
        return OpenTar(map_place(place, chunk), chunk, decoders, decoded)


class OpenTar:
    """Samples of a tar file.

    Args:
        data: All of it, as it is stored.
        chunk: Which it is.
        decoders: By ending.
        decoded: Has it decompressed, and where each field is.
    """

    def __init__(self, data: memoryview, chunk: Chunk, decoders: Mapping[str, Decoder], decoded: Decoded) -> None:
        self._data = data
        self._chunk = chunk
        self._decoders = decoders
        self._parts = decoded.of_chunk()
        self._parts.get(0, self._decode)

    def sample(self, index: int) -> dict[str, Any]:
        """Fields by ending, and the name that they share as ``__key__``.

        Raises:
            UnreadableShardError: A field cannot be decoded.
        """
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        found = self._parts.get(0, self._decode)
        key, fields = found.samples[index]
        sample: dict[str, Any] = {"__key__": key}
        for ending, start, size_bytes in fields:
            data = bytes(found.data[start : start + size_bytes])
            decoder = self._decoders.get(ending) or self._decoders.get(ending.rpartition(".")[2])
            try:
                sample[ending] = data if decoder is None else decoder(data)
            except Exception as error:
                raise UnreadableShardError(
                    f"{key}.{ending} of {describe(self._chunk)} cannot be decoded: {type(error).__name__}: {error}"
                ) from error
        return sample

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._parts.drop()
        self._data = memoryview(b"")

    def _decode(self) -> Sized[_Members]:
        chunk, kind = self._chunk, compression_of(self._chunk.shard)
        data = decompressed(self._data, kind, describe(chunk))
        try:
            samples = list(samples_of(Buffer(data)))
        except TarDamage as error:
            raise UnreadableShardError(f"{describe(chunk)} is no tar file, or is damaged: {error}") from error
        if len(samples) != chunk.num_samples:
            raise UnreadableShardError(
                f"{describe(chunk)} has {len(samples)} samples, and {chunk.num_samples} by the index: "
                "the file was written anew; write the index again with hierdist data index"
            )
        listed_bytes = sum(_SAMPLE_BYTES + _FIELD_BYTES * len(fields) for _, fields in samples)
        return Sized(_Members(data, samples), listed_bytes + (data.nbytes if kind is not None else 0))


class _Members(NamedTuple):
    data: memoryview
    samples: list[tuple[str, list[Field]]]


def samples_of(source: Source) -> Iterator[tuple[str, list[Field]]]:
    """Keys and fields of a tar file.

    Raises:
        TarDamage: It is damaged, or a sample has two fields of a name.
    """
    key, fields = None, list[Field]()
    for member in members(source):
        folder, _, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        # Names in double underscores are WebDataset's own; what has no ending belongs to no sample.
        if not dot or not stem or (base.startswith("__") and stem.endswith("__")):
            continue
        of = f"{folder}/{stem}" if folder else stem
        if of != key:
            if key is not None:
                yield key, fields
            key, fields = of, []
        field = Field(ending.lower(), member.start, member.size_bytes)
        if any(other.ending == field.ending for other in fields):
            raise TarDamage(f"{member.name} is there twice")
        fields.append(field)
    if key is not None:
        yield key, fields


def _look(folder: ReadFolder, name: str, size_bytes: int) -> Iterable[Piece]:
    stream, kind = ShardStream(folder, name, size_bytes), compression_of(name)
    file = io.BufferedReader(stream, 1 << 20)
    try:
        samples = sum(1 for _ in samples_of(Stream(file if kind is None else open_stream(file, kind))))
    except Exception as error:
        if not is_damage(error) and not isinstance(error, TarDamage):
            raise
        raise damaged(folder, name, error) from error
    stream.drain()
    return [Piece(0, size_bytes, samples, stream.crc32)]
