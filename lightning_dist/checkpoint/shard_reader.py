"""A storage reader of ``torch.distributed.checkpoint`` for what :class:`ShardWriter` has written.

A rank reads the chunks that it needs a part of, each whole and once, and compares its checksum before a value of it is
used. Chunks that are neighbours in a file are read by one request. Ranks of a host that can hand each other bytes read
what several of them need once; see :mod:`host_reading`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from lightning_dist.checkpoint.host_pieces import bytes_of
from lightning_dist.checkpoint.host_reading import HostReading
from lightning_dist.checkpoint.manifest import ByteRange, Manifest, TensorEntry
from lightning_dist.checkpoint.requests import neighbours
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.checkpoint.stored import Stored, check, deliver, read_range, stored_in
from lightning_dist.comm.host_relay import HostRelay
from lightning_dist.errors import CheckpointError

_REQUEST_BYTES = 32 << 20
_DIRECT_BYTES = 1 << 20
_Key = tuple[str, int, int]


@dataclass(frozen=True)
class _Need:
    """A range of a file, and what of it is wanted."""

    stored: Stored
    items: list[ReadItem] = field(default_factory=list)


class ShardReader(StorageReader):
    """Reads one checkpoint.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest, if it has been read already; otherwise every rank reads it.
        threads: Requests under way at once.
        relay: The ranks of this host, if they are to read once what several need; all of them read then.
    """

    def __init__(
        self, folder: Folder, *, manifest: Manifest | None = None, threads: int = 2, relay: HostRelay | None = None
    ) -> None:
        self._folder = folder
        self._relay = relay
        self._manifest = manifest
        self._threads = threads
        self._failure: CheckpointError | None = None

    @property
    def save_id(self) -> str:
        """Of the save that is read, once its manifest has been."""
        assert self._manifest is not None
        return self._manifest.save_id

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
        needs = self._needs(plan)
        if self._relay is None:
            self._read_all(needs.values(), planner)
        else:
            self._read_with_host(self._relay, needs, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch does not choose this reader by itself."""
        return False

    def _needs(self, plan: LoadPlan) -> dict[_Key, _Need]:
        assert self._manifest is not None
        needs: dict[_Key, _Need] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                stored = Stored(name, self._manifest.objects[name])
            else:
                entry, index = self._manifest.tensor(name), item.storage_index.index
                assert index is not None
                chunk = entry.chunks[index]
                stored = Stored(name, chunk.place, chunk, entry.dtype)
            needs.setdefault(_key(stored.place), _Need(stored)).items.append(item)
        return needs

    def _read_with_host(self, relay: HostRelay, needs: dict[_Key, _Need], planner: LoadPlanner) -> None:
        """Every rank of the host comes here, whatever it needs."""
        assert self._manifest is not None
        ranges = list({_key(stored.place): stored for stored in stored_in(self._manifest)}.values())
        ranges.sort(key=lambda stored: _key(stored.place))
        number_of = {_key(stored.place): number for number, stored in enumerate(ranges)}
        items = {number_of[key]: need.items for key, need in needs.items()}
        reading = HostReading(relay, self._folder, ranges, items, planner)
        reads = reading.agree(self._manifest)
        alone = [needs[_key(ranges[number].place)] for number in reads.alone[relay.index]]
        self._read_all(alone, planner, meanwhile=lambda: reading.run(reads))

    def _read_all(
        self, needs: Iterable[_Need], planner: LoadPlanner, *, meanwhile: Callable[[], bool] | None = None
    ) -> None:
        """Read for this rank alone; what is done meanwhile says whether to go on."""
        ordered = sorted(needs, key=lambda need: _key(need.stored.place))
        batches = neighbours(ordered, lambda need: need.stored.place, request_bytes=_REQUEST_BYTES)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hierdist-read") as pool:
            reading = [pool.submit(self._read, batch, planner) for batch in batches]
            try:
                if meanwhile is None or meanwhile():
                    for each in reading:
                        each.result()
            finally:
                for each in reading:
                    each.cancel()

    def _read(self, batch: Sequence[_Need], planner: LoadPlanner) -> None:
        if len(batch) == 1 and self._read_direct(batch[0], planner):
            return
        places = [need.stored.place for need in batch]
        start = places[0].start
        scratch = memoryview(bytearray(places[-1].start + places[-1].size - start))
        read_range(self._folder, places[0].file, start, scratch)
        for need, place in zip(batch, places, strict=True):
            data = scratch[place.start - start : place.start - start + place.size]
            check(self._folder, need.stored, data)
            deliver(need.stored, data, need.items, planner)

    def _read_direct(self, need: _Need, planner: LoadPlanner) -> bool:
        """Read into the target itself, where all of a chunk goes to one contiguous place."""
        item, chunk, place = need.items[0], need.stored.chunk, need.stored.place
        if chunk is None or len(need.items) > 1 or tuple(item.lengths) != chunk.sizes:
            return False
        target = planner.resolve_tensor(item)
        if place.size < _DIRECT_BYTES or target.device.type != "cpu" or not target.is_contiguous():
            return False
        data = bytes_of(target)
        read_range(self._folder, place.file, place.start, data)
        check(self._folder, need.stored, data)
        planner.commit_tensor(item, target)
        return True


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


def _key(place: ByteRange) -> _Key:
    return place.file, place.start, place.size
