"""What a data set consists of: shards, which are files, of chunks, which are fetched whole, of samples.

An index says how many samples each chunk has and where it lies, so that the order of an epoch, the place of a sample
and what a run reads follow without opening a shard. It is columns of numbers: 10^5 shards are read in a fraction of a
second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dist.errors import ForeignDataError

Numbers = NDArray[np.int64]

KIND, VERSION = "lightning_dist.data", 1

_MOST = 1 << 61
"""Bytes or samples; far from where 64 bits end, so that two such numbers can be added."""


class Chunk(NamedTuple):
    """What is fetched at once.

    Attributes:
        number: Of the chunk in its data set.
        shard: Name of its file, relative to the data set's folder.
        start: First byte in that file.
        size_bytes: How many.
        num_samples: Samples in it.
        crc32: Of its bytes; ``None`` if the index has none.
    """

    number: int
    shard: str
    start: int
    size_bytes: int
    num_samples: int
    crc32: int | None


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """All chunks of a data set, in the order of its files.

    Attributes:
        format: Name of the format, e.g. ``tokens``.
        shards: Names of files relative to the folder.
        shard_of: (chunks,) which file a chunk lies in.
        starts: (chunks,) first byte in that file.
        sizes: (chunks,) bytes.
        samples: (chunks,) samples.
        crc32: (chunks,) checksums, or ``None``.
        properties: What the format has to know to read samples: type of tokens, length of sequences, ... Plain JSON.
    """

    format: str
    shards: tuple[str, ...]
    shard_of: Numbers
    starts: Numbers
    sizes: Numbers
    samples: Numbers
    crc32: Numbers | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = [self.shard_of, self.starts, self.sizes, self.samples]
        columns += [] if self.crc32 is None else [self.crc32]
        if len({len(column) for column in columns}) != 1:
            raise ForeignDataError(f"columns of an index differ in length: {[len(column) for column in columns]}")
        if len(self.shard_of) and not (self.shard_of.min() >= 0 and self.shard_of.max() < len(self.shards)):
            raise ForeignDataError(f"an index names shards from 0 to {len(self.shards) - 1}, and others in its chunks")
        if any(len(column) and column.min() < 0 for column in columns):
            raise ForeignDataError("an index has negative numbers in it")
        largest = max(
            self.starts.max(initial=0), *(column.sum(dtype=np.float64) for column in (self.sizes, self.samples))
        )
        if largest > _MOST:
            raise ForeignDataError(f"an index has more bytes or samples than {_MOST}")
        for name in self.shards:
            if name.startswith("/") or ".." in name.split("/") or not name:
                raise ForeignDataError(f"an index names the shard {name!r}, which is not inside its folder")
            if not _is_name(name):
                raise ForeignDataError(f"an index names the shard {name!r}, which no file can be called")

    @property
    def num_chunks(self) -> int:
        """How many."""
        return len(self.samples)

    @cached_property
    def num_samples(self) -> int:
        """In all chunks."""
        return int(self.samples.sum())

    @cached_property
    def size_bytes(self) -> int:
        """Of all chunks."""
        return int(self.sizes.sum())

    def chunk(self, number: int) -> Chunk:
        """One row."""
        return Chunk(
            number,
            self.shards[int(self.shard_of[number])],
            int(self.starts[number]),
            int(self.sizes[number]),
            int(self.samples[number]),
            None if self.crc32 is None else int(self.crc32[number]),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the order, and what a sample holds, depend on; 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.format, self.shards, dict(self.properties)], sort_keys=True).encode())
        for column in (self.shard_of, self.starts, self.sizes, self.samples, self.crc32):
            digest.update(b"-" if column is None else np.ascontiguousarray(column, dtype="<i8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "kind": KIND,
            "version": VERSION,
            "format": self.format,
            "properties": dict(self.properties),
            "shards": list(self.shards),
            "chunks": {
                "shard": self.shard_of.tolist(),
                "start": self.starts.tolist(),
                "size_bytes": self.sizes.tolist(),
                "samples": self.samples.tolist(),
                "crc32": None if self.crc32 is None else self.crc32.tolist(),
            },
        }

    @classmethod
    def from_json(cls, found: Any, where: str) -> DatasetIndex:
        """The opposite of :meth:`to_json`.

        Args:
            found: What the file holds.
            where: Its path or URL, for messages.

        Raises:
            ForeignDataError: It is no index, or one of a later version.
        """
        if not isinstance(found, Mapping) or found.get("kind") != KIND:
            raise ForeignDataError(f"{where} is no index of this library: write one with hierdist data index")
        if found.get("version") != VERSION:
            raise ForeignDataError(
                f"{where} is an index of version {found.get('version')!r}; this library reads version {VERSION}"
            )
        try:
            chunks = found["chunks"]
            return cls(
                format=str(found["format"]),
                shards=_names(found["shards"]),
                shard_of=_column(chunks["shard"]),
                starts=_column(chunks["start"]),
                sizes=_column(chunks["size_bytes"]),
                samples=_column(chunks["samples"]),
                crc32=None if chunks["crc32"] is None else _column(chunks["crc32"]),
                properties=dict(found["properties"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ForeignDataError(f"{where} is a damaged index: {type(error).__name__}: {error}") from error
        except ForeignDataError as error:
            raise ForeignDataError(f"{where}: {error}") from error


def _is_name(text: str) -> bool:
    """Whether a file can be called that. Half of a pair of surrogates stands for a byte that is no text."""
    try:
        return "\0" not in text and (text.isascii() or bool(os.fsencode(text)))
    except UnicodeEncodeError:
        return False


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("shards are not a list of names")
    return tuple(values)


def _column(values: Any) -> Numbers:
    if not isinstance(values, list):
        raise TypeError("a column is no list")
    if not set(map(type, values)) <= {int}:  # numpy would cut off what is behind a point
        raise TypeError("a column is no list of whole numbers")
    return np.asarray(values, dtype=np.int64)
