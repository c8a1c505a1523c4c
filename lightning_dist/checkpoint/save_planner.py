"""Who writes what: a save planner of ``torch.distributed.checkpoint`` that shares the work among those who hold it.

Note: sharing. Each rank says what it holds. The coordinator groups blocks by the set of ranks that hold them alike, and
deals the blocks of each set to its ranks by :func:`lightning_dist.checkpoint.pieces.deal`. Under ``ddp`` all ranks
therefore write an equal part, under hybrid shards the replicas of each shard. A rank that has dealt for itself already
(it copied only its part out of the device) puts :class:`Held` into the state: its pieces have one holder.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from lightning_dist.checkpoint import coverage
from lightning_dist.checkpoint.host_pieces import Held, HostPiece, TiedTo, held, place_of
from lightning_dist.checkpoint.objects import Encoded, Global, encode
from lightning_dist.checkpoint.pieces import Piece, deal
from lightning_dist.errors import CheckpointError

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class LocalState:
    """What a rank tells the coordinator besides its items.

    Attributes:
        ties: Name of a tensor -> name of the one that it is.
        moment: Which values these are, e.g. of which step; alike on all ranks, or they make no checkpoint.
    """

    ties: Mapping[str, str]
    moment: Mapping[str, Any]


def nothing_to_check() -> None:
    """Values that nobody else can change are what they are to be."""


class SharedSavePlanner(SavePlanner):
    """Plans a save of a flat state: name -> tensor, DTensor, :class:`Held`, :class:`TiedTo`, or an object.

    Names of objects that differ between ranks must differ too, e.g. ``rng/3``; of equal names one rank writes its own.
    Tensors that are the same in memory are found and stored once.

    Args:
        chunk_bytes: Largest block that is written, checked and read as one.
        allow: See :func:`lightning_dist.checkpoint.objects.encode`.
        moment: See :class:`LocalState`.
        state: The state, if it is not what torch hands over, which torch goes through entry by entry, with two log
            records for each.
        intact: Raises if the state's values are not what they are to be; called before anything is planned, where what
            it raises reaches all ranks.
    """

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        allow: Sequence[Global] = (),
        moment: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        intact: Callable[[], None] = nothing_to_check,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._allow = tuple(allow)
        self._moment = dict(moment or {})
        self._state = state
        self._intact = intact
        self._held: dict[str, Held] = {}
        self._objects: dict[str, Encoded] = {}
        self._ties: dict[str, str] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state. Objects are turned into bytes here; tensors are read when they are written."""
        self._intact()
        self._held, self._objects, self._ties = {}, {}, {}
        first: dict[tuple[object, ...], str] = {}
        for name, value in (state_dict if self._state is None else self._state).items():
            if isinstance(value, TiedTo):
                self._ties[name] = value.name
            elif isinstance(value, Held):
                self._held[name] = value
            elif isinstance(value, torch.Tensor):
                place = place_of(value)
                if place is not None and first.setdefault(place, name) != name:
                    self._ties[name] = first[place]
                self._held[name] = held(name, value)
            elif isinstance(value, Encoded):
                self._objects[name] = value
            else:
                self._objects[name] = encode(value, name, allow=self._allow)

    def create_local_plan(self) -> SavePlan:
        """All that this rank holds, tied tensors under both names."""
        items = [_tensor_item(part.piece) for value in self._held.values() for part in value.pieces]
        items += [_object_item(name, len(encoded.data)) for name, encoded in self._objects.items()]
        return SavePlan(items, planner_data=LocalState(self._ties, self._moment))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deal what several ranks hold, and see that all of each tensor is held by somebody."""
        _refuse_different_moments(all_plans)
        ties = _agreed_ties(all_plans)
        items: list[list[WriteItem]] = [[] for _ in all_plans]
        for holders, pieces in _by_holders(all_plans, ties).items():
            for rank, dealt in deal(pieces, holders, max_bytes=self._chunk_bytes).items():
                items[rank] += [_tensor_item(piece) for piece in dealt]
        for rank, item in _objects_of(all_plans):
            items[rank].append(item)
        plans = [replace(plan, items=part, planner_data=None) for plan, part in zip(all_plans, items, strict=True)]
        return plans, _metadata(plans, ties)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan is as the coordinator made it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of an item: a view of the tensor, or the bytes of an object."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[name].data)
        return self.part_of(piece_of(write_item))

    def part_of(self, piece: Piece) -> torch.Tensor:
        """The values of a piece that this rank holds, as a view."""
        return self._holder(piece).part(piece)

    def _holder(self, piece: Piece) -> HostPiece:
        return next(part for part in self._held[piece.name].pieces if part.piece.holds(piece))


def piece_of(item: WriteItem) -> Piece:
    """The piece that an item of a tensor stands for."""
    data = item.tensor_data
    assert data is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return Piece(item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _tensor_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    properties = TensorProperties(dtype=getattr(torch, piece.dtype))
    return WriteItem(
        index=MetadataIndex(piece.name, piece.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.shape)),
    )


def _object_item(name: str, size_bytes: int) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(size_bytes))


def _refuse_different_moments(plans: Sequence[SavePlan]) -> None:
    said = [plan.planner_data.moment for plan in plans]
    for rank, moment in enumerate(said):
        if moment != said[0]:
            raise CheckpointError(
                f"ranks save values of different moments: rank 0 has {_moment_text(said[0])}, rank {rank} has "
                f"{_moment_text(moment)}; let all ranks save in the same hook of the same batch"
            )


def _moment_text(moment: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in moment.items())


def _agreed_ties(plans: Sequence[SavePlan]) -> dict[str, str]:
    """Ties that hold on every rank that has the name; a tensor that is tied on some ranks only is stored on its own."""
    targets: dict[str, set[str]] = defaultdict(set)
    stored: set[str] = set()
    for plan in plans:
        own = plan.planner_data.ties
        # A rank whose shard is empty cannot see that two tensors share memory, and has no say.
        stored |= {item.index.fqn for item in plan.items if _has_values(item)} - own.keys()
        for name, target in own.items():
            targets[name].add(target)
    ties = {name: next(iter(found)) for name, found in targets.items() if len(found) == 1 and name not in stored}
    for name, target in ties.items():
        if target not in stored:
            raise CheckpointError(f"{name!r} is tied to {target!r}, which no rank holds under that name")
    return ties


def _has_values(item: WriteItem) -> bool:
    return item.tensor_data is None or piece_of(item).numel > 0


def _by_holders(plans: Sequence[SavePlan], ties: Mapping[str, str]) -> dict[tuple[int, ...], list[Piece]]:
    holders: dict[Piece, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO and item.index.fqn not in ties:
                holders.setdefault(piece_of(item), []).append(rank)
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece, ranks in holders.items():
        groups[tuple(dict.fromkeys(ranks))].append(piece)
    return groups


def _objects_of(plans: Sequence[SavePlan]) -> list[tuple[int, WriteItem]]:
    """Each object by the first rank that has its name; it may be of another length on others."""
    found: dict[str, tuple[int, WriteItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                found.setdefault(item.index.fqn, (rank, item))
    return list(found.values())


def _metadata(plans: Sequence[SavePlan], ties: Mapping[str, str]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    objects: dict[str, BytesStorageMetadata] = {}
    for plan in plans:
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                objects[name] = BytesStorageMetadata()
                continue
            entry = tensors.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            if entry.size != data.size or entry.properties.dtype != data.properties.dtype:
                raise CheckpointError(
                    f"ranks disagree on tensor {name!r}: {entry.properties.dtype}{list(entry.size)} and "
                    f"{data.properties.dtype}{list(data.size)}"
                )
            entry.chunks.append(data.chunk)
    for name in tensors.keys() & objects.keys():
        raise CheckpointError(f"{name!r} is a tensor on one rank and an object on another; give them different names")
    for name, entry in tensors.items():
        blocks = [coverage.Block(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        fault = coverage.fault(tuple(entry.size), blocks)
        if fault is not None:
            raise CheckpointError(
                f"tensor {name!r} {list(entry.size)} is not held once and whole by all ranks: {fault}"
            )
    return Metadata({**tensors, **objects}, planner_data=dict(ties))
