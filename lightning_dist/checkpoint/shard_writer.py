"""A storage writer of ``torch.distributed.checkpoint``: one file of raw bytes a rank, a JSON manifest, a commit marker.

The sequence, which makes a checkpoint whole or invisible::

    coordinator   prepare_global_plan   choose the save's id, remove what is left of saves that were cut off
    every rank    write_data            write its file, durably; report size and checksums
    coordinator   finish                all reported: compare sizes, write the manifest, then the marker; remove the
                                        files of the checkpoint that was there before

All files but the marker have the save's id in their names, so the checkpoint that is replaced is whole until the marker
names the new one. A save that finds files of one that began later gives up: it is late, its training is over.

Between ``prepare_global_plan`` and ``write_data``, and between ``write_data`` and ``finish``, torch waits for all
ranks.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint import manifest as formats
from lightning_dist.checkpoint.host_pieces import bytes_of, dtype_name
from lightning_dist.checkpoint.manifest import ByteRange, Chunk, FileEntry, Manifest, TensorEntry
from lightning_dist.checkpoint.save_ids import is_manifest, manifest_file, next_save_id, save_id_of, shard_file
from lightning_dist.checkpoint.save_planner import nothing_to_check, piece_of
from lightning_dist.checkpoint.shard_stream import ShardStream, Source
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import CheckpointError


@dataclass(frozen=True)
class _Save:
    """Travels with the plan from the coordinator to each rank."""

    save_id: str


@dataclass(frozen=True)
class Written:
    """Travels with each result to the coordinator.

    Attributes:
        place: Where it is.
        sizes: Of a chunk of a tensor.
        file: All of it.
    """

    place: ByteRange
    sizes: tuple[int, ...]
    file: FileEntry


class ShardWriter(StorageWriter):
    """Writes one checkpoint; may be used again for the next with another ``folder``.

    Args:
        folder: Of this checkpoint; a checkpoint that is there is replaced.
        rank: Global rank of this process.
        host: Name of its host.
        record: See :class:`Manifest`; the coordinator's counts.
        intact: Raises if the values are not what they are to be; called once they have been written.
        clock: Seconds since 1970.
        written: See :class:`ShardStream`.

    Attributes:
        manifest: Of what is committed; on the coordinator.
        plan: What this rank has written last.
        results: What each rank has written; on the coordinator.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        rank: int,
        host: str,
        record: Mapping[str, Any] | None = None,
        intact: Callable[[], None] = nothing_to_check,
        clock: Callable[[], float] = time.time,
        written: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._host = host
        self._record = dict(record or {})
        self._intact = intact
        self._clock = clock
        self._written = written
        self._save_id = ""
        self.manifest: Manifest | None = None
        self.plan: SavePlan | None = None
        self.results: tuple[tuple[WriteResult, ...], ...] = ()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to the folder that was given."""
        if checkpoint_id is not None:
            raise CheckpointError(
                f"checkpoint_id={checkpoint_id!r} has no place here: ShardWriter was given its folder"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept from the save before."""
        self.manifest = None

    def storage_meta(self) -> StorageMeta:
        """The folder's URL."""
        return StorageMeta(checkpoint_id=self._folder.url)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make room: no rank writes before it has the plan."""
        self._save_id = next_save_id(self._folder.list(), now_s=self._clock(), token=secrets.randbits(16))
        catalog.clear_older(self._folder, self._save_id, but=catalog.committed_save(self._folder))
        return [replace(plan, storage_data=_Save(self._save_id)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, in the calling thread."""
        self.plan = plan
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner))
        self._intact()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: every rank has its file on disk.

        Raises:
            CheckpointError: A file is not there or of another size than its writer said, or a chunk was not written, or
                another save has begun here.
        """
        self.results = tuple(map(tuple, results))
        manifest = manifest_of(
            metadata,
            [result for part in results for result in part],
            save_id=self._save_id,
            record=self._record,
            url=self._folder.url,
            created_s=self._clock(),
        )
        self._check(manifest)
        data = formats.encode(manifest)
        self._folder.write(manifest_file(self._save_id), [data])
        self._check(manifest)  # the manifest may have taken long
        self._folder.write(formats.MARKER_FILE, [formats.Marker.of(self._save_id, data).encode()])
        self._yield_to_newer()
        self.manifest = manifest
        try:
            catalog.clear_older(self._folder, self._save_id)
        except CheckpointError as error:  # the new one is committed all the same
            warnings.warn(f"files of an older checkpoint are left in {self._folder.url}: {error}", stacklevel=2)

    def _yield_to_newer(self) -> None:
        """If the marker has come so late that a newer save is whole, that one is committed again."""
        newer = max((name for name in self._folder.list() if is_manifest(name)), default="")
        if newer <= manifest_file(self._save_id):
            return
        data, save_id = self._folder.read(newer), save_id_of(newer)
        if data is not None and save_id is not None:
            self._folder.write(formats.MARKER_FILE, [formats.Marker.of(save_id, data).encode()])
        raise self._given_up()

    def _given_up(self) -> CheckpointError:
        return CheckpointError(f"{self._folder.url}: another save has begun there since; this one is given up")

    def _check(self, manifest: Manifest) -> None:
        there = self._folder.list()
        if any((found := save_id_of(name)) is not None and found > self._save_id for name in there):
            raise self._given_up()
        for name, entry in manifest.files.items():
            if there.get(name) != entry.size:
                raise CheckpointError(
                    f"{self._folder.url}: rank {entry.rank} ({entry.host}) wrote {entry.size} bytes to {name}, "
                    f"{there.get(name, 'none')} are there. Do all ranks see the same storage?"
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch does not choose this writer by itself."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        stream = ShardStream([source_of(item, planner) for item in plan.items], written=self._written)
        name = shard_file(self._rank, plan.storage_data.save_id)
        self._folder.write(name, stream)
        file = FileEntry(stream.size_bytes, stream.crc32, self._rank, self._host)
        return [
            WriteResult(item.index, size, Written(ByteRange(name, start, size, crc), _sizes(item), file))
            for item, start, crc in zip(plan.items, stream.starts, stream.crcs, strict=True)
            for size in [_size_bytes(item)]
        ]


def manifest_of(
    metadata: Metadata,
    results: Sequence[WriteResult],
    *,
    save_id: str,
    record: Mapping[str, Any],
    url: str,
    created_s: float,
) -> Manifest:
    """What the coordinator commits.

    Args:
        metadata: As planned.
        results: Of all ranks.
        save_id: Of the save.
        record: See :class:`Manifest`.
        url: Of the folder, for messages.
        created_s: Now, seconds since 1970.

    Raises:
        CheckpointError: No rank wrote an object.
    """
    chunks: dict[str, list[Chunk]] = {}
    objects: dict[str, ByteRange] = {}
    files: dict[str, FileEntry] = {}
    for result in results:
        written, index = result.storage_data, result.index
        files[written.place.file] = written.file
        if index.offset is None:
            objects[index.fqn] = written.place
        else:
            chunks.setdefault(index.fqn, []).append(Chunk(tuple(index.offset), written.sizes, written.place))
    tensors: dict[str, TensorEntry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            kept = tuple(chunks.get(name, ()))
            tensors[name] = TensorEntry(dtype_name(entry.properties.dtype), tuple(entry.size), kept)
        elif name not in objects:
            raise CheckpointError(f"{url}: no rank wrote object {name!r}")
    return Manifest(
        tensors=tensors,
        aliases=dict(metadata.planner_data),
        objects=objects,
        files=dict(sorted(files.items())),
        save_id=save_id,
        created_s=created_s,
        record=dict(record),
    )


def source_of(item: WriteItem, planner: SavePlanner) -> Source:
    """The bytes of an item."""

    def read() -> memoryview:
        data = planner.resolve_data(item)
        return data.getbuffer() if item.type == WriteItemType.BYTE_IO else bytes_of(data)  # type: ignore[union-attr, arg-type]  # by its type

    return Source(_size_bytes(item), read)


def _size_bytes(item: WriteItem) -> int:
    return item.bytes_io_data.nbytes if item.bytes_io_data is not None else piece_of(item).size_bytes


def _sizes(item: WriteItem) -> tuple[int, ...]:
    return tuple(item.tensor_data.chunk.sizes) if item.tensor_data is not None else ()
