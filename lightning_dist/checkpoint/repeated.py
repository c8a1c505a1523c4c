"""Saving once more what has been planned before: the same tensors on the same ranks, with other values.

A whole save takes a dozen collectives and a plan of every piece. Where one follows the other every few steps, nothing
of that changes, and two exchanges are enough::

    every rank    writes its file to where its pieces are, and says what is in it
    coordinator   makes the manifest out of the one before, commits, and says whether it has

Whether the layout is the same is seen by each rank; if one says no, nothing is committed and all plan anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.planner import BytesIOWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_dist.checkpoint import manifest as formats
from lightning_dist.checkpoint.manifest import ByteRange, FileEntry, Manifest
from lightning_dist.checkpoint.mirror import MemoryFolder
from lightning_dist.checkpoint.objects import Encoded
from lightning_dist.checkpoint.save_ids import manifest_file, next_save_id, shard_file
from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.checkpoint.shard_stream import ShardStream
from lightning_dist.checkpoint.shard_writer import Written, manifest_of, source_of
from lightning_dist.errors import CheckpointError, CollectiveError


@dataclass(frozen=True)
class Repeatable:
    """What a save leaves for the next one of the same layout.

    Attributes:
        plan: What this rank writes.
        metadata: Of the whole checkpoint; on the coordinator.
        results: What each rank has written; on the coordinator.
    """

    plan: SavePlan
    metadata: Metadata | None = None
    results: tuple[tuple[WriteResult, ...], ...] = ()

    def is_for(self, objects: Mapping[str, Encoded]) -> bool:
        """Whether a rank has objects of the same names."""
        planned = {item.index.fqn for item in self.plan.items if item.type == WriteItemType.BYTE_IO}
        return planned == objects.keys()


@dataclass(frozen=True)
class _Part:
    """What a rank says of its file."""

    rank: int
    file: FileEntry
    starts: Sequence[int]
    sizes: Sequence[int]
    crcs: Sequence[int]
    moment: tuple[Any, Any]
    is_spread: bool = False


@dataclass(frozen=True)
class _No:
    """Why there is no checkpoint; without a reason, all are to plan anew."""

    reason: str | None


def save_again(
    before: Repeatable,
    state: dict[str, Any],
    folder: MemoryFolder,
    *,
    rank: int,
    host: str,
    group: dist.ProcessGroup | None,
    record: Mapping[str, Any],
    is_same: bool,
    intact: Callable[[], None],
    written: Callable[[int], None],
    spread: Callable[[], bool],
) -> bool | None:
    """Write a checkpoint by an earlier plan; when this returns a truth value, it is committed.

    Args:
        before: Of this rank.
        state: As for :func:`lightning_dist.checkpoint.sharded.save`.
        folder: New, and the same on all ranks.
        rank: Global rank.
        host: Name of its host.
        group: Whose ranks save; ``None`` for this process alone.
        record: See :class:`~lightning_dist.checkpoint.manifest.Manifest`; the coordinator's counts.
        is_same: Whether this rank holds the same pieces as before.
        intact: Raises if values are not what they are to be.
        written: See :class:`~lightning_dist.checkpoint.shard_stream.ShardStream`.
        spread: Called once this rank's file is there, before it is committed; whether it has succeeded.

    Returns:
        Whether it has on all ranks. ``None`` on all: they have to plan anew.

    Raises:
        CheckpointError: It could not be written; the same on all ranks.
    """
    moment = (record.get("step"), record.get("epoch"))
    save_id = next_save_id((), now_s=float(record.get("step") or 0), token=0)  # alike on all, and the folder is new
    own: _Part | _No = _No(None)
    if is_same:
        try:
            part = _write(before.plan, state, folder, rank, host, save_id, moment, intact, written)
            own = replace(part, is_spread=spread())
        except CollectiveError:
            raise
        except Exception as error:
            own = _No(f"rank {rank}: {type(error).__name__}: {error}")
    said: list[_Part | _No] = [own]
    if group is not None:
        gathered: list[Any] = [None] * group.size()
        dist.gather_object(own, gathered if group.rank() == 0 else None, group=group, group_dst=0)
        said = gathered
    verdict: Any = _commit(before, said, folder, save_id, record) if group is None or group.rank() == 0 else None
    if group is not None:
        answer: list[Any] = [verdict]
        dist.broadcast_object_list(answer, group=group, group_src=0)
        verdict = answer[0]
    if isinstance(verdict, _No) and verdict.reason is not None:
        raise CheckpointError(f"saving {folder.url} failed on {verdict.reason}")
    return None if isinstance(verdict, _No) else verdict


def _write(
    plan: SavePlan,
    state: dict[str, Any],
    folder: MemoryFolder,
    rank: int,
    host: str,
    save_id: str,
    moment: tuple[Any, Any],
    intact: Callable[[], None],
    written: Callable[[int], None],
) -> _Part:
    planner = SharedSavePlanner(state=state, intact=intact)
    planner.set_up_planner({})
    sources = [source_of(_of_present_size(item, state), planner) for item in plan.items]
    stream = ShardStream(sources, written=written)
    if sources:
        folder.write(shard_file(rank, save_id), stream)
    intact()
    file = FileEntry(stream.size_bytes, stream.crc32, rank, host)
    return _Part(rank, file, stream.starts, [source.size_bytes for source in sources], stream.crcs, moment)


def _of_present_size(item: WriteItem, state: Mapping[str, Any]) -> WriteItem:
    if item.type != WriteItemType.BYTE_IO:
        return item
    return replace(item, bytes_io_data=BytesIOWriteData(len(state[item.index.fqn].data)))


def _commit(
    before: Repeatable, said: Sequence[_Part | _No], folder: MemoryFolder, save_id: str, record: Mapping[str, Any]
) -> _No | bool:
    """On the coordinator; what is to be said to all: where it is committed, whether all have spread it."""
    refused = [each for each in said if isinstance(each, _No)]
    if refused:
        reasons = [each.reason for each in refused if each.reason is not None]
        return _No("; ".join(reasons) if reasons else None)
    parts = [each for each in said if isinstance(each, _Part)]
    late = next((each for each in parts if each.moment != parts[0].moment), None)
    if late is not None:
        return _No(f"rank {late.rank}: its values are of step {late.moment[0]}, rank 0's of {parts[0].moment[0]}")
    try:
        made = _manifest(before, parts, save_id, record, folder.url)
        data = formats.encode(made)
        folder.expect(made, len(data))
        folder.write(manifest_file(save_id), [data])
        folder.write(formats.MARKER_FILE, [formats.Marker.of(save_id, data).encode()])
    except CollectiveError:
        raise
    except Exception as error:
        return _No(f"rank {parts[0].rank}: {type(error).__name__}: {error}")
    return all(each.is_spread for each in parts)


def _manifest(
    before: Repeatable, parts: Sequence[_Part], save_id: str, record: Mapping[str, Any], url: str
) -> Manifest:
    results = []
    of_rank = {part.rank: part for part in parts}
    for planned in before.results:
        if not planned:
            continue
        part = of_rank[planned[0].storage_data.file.rank]
        name = shard_file(part.rank, save_id)
        for result, start, size, crc in zip(planned, part.starts, part.sizes, part.crcs, strict=True):
            written = Written(ByteRange(name, start, size, crc), result.storage_data.sizes, part.file)
            results.append(replace(result, size_in_bytes=size, storage_data=written))
    assert before.metadata is not None
    return manifest_of(before.metadata, results, save_id=save_id, record=record, url=url, created_s=time.time())
