"""Sharded checkpoints by real ranks: any number of them saves, any other loads, and all end alike."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_dist.checkpoint import catalog, sharded
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.checkpoint.shard_writer import ShardWriter
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError, StateMismatchError, StorageError
from tests.support.ranks import RankPool
from tests.support.saves import save_by_ranks
from tests.support.tasks import RankContext

SHAPES = {"a": (13, 5), "b": (4,), "c": (3, 7, 2), "d": (1,)}
CHUNK_BYTES = 40
# Calls that make a mesh run in processes of their own: torch keeps meshes, and their groups, as long as the process.


def wholes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state_of(world_size: int, layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sharded over all ranks, over pairs of replicas, by columns, or whole everywhere."""
    if layout == "whole" or world_size == 1:
        return dict(tensors)
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        placements = [Shard(0)]
    return {
        name: distribute_tensor(
            tensor, mesh, [Shard(tensor.dim() - 1) if layout == "last" and p == Shard(0) else p for p in placements]
        )
        for name, tensor in tensors.items()
    }


def save_state(context: RankContext, path: Path, layout: str) -> list[int]:
    state = state_of(context.world_size, layout, wholes())
    state |= {f"rng/{context.rank}": {"rank": context.rank}, "loops": {"step": 5}}
    manifest = sharded.save(
        state,
        open_folder(path),
        rank=context.rank,
        host=f"h{context.rank}",
        record={"step": 5},
        chunk_bytes=CHUNK_BYTES,
    )
    assert (manifest is None) == (context.rank != 0)
    return [] if manifest is None else [entry.size for entry in manifest.files.values()]


def load_state(context: RankContext, path: Path, layout: str) -> list[str]:
    zeros = {name: torch.zeros_like(value) for name, value in wholes().items()}
    state = {**state_of(context.world_size, layout, zeros), "loops": None}
    sharded.load(state, open_folder(path))
    problems = [] if state["loops"] == {"step": 5} else ["loops"]
    for name, whole in wholes().items():
        value = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        if not torch.equal(value, whole):
            problems.append(name)
    return problems


@pytest.mark.parametrize("layout", ["whole", "first", "last", "hybrid"])
def test_four_ranks_save_and_any_load(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    sizes = ranks.run(save_state, world_size=4, args=(tmp_path / "c", layout), fresh=True)[0]
    assert len(sizes) == 4
    if layout == "whole":
        tensors = catalog.open_checkpoint(open_folder(tmp_path / "c"), full=True).manifest.tensors
        assert sum(entry.size_bytes for entry in tensors.values()) == sum(t.nbytes for t in wholes().values())
    for world_size, other in ((1, "whole"), (3, "first"), (2, "last"), (4, "hybrid")):
        assert (
            ranks.run(load_state, world_size=world_size, args=(tmp_path / "c", other), fresh=True) == [[]] * world_size
        )


def test_a_chain_of_layouts(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_state, world_size=1, args=(tmp_path / "c", "whole"))
    assert ranks.run(load_state, world_size=4, args=(tmp_path / "c", "first"), fresh=True) == [[]] * 4
    ranks.run(save_state, world_size=3, args=(tmp_path / "c", "first"), fresh=True)  # over the one that is there
    assert ranks.run(load_state, world_size=2, args=(tmp_path / "c", "whole")) == [[]] * 2


def by_torch(context: RankContext, path: Path) -> bool:
    """Torch's own calls, with a group of our own."""
    group = dist.new_group(backend="gloo")
    writer = ShardWriter(open_folder(path), rank=context.rank, host="h")
    dcp.save(wholes(), storage_writer=writer, planner=SharedSavePlanner(chunk_bytes=64), process_group=group)
    target = {name: torch.zeros_like(value) for name, value in wholes().items()}
    dcp.load(target, storage_reader=ShardReader(open_folder(path)), planner=FillPlanner(), process_group=group)
    return all(torch.equal(target[name], value) for name, value in wholes().items())


def test_torchs_calls_work_with_our_parts(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(by_torch, world_size=2, args=(tmp_path / "c",)) == [True, True]
    names = {path.name.split("-")[0] for path in (tmp_path / "c").iterdir()}
    assert names == {"rank00000", "rank00001", "manifest", "COMMITTED"}


def fail_on_one_rank(context: RankContext, path: Path) -> tuple[str, str, bool]:
    """What each rank is told when one cannot write, and when the checkpoint is damaged or does not fit."""
    folder = open_folder(path / "good")
    sharded.save(wholes(), folder, rank=context.rank, host="h")
    said = []
    bad = open_folder(path / "bad" if context.rank == 0 else path / "file" / "bad")
    try:
        sharded.save(wholes(), bad, rank=context.rank, host="h", chunk_bytes=CHUNK_BYTES)
    except StorageError as error:
        said.append(str(error).partition(" failed on ")[2])
    try:
        sharded.load({"a": torch.zeros(2), **({"x": None} if context.rank else {})}, folder)
    except StateMismatchError as error:
        said.append(str(error).partition(" failed on ")[2])
    if context.rank == 0:
        next((path / "good").glob("manifest-*.json")).unlink()
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            sharded.load(wholes(), folder)
        except DamagedCheckpointError as error:
            return said[0], said[1], "ranks 0, 1: " in str(error)
    return said[0], said[1], False


def test_all_ranks_end_alike(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    told = ranks.run(fail_on_one_rank, world_size=2, args=(tmp_path,))
    assert told[0] == told[1]
    write, fit, damaged = told[0]
    assert write.startswith("rank 1: cannot write")
    assert fit.startswith("rank 0: the checkpoint does not fit")
    assert "rank 1: the checkpoint does not fit" in fit
    assert "x: is not in the checkpoint" in fit
    assert damaged
    assert not (tmp_path / "bad/COMMITTED").exists()


def load_two_saves(context: RankContext, path: Path) -> str:
    """Each rank sees the files of another save, as where one host's view of storage is old."""
    folder = open_folder(path / str(context.rank))
    save_by_ranks([wholes()], folder)
    try:
        sharded.load(wholes(), folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_saves_are_not_taken_for_one(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(load_two_saves, world_size=2, args=(tmp_path,)):
        assert "ranks see the files of different saves there (rank " in text
        for rank in range(2):
            assert f"rank {rank}: {catalog.committed_save(open_folder(tmp_path / str(rank)))}" in text
