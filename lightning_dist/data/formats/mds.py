"""Shards of MosaicML Streaming (MDS), read from their documented layout; the package is not needed.

A shard is: the number of samples, one offset more than samples (uint32 each), a copy of the columns' description, and
the samples. A sample is the sizes of its columns of variable size (uint32 each), and the columns' values end to end.
The data set's own ``index.json`` says how many samples each shard has. Pickles are refused: reading one runs code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.compression import compression_of
from lightning_dist.data.formats.offsets import BoundedShard
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import INDEX_NAME, place_of, read_json
from lightning_dist.data.index.survey import Piece, index_of
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ForeignDataError, UnreadableShardError

Decoder = Callable[[memoryview], Any]

_ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_DTYPES = tuple(_ARRAY_DTYPES.values())
_COMPRESSIONS = ("zstd", "gz", "bz2")

_PLAIN: dict[str, Decoder] = {
    "bytes": bytes,
    "str": lambda data: bytes(data).decode(),
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": lambda data: int(bytes(data)),
    "str_float": lambda data: float(bytes(data)),
    "str_decimal": lambda data: Decimal(bytes(data).decode()),
    "json": lambda data: json.loads(bytes(data)),
    # Pictures stay as they are stored: what they become is the model's business.
    **dict.fromkeys(("jpeg", "png", "pil", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"), bytes),
}


@dataclass(frozen=True)
class MdsFormat:
    """Shards of MosaicML Streaming."""

    name = "mds"

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`."""
        where = place_of(folder, INDEX_NAME)
        found = read_json(folder, INDEX_NAME)
        if not is_mds(found):
            raise ForeignDataError(f"{where} is not there, or is no index of MosaicML Streaming")
        try:
            return _index(found["shards"], folder, where)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ForeignDataError(f"{where} is damaged: {type(error).__name__}: {error}") from error

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenMds:
        """See :class:`~lightning_dist.data.reading.Format`."""
        columns = [(name, encoding, size) for name, encoding, size in properties["columns"]]
        shard = BoundedShard(map_place(place, chunk), compression_of(chunk.shard), chunk, decoded)
        return OpenMds(shard, chunk, columns)


class OpenMds:
    """Samples of a shard.

    Args:
        shard: All of it, decompressed.
        chunk: Which it is.
        columns: Name, encoding and size of each; ``None`` for a size that varies.
    """

    def __init__(self, shard: BoundedShard, chunk: Chunk, columns: list[tuple[str, str, int | None]]) -> None:
        self._shard = shard
        self._chunk = chunk
        self._columns = [(name, decoder_of(encoding, name), size) for name, encoding, size in columns]
        self._num_varying = sum(size is None for _, _, size in columns)

    def sample(self, index: int) -> dict[str, Any]:
        """Values by column. Pictures are bytes.

        Raises:
            UnreadableShardError: The sample is damaged.
        """
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        data = self._shard.sample(index)
        try:
            sizes = iter(np.frombuffer(data, "<u4", self._num_varying).tolist())
            at, sample = 4 * self._num_varying, {}
            for name, decode, fixed in self._columns:
                size = next(sizes) if fixed is None else fixed
                if at + size > len(data):
                    raise ValueError(f"the column {name} goes beyond the sample")
                sample[name] = decode(data[at : at + size])
                at += size
        except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise UnreadableShardError(f"sample {index} of {describe(self._chunk)} is damaged: {error}") from error
        return sample

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._shard.close()


def is_mds(found: Any) -> bool:
    """Whether JSON is an index of MosaicML Streaming."""
    shards = found.get("shards") if isinstance(found, dict) else None
    return isinstance(shards, list) and all(
        isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards
    )


def decoder_of(encoding: str, column: str) -> Decoder:
    """What makes a value of a column's bytes.

    Raises:
        ForeignDataError: The encoding is not read.
    """
    if encoding in _PLAIN:
        return _PLAIN[encoding]
    if encoding in _DTYPES:
        return lambda data: np.frombuffer(data, np.dtype(encoding).newbyteorder("<"), 1)[0]
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        fixed_shape = tuple(int(size) for size in shape.split(",")) if shape else None
        return lambda data: _array(data, dtype or None, fixed_shape)
    if encoding == "pkl":
        raise ForeignDataError(
            f"the column {column} holds pickles, and reading one runs code: write the shards again with another "
            "encoding, e.g. json, bytes or ndarray"
        )
    raise ForeignDataError(
        f"the column {column} has the encoding {encoding!r}; read are {', '.join([*_PLAIN, *_DTYPES, 'ndarray'])}"
    )


def _array(data: memoryview, dtype: str | None, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    """An array: its type's number and its shape come first, where they are not those of all samples."""
    at = 0
    if dtype is None:
        dtype, at = _ARRAY_DTYPES[data[0]], 1
    if shape is None:
        # The byte says the number of dimensions, and in its low bits how wide a size is.
        dims, width = data[at] // 4, 1 << (data[at] % 4)
        shape = tuple(np.frombuffer(data, f"<u{width}", dims, at + 1).tolist())
        at += 1 + dims * width
    return np.frombuffer(data[at:], np.dtype(dtype).newbyteorder("<")).reshape(shape).copy()


def _index(shards: list[dict[str, Any]], folder: ReadFolder, where: str) -> DatasetIndex:
    if not shards:
        raise ForeignDataError(f"{where} has no shards")
    first = shards[0]
    columns = list(zip(first["column_names"], first["column_encodings"], first["column_sizes"], strict=True))
    for name, encoding, _ in columns:
        decoder_of(encoding, name)
    described = [[shard[f"column_{what}"] for what in ("names", "encodings", "sizes")] for shard in shards]
    if any(other != described[0] for other in described):
        raise ForeignDataError(f"{where} has shards with different columns; write them again with the same ones")
    if any(shard["version"] != 2 for shard in shards):
        raise ForeignDataError(f"{where} is of version {first['version']}; version 2 is read")
    compressions = {str(shard["compression"] or "").partition(":")[0] for shard in shards}
    if len(compressions) > 1 or not compressions <= {"", *_COMPRESSIONS}:
        raise ForeignDataError(
            f"{where} has the compression {', '.join(sorted(compressions))}; read are {', '.join(_COMPRESSIONS)} and "
            "none: write the shards again with compression='zstd'"
        )
    pieces = {}
    for shard in shards:
        plain, packed = shard["raw_data"], shard["zip_data"]
        # On a disk, shards may have been replaced by what they were decompressed to.
        local = folder.local_path(plain["basename"])
        chosen = plain if packed is None or (local is not None and local.exists()) else packed
        pieces[str(chosen["basename"])] = [Piece(0, int(chosen["bytes"]), int(shard["samples"]), None)]
    return index_of("mds", pieces, {"columns": [list(column) for column in columns]})
