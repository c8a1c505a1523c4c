"""What a checkpoint's files hold, range by range: where it is, whether it is what was written, where it goes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from lightning_dist.checkpoint.host_pieces import tensor_of
from lightning_dist.checkpoint.manifest import ByteRange, Chunk, Manifest
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True)
class Stored:
    """A chunk of a tensor, or an object.

    Attributes:
        name: Of the tensor or object.
        place: Where its bytes are.
        chunk: Which of the tensor's; ``None`` for an object.
        dtype: Of the tensor; empty for an object.
    """

    name: str
    place: ByteRange
    chunk: Chunk | None = None
    dtype: str = ""

    @property
    def what(self) -> str:
        """In words."""
        return f"{'object' if self.chunk is None else 'tensor'} {self.name}"


def stored_in(manifest: Manifest) -> Iterator[Stored]:
    """All that a checkpoint holds, in no order."""
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            yield Stored(name, chunk.place, chunk, entry.dtype)
    for name, place in manifest.objects.items():
        yield Stored(name, place)


def read_range(folder: Folder, file: str, start: int, target: memoryview) -> None:
    """Fill ``target`` from a byte of a file on.

    Raises:
        DamagedCheckpointError: The file is not there, or ends before.
        CheckpointError: Storage refused.
    """
    try:
        folder.read_into(file, start, target)
    except CheckpointError as error:
        if isinstance(error.__cause__, (EOFError, FileNotFoundError)):
            raise DamagedCheckpointError(f"a file is missing or too short: {error}") from error
        raise


def check(folder: Folder, stored: Stored, data: memoryview) -> None:
    """Compare bytes that were read with their checksum.

    Raises:
        DamagedCheckpointError: They are not those that were written; names the file, the range and what it holds.
    """
    crc, place = zlib.crc32(data), stored.place
    if crc != place.crc32:
        raise DamagedCheckpointError(
            f"{folder.url.rstrip('/')}/{place.file}: bytes {place.start} to {place.start + place.size} "
            f"({stored.what}) are not what was written: crc32 is {crc:08x}, not {place.crc32:08x}"
        )


def deliver(stored: Stored, data: memoryview, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Copy bytes to where a plan wants them."""
    for item in items:
        if stored.chunk is None:
            planner.load_bytes(item, io.BytesIO(data))
        else:
            _copy(tensor_of(data, stored.dtype, stored.chunk.sizes), item, planner)


def _copy(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, size)
    target = planner.resolve_tensor(item)
    target.copy_(chunk)
    planner.commit_tensor(item, target)
