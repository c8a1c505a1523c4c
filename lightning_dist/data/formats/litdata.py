"""Chunks of LitData's ``optimize``, read from their layout; the package is not needed.

A file is: the number of samples, one offset more than samples (uint32 each), and the samples. A sample is the sizes of
its leaves (uint32 each) and the leaves end to end; the data set's own ``index.json`` says what each leaf is, and how
leaves make a sample. Read are plain files and those compressed as a whole. Pickles are refused: reading one runs code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.offsets import BoundedShard
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.index.index_file import INDEX_NAME, place_of, read_json
from lightning_dist.data.index.survey import Piece, index_of
from lightning_dist.data.placed_bytes import describe, map_place
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ForeignDataError, UnreadableShardError

Decoder = Callable[[memoryview], Any]

_NUMPY = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool"
_NUMPY_DTYPES = dict(enumerate(_NUMPY.split()))
_TORCH_DTYPES = {
    number: dtype
    for dtype, numbers in {
        torch.float32: (0, 1),
        torch.float64: (2, 3),
        torch.complex64: (4, 5),
        torch.complex128: (6, 7),
        torch.float16: (8, 9),
        torch.bfloat16: (10,),
        torch.uint8: (11,),
        torch.int8: (12,),
        torch.int16: (13, 14),
        torch.int32: (15, 16),
        torch.int64: (17, 18),
        torch.bool: (19,),
        torch.uint16: (20,),
    }.items()
    for number in numbers
}

_PLAIN: dict[str, Decoder] = {
    "bytes": bytes,
    "str": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "bool": lambda data: data[0] != 0,
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "numpy": lambda data: _array(data),
    "tensor": lambda data: _tensor(data),
    # Media stay as they are stored: what they become is the model's business.
    **dict.fromkeys(
        ("jpeg", "jpeg_array", "pil", "image", "video", "audio", "file", "pdf", "tifffile", "nifti"), bytes
    ),
}
_CONVERT = "write the chunks again, with litdata.optimize(...)"


@dataclass(frozen=True)
class LitDataFormat:
    """Chunks of LitData."""

    name = "litdata"

    def index(self, folder: ReadFolder) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`. Lists the folder: LitData does not note sizes of files."""
        where = place_of(folder, INDEX_NAME)
        found = read_json(folder, INDEX_NAME)
        if not is_litdata(found):
            raise ForeignDataError(f"{where} is not there, or is no index of LitData")
        try:
            return _index(found, folder, where)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ForeignDataError(f"{where} is damaged: {type(error).__name__}: {error}") from error

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenLitData:
        """See :class:`~lightning_dist.data.reading.Format`."""
        kind = "zst" if properties["compressed"] else None
        shard = BoundedShard(map_place(place, chunk), kind, chunk, decoded)
        return OpenLitData(shard, chunk, properties["leaves"], properties["tree"])


