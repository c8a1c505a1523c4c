"""A file as ``torch.save`` writes it, of tensors that are not in memory: each gives its bytes when its turn comes.

The format is a zip file without compression: ``data.pkl``, a pickle in which tensors refer to records, and a record of
raw bytes for each, ``data/0``, ``data/1``, ... ``torch.load`` reads it, with ``mmap=True`` too.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint.host_pieces import bytes_of, dtype_name
from lightning_dist.checkpoint.pieces import Piece
from lightning_dist.checkpoint.storage import Buffer

_ROOT = "archive"
_ALIGNMENT = 64  # of records, as torch has it
_PROTOCOL = 2  # what torch.load(weights_only=True) takes
_PADDING = b"FB"  # torch's mark of an extra field that only takes room
_FIXED_HEADER, _FIELD_HEADER, _ZIP64_FIELD = 30, 4, 20  # bytes


@dataclass(frozen=True, eq=False)
class LaterTensor:
    """Stands for a contiguous tensor on the CPU; the same object at several places is the same tensor.

    Attributes:
        dtype: Name of its type, without ``torch.``.
        shape: Its shape.
        read: Gives its bytes in row-major order, in parts.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[memoryview]]

    @property
    def numel(self) -> int:
        """How many values."""
        return Piece.whole("", self.dtype, self.shape).numel

    @property
    def size_bytes(self) -> int:
        """Of the values."""
        return Piece.whole("", self.dtype, self.shape).size_bytes


def write_archive(value: object, path: Path) -> None:
    """Write a file for ``torch.load``, durably.

    Args:
        value: What ``torch.save`` takes, and :class:`LaterTensor` anywhere in it. Tensors are written contiguous.
        path: Of the file.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _write_record(archive, "data.pkl", [buffer.getbuffer()], len(buffer.getbuffer()))
            _write_record(archive, "byteorder", [sys.byteorder.encode()], len(sys.byteorder))
            for number, tensor in enumerate(pickler.tensors):
                _write_record(archive, f"data/{number}", tensor.read(), tensor.size_bytes)
            _write_record(archive, "version", [b"3\n"], 2)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class _Record:
    """What torch takes for the memory of a tensor."""

    kind: object
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Notes the tensors it meets, and writes references to their records."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[LaterTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """Torch's reference to a record."""
        if isinstance(obj, _Record):
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is made again from its record; other objects say it themselves."""
        if isinstance(obj, torch.Tensor):
            plain = obj.detach()
            obj = LaterTensor(dtype_name(plain.dtype), tuple(plain.shape), lambda: iter([bytes_of(plain)]))
        elif not isinstance(obj, LaterTensor):
            return NotImplemented
        self.tensors.append(obj)
        # Torch has one way for old types and another for new ones: an empty tensor of the type shows which.
        like = torch.empty(0, dtype=getattr(torch, obj.dtype))
        make, (storage, _, _, _, *others) = like.__reduce_ex__(_PROTOCOL)
        if isinstance(storage, torch.UntypedStorage):
            record = _Record(torch.UntypedStorage, len(self.tensors) - 1, obj.size_bytes)
        else:
            kind = getattr(torch, storage._pickle_storage_type())  # what torch.save calls; the public name warns
            record = _Record(kind, len(self.tensors) - 1, obj.numel)
        return make, (record, 0, obj.shape, _strides(obj.shape), *others)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _write_record(archive: zipfile.ZipFile, name: str, parts: Iterable[Buffer], size_bytes: int) -> None:
    record = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    assert archive.fp is not None
    start = archive.fp.tell() + _FIXED_HEADER + len(record.filename) + _FIELD_HEADER + _ZIP64_FIELD
    padding = -start % _ALIGNMENT
    record.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(record, "w", force_zip64=True) as target:
        written = sum(target.write(part) for part in parts)
    if written != size_bytes:
        raise ValueError(f"{name}: {size_bytes} bytes were announced, {written} came")
