"""A storage reader of ``torch.distributed.checkpoint`` for what :class:`ShardWriter` has written.

A rank reads the chunks that it needs a part of, each whole and once, and compares its checksum before a value of it is
used. Chunks that are neighbours in a file are read by one request.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lightning_dist.checkpoint.catalog import read_manifest
from lightning_dist.checkpoint.host_pieces import bytes_of, tensor_of
from lightning_dist.checkpoint.manifest import ByteRange, Chunk, Manifest, TensorEntry
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError

_REQUEST_BYTES = 32 << 20
_GAP_BYTES = 1 << 16
_DIRECT_BYTES = 1 << 20


@dataclass(frozen=True)
class _Need:
    """A range of a file, and what of it is wanted; ``chunk`` is ``None`` for an object."""

    what: str
    dtype: str
    chunk: Chunk | None
    place: ByteRange
    items: list[ReadItem]


class ShardReader(StorageReader):
    """Reads one checkpoint.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest, if it has been read already; otherwise every rank reads it.
        threads: Requests under way at once.
    """

    def __init__(self, folder: Folder, *, manifest: Manifest | None = None, threads: int = 2) -> None:
        self._folder = folder
        self._manifest = manifest
        self._threads = threads
        self._failure: CheckpointError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of the folder that was given."""
        if checkpoint_id is not None:
            raise CheckpointError(
                f"checkpoint_id={checkpoint_id!r} has no place here: ShardReader was given its folder"
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, in torch's words.

        Torch wraps what is raised here into an ``AssertionError``: a :class:`CheckpointError` is therefore raised by
        the next call, :meth:`set_up_storage_reader`.
        """
        try:
            self._manifest = self._manifest if self._manifest is not None else read_manifest(self._folder)
        except CheckpointError as error:
            self._failure = error
            return Metadata({})
        return metadata_of(self._manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what :meth:`read_metadata` found."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, compare and copy, until all is there.

        Raises:
            DamagedCheckpointError: Bytes are not those that were written; names the file, the range and the tensor.
        """
        batches = list(_batches(self._needs(plan)))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hierdist-read") as pool:
            for _ in pool.map(lambda batch: self._read(batch, planner), batches):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch does not choose this reader by itself."""
        return False

    def _needs(self, plan: LoadPlan) -> list[_Need]:
        assert self._manifest is not None
        needs: dict[tuple[str, int, int], _Need] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                place = self._manifest.objects[name]
                need = _Need(f"object {name}", "", None, place, [])
            else:
                entry, index = self._manifest.tensor(name), item.storage_index.index
                assert index is not None
                chunk = entry.chunks[index]
                place = chunk.place
                need = _Need(f"tensor {name}", entry.dtype, chunk, place, [])
            needs.setdefault((place.file, place.start, place.size), need).items.append(item)
        return sorted(needs.values(), key=lambda need: (need.place.file, need.place.start))

    def _read(self, batch: Sequence[_Need], planner: LoadPlanner) -> None:
        if len(batch) == 1 and self._read_direct(batch[0], planner):
            return
        file, start = batch[0].place.file, batch[0].place.start
        scratch = memoryview(bytearray(batch[-1].place.start + batch[-1].place.size - start))
        self._fill(file, start, scratch)
        for need in batch:
            first = need.place.start - start
            data = scratch[first : first + need.place.size]
            self._check(need, data)
            for item in need.items:
                if need.chunk is None:
                    planner.load_bytes(item, io.BytesIO(data))
                else:
                    _copy(tensor_of(data, need.dtype, need.chunk.sizes), item, planner)

    def _read_direct(self, need: _Need, planner: LoadPlanner) -> bool:
        """Read into the target itself, where all of a chunk goes to one contiguous place."""
        item = need.items[0]
        if need.chunk is None or len(need.items) > 1 or tuple(item.lengths) != need.chunk.sizes:
            return False
        target = planner.resolve_tensor(item)
        if need.place.size < _DIRECT_BYTES or target.device.type != "cpu" or not target.is_contiguous():
            return False
        data = bytes_of(target)
        self._fill(need.place.file, need.place.start, data)
        self._check(need, data)
        planner.commit_tensor(item, target)
        return True

    def _fill(self, file: str, start: int, target: memoryview) -> None:
        try:
            self._folder.read_into(file, start, target)
        except CheckpointError as error:
            if isinstance(error.__cause__, (EOFError, FileNotFoundError)):
                raise DamagedCheckpointError(f"a file is missing or too short: {error}") from error
            raise

    def _check(self, need: _Need, data: memoryview) -> None:
        crc, place = zlib.crc32(data), need.place
        if crc != place.crc32:
            raise DamagedCheckpointError(
                f"{self._folder.url.rstrip('/')}/{place.file}: bytes {place.start} to {place.start + place.size} "
                f"({need.what}) are not what was written: crc32 is {crc:08x}, not {place.crc32:08x}"
            )


def metadata_of(manifest: Manifest) -> Metadata:
    """A manifest in torch's words; tied tensors appear under each of their names."""
    tensors = {name: _tensor_metadata(entry) for name, entry in manifest.tensors.items()}
    tied = {name: tensors[target] for name, target in manifest.aliases.items()}
    objects = {name: BytesStorageMetadata() for name in manifest.objects}
    return Metadata({**tensors, **tied, **objects}, planner_data=dict(manifest.aliases))


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _batches(needs: Sequence[_Need]) -> Iterator[list[_Need]]:
    """Ranges that one request reads: neighbours in a file, up to a size."""
    batch: list[_Need] = []
    for need in needs:
        if batch:
            first, last = batch[0].place, batch[-1].place
            near = need.place.file == last.file and need.place.start - (last.start + last.size) <= _GAP_BYTES
            if not near or need.place.start + need.place.size - first.start > _REQUEST_BYTES:
                yield batch
                batch = []
        batch.append(need)
    if batch:
        yield batch


def _copy(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, size)
    target = planner.resolve_tensor(item)
    target.copy_(chunk)
    planner.commit_tensor(item, target)
