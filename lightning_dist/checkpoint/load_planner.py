"""What to read: a load planner of ``torch.distributed.checkpoint`` that fills given tensors, whatever part they are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_dist.checkpoint.host_pieces import Held, dtype_name, held
from lightning_dist.checkpoint.objects import Global, decode
from lightning_dist.errors import StateMismatchError

_SHOWN = 20


class FillPlanner(LoadPlanner):
    """Fills a flat state: name -> tensor, DTensor or :class:`Held` to be filled in place, or anything else, which is
    replaced by the object of that name. Names of the checkpoint that the state lacks are not read.

    Args:
        allow: See :func:`lightning_dist.checkpoint.objects.decode`.
    """

    def __init__(self, *, allow: Sequence[Global] = ()) -> None:
        self._allow = tuple(allow)
        self._state: dict[str, Any] = {}
        self._targets: dict[str, Held] = {}
        self._metadata = Metadata({})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state to fill."""
        self._state = state_dict
        self._metadata = metadata if metadata is not None else Metadata({})
        self._targets = {
            name: held(name, value) for name, value in state_dict.items() if isinstance(value, (torch.Tensor, Held))
        }

    def create_local_plan(self) -> LoadPlan:
        """What this rank needs.

        Raises:
            StateMismatchError: Names are missing, or shapes or types differ; names all of them.
        """
        faults = [fault for name in self._state for fault in self._faults(name)]
        if faults:
            more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise StateMismatchError(
                "the checkpoint does not fit what it is loaded into:\n  " + "\n  ".join(faults[:_SHOWN]) + more
            )
        items: list[ReadItem] = []
        for name in self._state:
            entry = self._metadata.state_dict_metadata[name]
            if isinstance(entry, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, entry, _chunks(self._targets[name]))
            else:
                items.append(_object_item(name))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it needs."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan is as this rank made it."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state."""
        name = read_item.dest_index.fqn
        self._state[name] = decode(value.getbuffer(), name, allow=self._allow)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a tensor that an item fills, as a view."""
        index = read_item.dest_index
        assert index.index is not None
        view = self._targets[index.fqn].pieces[index.index].data.detach()
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was filled in place."""

    def _faults(self, name: str) -> list[str]:
        entry = self._metadata.state_dict_metadata.get(name)
        value = self._state[name]
        if entry is None:
            return [f"{name}: is not in the checkpoint"]
        target = self._targets.get(name)
        if target is None:
            return [] if isinstance(entry, BytesStorageMetadata) else [f"{name}: is a tensor in the checkpoint"]
        if isinstance(entry, BytesStorageMetadata):
            return [f"{name}: is an object in the checkpoint, no tensor"]
        if isinstance(value, torch.Tensor):
            wanted = [(dtype_name(value.dtype), tuple(value.shape))]
        else:
            wanted = list({(part.piece.dtype, part.piece.shape): None for part in target.pieces})
        saved = (dtype_name(entry.properties.dtype), tuple(entry.size))
        return [f"{name}: saved {_text(saved)}, here {_text(here)}" for here in wanted if here != saved]


def _chunks(target: Held) -> list[ChunkStorageMetadata]:
    return [
        ChunkStorageMetadata(torch.Size(part.piece.offsets), torch.Size(part.piece.sizes)) for part in target.pieces
    ]


def _object_item(name: str) -> ReadItem:
    index, nothing = MetadataIndex(name), torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _text(what: tuple[str, tuple[int, ...]]) -> str:
    return f"{what[0]}{list(what[1])}"
