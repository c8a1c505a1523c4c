"""A tensor's bytes in row-major order, a block at a time: what exports write, in bounded memory.

A block is some rows of a tensor, up to where all chunks of these rows end, so that each chunk is read once. Where a
tensor was cut along its rows, a block is a chunk; where it was cut along another dim, by tensor parallelism, a block is
the chunks that lie beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_dist.checkpoint.catalog import Checkpoint
from lightning_dist.checkpoint.host_pieces import Held, HostPiece, bytes_of
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.manifest import TensorEntry
from lightning_dist.checkpoint.pieces import Piece
from lightning_dist.checkpoint.shard_reader import ShardReader


def row_ranges(entry: TensorEntry) -> list[tuple[int, int]]:
    """First row of each block and the first after it; none for a tensor without rows or without values. Pure."""
    spans = sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in entry.chunks if chunk.place.size)
    ranges: list[tuple[int, int]] = []
    for start, stop in spans:
        if ranges and start < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return ranges


def read_blocks(checkpoint: Checkpoint, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor's values from the first to the last; checksums are compared. No other process takes part.

    Args:
        checkpoint: A committed checkpoint.
        name: Of a tensor, tied or not.

    Yields:
        A block, whose memory is used again for the next.
    """
    entry = checkpoint.manifest.tensor(name)
    dtype = getattr(torch, entry.dtype)
    if not entry.shape:
        value = torch.empty((), dtype=dtype)
        _read(checkpoint, name, entry, HostPiece(Piece.whole(name, entry.dtype, ()), value))
        yield bytes_of(value)
        return
    ranges = row_ranges(entry)
    memory = torch.empty(max((stop - start for start, stop in ranges), default=0), *entry.shape[1:], dtype=dtype)
    for start, stop in ranges:
        rows = memory[: stop - start]
        piece = Piece(name, entry.dtype, entry.shape, (start, *(0 for _ in entry.shape[1:])), tuple(rows.shape))
        _read(checkpoint, name, entry, HostPiece(piece, rows))
        yield bytes_of(rows)


def _read(checkpoint: Checkpoint, name: str, entry: TensorEntry, target: HostPiece) -> None:
    alone = replace(checkpoint.manifest, tensors={name: entry}, aliases={}, objects={})
    planner, reader = FillPlanner(), ShardReader(checkpoint.folder, manifest=alone, threads=1)
    planner.set_up_planner({name: Held((target,))}, reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner).wait()