class OpenLitData:
    """Samples of a file.

    Args:
        shard: All of it, decompressed.
        chunk: Which it is.
        leaves: What each leaf is.
        tree: How they make a sample.
    """

    def __init__(self, shard: BoundedShard, chunk: Chunk, leaves: list[str], tree: Mapping[str, Any]) -> None:
        self._shard = shard
        self._chunk = chunk
        self._decoders = [decoder_of(leaf) for leaf in leaves]
        self._tree = tree

    def sample(self, index: int) -> Any:
        """What was given to LitData; pictures, sound and files are bytes.

        Raises:
            UnreadableShardError: The sample is damaged.
        """
        if not 0 <= index < self._chunk.num_samples:
            raise IndexError(f"sample {index} of {self._chunk.num_samples}")
        data = self._shard.sample(index)
        try:
            sizes = np.frombuffer(data, "<u4", len(self._decoders)).tolist()
            at, leaves = 4 * len(sizes), []
            if at + sum(sizes) > len(data):
                raise ValueError("its leaves go beyond it")
            for decode, size in zip(self._decoders, sizes, strict=True):
                leaves.append(decode(data[at : at + size]))
                at += size
        except (ValueError, LookupError, struct.error, RuntimeError) as error:
            raise UnreadableShardError(f"sample {index} of {describe(self._chunk)} is damaged: {error}") from error
        return _built(self._tree, iter(leaves))

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`."""
        self._shard.close()


def is_litdata(found: Any) -> bool:
    """Whether JSON is an index of LitData."""
    config = found.get("config") if isinstance(found, dict) else None
    return isinstance(config, dict) and "data_format" in config and isinstance(found.get("chunks"), list)


def decoder_of(leaf: str) -> Decoder:
    """What makes a value of a leaf's bytes.

    Args:
        leaf: As LitData writes it: a name, and what the leaves of all samples share after a colon.

    Raises:
        ForeignDataError: The leaf is not read.
    """
    kind, _, detail = leaf.partition(":")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind == "no_header_numpy" and int(detail) in _NUMPY_DTYPES:
        return lambda data: np.frombuffer(data, _NUMPY_DTYPES[int(detail)]).copy()
    if kind == "no_header_tensor" and int(detail) in _TORCH_DTYPES:
        return lambda data: _raw_tensor(data, _TORCH_DTYPES[int(detail)])
    if kind == "pickle":
        raise ForeignDataError(
            f"samples hold pickles, and reading one runs code: {_CONVERT} of functions that return numbers, text, "
            "bytes, arrays or tensors"
        )
    raise ForeignDataError(f"samples hold {leaf!r}; read are {', '.join(_PLAIN)}, and arrays and tensors: {_CONVERT}")


def _index(found: dict[str, Any], folder: ReadFolder, where: str) -> DatasetIndex:
    config = found["config"]
    loader, level = config.get("item_loader"), config.get("compression_level")
    if loader not in (None, "PyTreeLoader"):
        raise ForeignDataError(
            f"{where} is of LitData's {loader}: for tokens, write them with numpy.ndarray.tofile and use the format "
            f"tokens; else {_CONVERT} without item_loader"
        )
    if config.get("encryption"):
        raise ForeignDataError(f"{where} is encrypted: {_CONVERT} without encryption")
    compression = config.get("compression")
    if compression is not None and (not str(compression).startswith("zstd") or level not in (None, "chunk")):
        raise ForeignDataError(
            f"{where} is compressed by {compression!r}, each {level or 'chunk'}: {_CONVERT} without compression, or "
            "with compression='zstd' and compression_level='chunk'"
        )
    leaves = [str(leaf) for leaf in config["data_format"]]
    for leaf in leaves:
        decoder_of(leaf)
    tree = _checked_tree(json.loads(config["data_spec"])[1], where)
    if _num_leaves(tree) != len(leaves):
        raise ForeignDataError(f"{where} names {len(leaves)} leaves, and samples have {_num_leaves(tree)}")
    sizes = folder.sizes()
    missing = [chunk["filename"] for chunk in found["chunks"] if chunk["filename"] not in sizes]
    if missing:
        raise UnreadableShardError(f"{folder.url} lacks {len(missing)} files that its index names, e.g. {missing[0]}")
    pieces = {
        str(chunk["filename"]): [Piece(0, sizes[chunk["filename"]], int(chunk["chunk_size"]), None)]
        for chunk in found["chunks"]
    }
    return index_of("litdata", pieces, {"leaves": leaves, "tree": tree, "compressed": compression is not None})


def _checked_tree(tree: Any, where: str) -> dict[str, Any]:
    """How leaves make a sample: dictionaries, lists and tuples."""
    kind, children = tree["type"], [_checked_tree(child, where) for child in tree["children_spec"]]
    if kind is None:
        return {"kind": "leaf"}
    if kind == "builtins.dict":
        return {"kind": "dict", "keys": json.loads(tree["context"]), "of": children}
    if kind in ("builtins.list", "builtins.tuple"):
        return {"kind": kind.removeprefix("builtins."), "of": children}
    raise ForeignDataError(
        f"{where} has samples of the class {kind}; read are dictionaries, lists and tuples: {_CONVERT}"
    )


def _num_leaves(tree: Mapping[str, Any]) -> int:
    return 1 if tree["kind"] == "leaf" else sum(_num_leaves(child) for child in tree["of"])


def _built(tree: Mapping[str, Any], leaves: Iterator[Any]) -> Any:
    if tree["kind"] == "leaf":
        return next(leaves)
    values = [_built(child, leaves) for child in tree["of"]]
    if tree["kind"] == "dict":
        return dict(zip(tree["keys"], values, strict=True))
    return values if tree["kind"] == "list" else tuple(values)


def _array(data: memoryview) -> np.ndarray[Any, Any]:
    number, dims = np.frombuffer(data, "<u4", 2).tolist()
    shape = np.frombuffer(data, "<u4", dims, 8).tolist()
    return np.frombuffer(data[8 + 4 * dims :], _NUMPY_DTYPES[number]).reshape(shape).copy()


def _tensor(data: memoryview) -> torch.Tensor:
    number, dims = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{dims}I", data, 8)
    return _raw_tensor(data[8 + 4 * dims :], _TORCH_DTYPES[number]).reshape(shape)


def _raw_tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
