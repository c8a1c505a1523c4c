"""Tensors as the pieces of them that a rank holds, and their bytes without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint.pieces import Piece
from lightning_dist.errors import CheckpointError


@dataclass(frozen=True)
class HostPiece:
    """A piece and its values.

    Attributes:
        piece: Which.
        data: Of the piece's sizes and type, on any device; saving is free of copies if it is contiguous and on the CPU.
    """

    piece: Piece
    data: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.data.shape) != self.piece.sizes or dtype_name(self.data.dtype) != self.piece.dtype:
            raise CheckpointError(
                f"{self.piece} was given values of {dtype_name(self.data.dtype)}{list(self.data.shape)}"
            )

    def part(self, piece: Piece) -> torch.Tensor:
        """The values of a piece inside this one, as a view."""
        view = self.data
        for dim, (offset, first, size) in enumerate(zip(piece.offsets, self.piece.offsets, piece.sizes, strict=True)):
            view = view.narrow(dim, offset - first, size)
        return view


@dataclass(frozen=True)
class Held:
    """What this rank holds of a tensor; to be saved, or to be filled. Put it into a state in place of the tensor.

    Attributes:
        pieces: They do not overlap; may be empty, if other ranks hold it all.
    """

    pieces: tuple[HostPiece, ...]


@dataclass(frozen=True)
class TiedTo:
    """Put into a state in place of a tensor that is the same as another.

    Attributes:
        name: Of the other in the state.
    """

    name: str


def held(name: str, value: torch.Tensor | Held) -> Held:
    """What this rank holds of a tensor: all of a plain one, the local shard of a DTensor."""
    if isinstance(value, Held):
        return value
    if value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(f"tensor {name!r} is {value.layout}, quantized or nested; save it as plain tensors")
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return Held(())
    local = local.detach()
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    chunks: Sequence[ChunkStorageMetadata] = _create_chunk_list(value)
    pieces = []
    for chunk in chunks:
        piece = Piece(name, dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes))
        # Strided shards are several chunks of one local tensor; torch finds them by their offsets.
        data = local if len(chunks) == 1 else _shard_of(value, chunk).detach()
        pieces.append(HostPiece(piece, data))
    return Held(tuple(pieces))


def dtype_name(dtype: torch.dtype) -> str:
    """A type's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's values in row-major order; its own memory if that is what it holds already."""
    plain = tensor.detach().to("cpu").contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.numel():
        return memoryview(b"")
    # Not reshape: a tensor of one value may have any stride and counts as contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_of(data: memoryview, dtype: str, sizes: Sequence[int]) -> torch.Tensor:
    """A tensor over bytes; it shares their memory."""
    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(tuple(sizes), dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(sizes))


def place_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What two tensors that are the same have in common; ``None`` for one without values."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel() or local.device.type == "meta":
        return None
    pointer = local.untyped_storage().data_ptr()
    return pointer, local.storage_offset(), tuple(tensor.shape), local.stride(), local.dtype, local.device


def _shard_of(value: torch.Tensor, chunk: ChunkStorageMetadata) -> torch.Tensor:
    return find_tensor_shard(value, MetadataIndex("", chunk.offsets))
