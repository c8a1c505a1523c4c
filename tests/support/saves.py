"""Sharded checkpoints by many ranks in one process: the steps that torch makes on each of them, one after another."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dist.checkpoint.host_pieces import Held, HostPiece, dtype_name
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.pieces import Piece
from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.checkpoint.shard_writer import ShardWriter
from lightning_dist.checkpoint.storage import Folder


def save_by_ranks(
    states: Sequence[dict[str, Any]],
    folder: Folder,
    *,
    chunk_bytes: int = 64,
    record: Mapping[str, Any] | None = None,
    created_s: float | None = None,
) -> Manifest:
    """Save the states of so many ranks, as ``dcp.save`` would."""
    clock = {} if created_s is None else {"clock": lambda: created_s}
    writers = [ShardWriter(folder, rank=r, host=f"host{r // 2}", record=record, **clock) for r in range(len(states))]
    planners = [SharedSavePlanner(chunk_bytes=chunk_bytes) for _ in states]
    plans = []
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)
    assert writers[0].manifest is not None
    return writers[0].manifest


def load_on_rank(state: dict[str, Any], folder: Folder) -> dict[str, Any]:
    """Fill a state, as ``dcp.load`` would on one of many ranks."""
    reader, planner = ShardReader(folder), FillPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return state


def tiling(shape: Sequence[int], cuts: int, rng: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of blocks that make up a tensor: it, and then its parts, are cut in two so many times."""
    blocks = [(tuple(0 for _ in shape), tuple(shape))]
    for _ in range(cuts):
        offsets, sizes = blocks.pop(rng.randrange(len(blocks)))
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            blocks.append((offsets, sizes))
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, sizes[dim])
        blocks.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        blocks.append((moved, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return blocks


def dealt(name: str, whole: torch.Tensor, world_size: int, rng: random.Random, *, cuts: int = 5) -> list[Held]:
    """A tensor cut into random blocks, each held by one or more random ranks; of values like ``whole``."""
    parts: list[list[HostPiece]] = [[] for _ in range(world_size)]
    for offsets, sizes in tiling(tuple(whole.shape), cuts, rng):
        piece = Piece(name, dtype_name(whole.dtype), tuple(whole.shape), offsets, sizes)
        view = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        for rank in rng.sample(range(world_size), rng.randint(1, world_size)):
            parts[rank].append(HostPiece(piece, view.clone()))
    return [Held(tuple(part)) for part in parts]


def every_type() -> dict[str, torch.Tensor]:
    """Tensors of all kinds that a checkpoint holds."""
    values = torch.arange(24).reshape(2, 3, 4)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16]
    tensors = {str(kind).removeprefix("torch."): values.to(kind) for kind in kinds}
    return {
        **tensors,
        "bool": values % 3 == 0,
        "scalar": torch.tensor(2.5),
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "one": torch.ones(1, 1, 1, 1),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, in type and in shape."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (one.clone(), other.clone()))
    return torch.equal(a, b)


def zeros_like(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors without their values; objects are ``None``."""
    return {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
