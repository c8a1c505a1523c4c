"""Saving once more what has been planned before: the same tensors on the same ranks, with other values.

A whole save takes a dozen collectives and a plan of every piece. Where one follows the other every few steps, nothing
of that changes, and two exchanges of numbers are enough::

    every rank    fills memory with its file, hands it to the keeper of its host and sends it to its buddy
    every rank    tells the coordinator whether it has, and the checksums of its items
    coordinator   fills the manifest's gaps, commits, and says whether it has

Whether the layout is the same is seen by each rank; if one says no, nothing is committed and all plan anew. Texts are
exchanged only where something has failed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_dist.checkpoint import manifest as formats
from lightning_dist.checkpoint.host_pieces import bytes_of
from lightning_dist.checkpoint.kept_save import KeptSave
from lightning_dist.checkpoint.manifest import FileEntry, Manifest
from lightning_dist.checkpoint.manifest_text import ManifestText, Part
from lightning_dist.checkpoint.save_ids import manifest_file, next_save_id, shard_file
from lightning_dist.checkpoint.save_planner import SharedSavePlanner, piece_of
from lightning_dist.checkpoint.shard_stream import starts_of
from lightning_dist.errors import CheckpointError, CollectiveError

# What a rank says of its file, and the coordinator of all: to be planned anew; failed; kept on this host only; sent to
# another, too; and, the last, that no keeper has older ones.
_ANEW, _FAILED, _KEPT, _SPREAD, _ALONE = range(5)
_COMMITTED = (_KEPT, _SPREAD, _ALONE)
_HEAD = 5


@dataclass(frozen=True)
class Repeatable:
    """What a save leaves for the next ones of the same layout.

    Attributes:
        plan: What this rank writes.
        manifest: Of the whole checkpoint; on the coordinator.
        results: What each rank has written; on the coordinator.
    """

    plan: SavePlan
    manifest: Manifest | None = None
    results: tuple[tuple[WriteResult, ...], ...] = ()


class _Said(NamedTuple):
    """What a rank says of its file, as numbers: these, then size and CRC-32 of each item."""

    code: int
    step: int
    epoch: int
    size: int
    crc: int
    items: Sequence[int] = ()

    @property
    def moment(self) -> tuple[int, int]:
        return self.step, self.epoch


class Repeater:
    """Saves by one plan, again and again; every rank has one, and makes it and calls it alike.

    Args:
        planned: What the save before has left on this rank.
        rank: Global rank.
        group: Whose ranks save; ``None`` for this process alone.
    """

    def __init__(self, planned: Repeatable, *, rank: int, group: dist.ProcessGroup | None) -> None:
        self._items = planned.plan.items
        self._rank = rank
        self._group = group
        self._names = list(dict.fromkeys(item.index.fqn for item in self._items if not _is_object(item)))
        self._objects = frozenset(item.index.fqn for item in self._items if _is_object(item))
        self._seen: list[Any] = []
        self._tensors: list[torch.Tensor | None] = []
        self._views: list[memoryview | None] = []
        self._text: ManifestText | None = None
        self._hosts: dict[int, str] = {}
        if planned.manifest is not None:
            files = [own[0].storage_data.file for own in planned.results if own]
            self._hosts = {file.rank: file.host for file in files}
            places = {
                own[0].storage_data.file.rank: [each.storage_data.place for each in own]
                for own in planned.results
                if own
            }
            self._text = ManifestText.of(planned.manifest, places)
        longest = torch.tensor(len(self._items))
        if group is not None:
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        self._length = _HEAD + 2 * int(longest)

    def is_for(self, objects: frozenset[str]) -> bool:
        """Whether the plan is one for objects of these names on this rank."""
        return self._objects == objects

    def save(
        self,
        state: Mapping[str, Any],
        kept: KeptSave,
        *,
        record: Mapping[str, Any],
        is_same: bool,
        intact: Callable[[], None],
        written: Callable[[int], None],
    ) -> bool | None:
        """Write a checkpoint; when this returns a truth value, it is committed.

        Args:
            state: As for :func:`lightning_dist.checkpoint.sharded.save`.
            kept: Where to; of the same name on all ranks.
            record: See :class:`~lightning_dist.checkpoint.manifest.Manifest`; the coordinator's counts.
            is_same: Whether this rank holds the same pieces as before.
            intact: Raises if values are not what they are to be.
            written: Told how many bytes this rank has written.

        Returns:
            Whether it is on all buddies, too. ``None`` on all ranks: they have to plan anew.

        Raises:
            CheckpointError: It could not be written; the same on all ranks.
        """
        save_id = next_save_id((), now_s=float(record.get("step") or 0), token=0)  # alike on all; the folder is new
        own, reason = _Said(_ANEW, 0, 0, 0, 0), ""
        if is_same:
            try:
                own = self._write(state, kept, shard_file(self._rank, save_id), record, intact)
                written(own.size)
            except CollectiveError:
                raise
            except Exception as error:
                own, reason = own._replace(code=_FAILED), f"rank {self._rank}: {type(error).__name__}: {error}"
        outcome = self._agreed(self._gathered(own), kept, save_id, record, reason)
        kept.settle(is_committed=outcome in _COMMITTED, is_alone=outcome == _ALONE)
        return None if outcome == _ANEW else outcome != _KEPT

    def _write(
        self,
        state: Mapping[str, Any],
        kept: KeptSave,
        name: str,
        record: Mapping[str, Any],
        intact: Callable[[], None],
    ) -> _Said:
        intact()
        parts = self._parts(state)
        sizes = [len(part) for part in parts]
        starts, size = starts_of(sizes)
        crcs = []
        step, epoch = (int(value) if value is not None else -1 for value in map(record.get, ("step", "epoch")))
        if not parts:
            return _Said(_SPREAD, step, epoch, 0, 0)
        with kept.room(size) as room:
            for part, (start, following) in zip(parts, pairwise([*starts, size]), strict=True):
                end = start + len(part)
                room[start:end] = part
                room[end:following] = bytes(following - end)  # what was there before is not part of the file
                crcs.append(zlib.crc32(part))
            crc = zlib.crc32(room)
        intact()
        kept.hand_over(name)
        code = _SPREAD if kept.spread(name) else _KEPT
        return _Said(
            code, step, epoch, size, crc, [number for pair in zip(sizes, crcs, strict=True) for number in pair]
        )

    def _parts(self, state: Mapping[str, Any]) -> list[memoryview]:
        """The bytes of each item. Tensors lie where they lay before, as long as the state has the same objects."""
        held = [state[name] for name in self._names]
        if len(held) != len(self._seen) or any(a is not b for a, b in zip(held, self._seen, strict=True)):
            planner = SharedSavePlanner(state=dict(zip(self._names, held, strict=True)))
            planner.set_up_planner({})
            tensors = [None if _is_object(item) else planner.part_of(piece_of(item)) for item in self._items]
            self._tensors, self._seen = tensors, held
            self._views = [None if each is None or not _lies_plain(each) else bytes_of(each) for each in tensors]
        parts = []
        for item, tensor, view in zip(self._items, self._tensors, self._views, strict=True):
            if view is not None:
                parts.append(view)
            else:
                parts.append(memoryview(state[item.index.fqn].data) if tensor is None else bytes_of(tensor))
        return parts

    def _gathered(self, own: _Said) -> list[_Said] | None:
        """What all say, on the coordinator."""
        if self._group is None:
            return [own]
        numbers = torch.zeros(self._length, dtype=torch.int64)
        numbers[: _HEAD + len(own.items)] = torch.tensor([*own[:_HEAD], *own.items])
        is_coordinator = self._group.rank() == 0
        gathered = [torch.empty_like(numbers) for _ in range(self._group.size())] if is_coordinator else None
        dist.gather(numbers, gathered, group=self._group, group_dst=0)
        if gathered is None:
            return None
        return [_Said._make([*row[:_HEAD], row[_HEAD:]]) for row in (each.tolist() for each in gathered)]

    def _agreed(
        self, said: Sequence[_Said] | None, kept: KeptSave, save_id: str, record: Mapping[str, Any], reason: str
    ) -> int:
        """Commit, if there is nothing against it; the outcome, the same on all ranks.

        Raises:
            CheckpointError: Something is; the same on all ranks.
        """
        outcome = _FAILED
        if said is not None:
            try:
                outcome = self._outcome(said, kept, save_id, record)
            except CollectiveError:
                raise
            except Exception as error:
                reason = f"rank {self._rank}: {type(error).__name__}: {error}"
        reasons = [reason]
        if self._group is not None:
            number = torch.tensor(outcome)
            dist.broadcast(number, group=self._group, group_src=0)
            outcome = int(number)
            if outcome == _FAILED:
                gathered: list[Any] = [None] * self._group.size()
                dist.all_gather_object(gathered, reason, group=self._group)
                reasons = gathered
        if outcome == _FAILED:
            kept.settle(is_committed=False, is_alone=False)
            raise CheckpointError(f"saving {kept.url} failed on {'; '.join(each for each in reasons if each)}")
        return outcome

    def _outcome(self, said: Sequence[_Said], kept: KeptSave, save_id: str, record: Mapping[str, Any]) -> int:
        """On the coordinator, what has become of the save."""
        if any(each.code == _FAILED for each in said):
            return _FAILED
        if any(each.code == _ANEW for each in said):
            return _ANEW
        late = next((rank for rank, each in enumerate(said) if each.moment != said[0].moment), None)
        if late is not None:
            raise CheckpointError(f"rank {late}'s values are of step {said[late].step}, rank 0's of {said[0].step}")
        is_spread = all(each.code == _SPREAD for each in said)
        is_everywhere = self._commit(said, kept, save_id, record, is_spread=is_spread)
        if not is_spread:
            return _KEPT
        return _ALONE if is_everywhere else _SPREAD

    def _commit(
        self,
        said: Sequence[_Said],
        kept: KeptSave,
        save_id: str,
        record: Mapping[str, Any],
        *,
        is_spread: bool,
    ) -> bool:
        assert self._text is not None, "the coordinator has it"
        parts: dict[int, Part] = {}
        for rank, host in self._hosts.items():
            size, crc, items = said[rank].size, said[rank].crc, said[rank].items
            starts, _ = starts_of(items[0::2])
            entry = FileEntry(size, crc, rank, host)
            parts[rank] = Part(shard_file(rank, save_id), entry, starts, items[0::2], items[1::2])
        manifest = self._text.encode(parts, save_id=save_id, created_s=time.time(), record=record)
        files = {part.file: part.entry.size for part in parts.values()}
        marker = formats.Marker.of(save_id, manifest).encode()
        return kept.commit(files, manifest_file(save_id), manifest, marker, is_alone=is_spread)


def _is_object(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def _lies_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are those of its own memory, so that they can be looked at again without a copy."""
    is_plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tensor.is_contiguous()
