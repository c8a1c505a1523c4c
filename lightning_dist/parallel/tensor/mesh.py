"""One device mesh over the axes of a layout, so that FSDP2 can shard what tensor parallelism has split.

Note: the meshes must be slices of one.
    ``fully_shard`` concatenates the data mesh it is given with the mesh of each parameter that is a DTensor already,
    and refuses meshes that are not slices of the same root (``DeviceMesh._concatenate``, torch 2.13). Hence one mesh
    with all axes: ``mesh["tp"]`` for tensor parallelism, ``mesh["dp_shard"]`` for FSDP2.

Note: torch keeps meshes.
    DTensor's caches of sharding decisions hold the meshes they were made for, for as long as the process lives, and a
    mesh holds its groups; a later mesh of the same ranks would be given results placed on the old one, whose groups are
    gone. :meth:`PlacedMesh.close` empties both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.errors import PlacementError
from lightning_dist.topology.layout import Layout

MESH_AXES = ("dp_replicate", "dp_shard", "tp")

Block = list[list[list[int]]]
"""Ranks of one pipeline stage: [dp_replicate][dp_shard][tp]."""


class PlacedMesh(NamedTuple):
    """A mesh and the groups behind it.

    Attributes:
        mesh: The ranks that differ from this one along its axes only.
        groups: This rank's group of each axis of the mesh, in that order.
    """

    mesh: DeviceMesh
    groups: tuple[RankGroup, ...]

    def group(self, axis: str) -> RankGroup:
        """This rank's group along an axis of the mesh."""
        return next(group for group in self.groups if group.label == axis)

    def close(self) -> None:
        """Release the groups, once no DTensor of the mesh is used any more. Safe twice."""
        destroy(self.groups)
        vars(self.mesh).get("_pg_registry", {}).clear()
        _clear_sharding_prop_cache()


def make_mesh(
    layout: Layout,
    *,
    rank: int,
    device_type: str,
    timeout_s: float,
    axes: Sequence[str] | None = None,
    backend: str | None = None,
) -> PlacedMesh:
    """Make the mesh of a layout and its process groups; every rank of the world calls it.

    Args:
        layout: Which rank stands where.
        rank: This process's global rank.
        device_type: ``cpu`` or ``cuda``; on CUDA the current device must be set.
        timeout_s: Deadline of the groups' operations, in seconds.
        axes: The mesh's axes, in the order of :data:`MESH_AXES`, whatever their size; those longer than 1 if not given.
        backend: ``"gloo"``, ``"nccl"``, or ``None`` for the default group's.

    Raises:
        PlacementError: All of the axes have size 1, or the ranks cannot be put in the order that process groups have.
    """
    block = ascending(block_of(layout, layout.coordinates(rank).pp))
    for pp in range(layout.axes.pp):
        ascending(block_of(layout, pp))  # refused on all ranks alike
    chosen = [axis for axis in MESH_AXES if (getattr(layout.axes, axis) > 1 if axes is None else axis in axes)]
    if not chosen:
        raise PlacementError(f"{layout.axes}: nothing to make a mesh of; give tp, dp_shard or dp_replicate a size")
    own: list[RankGroup] = []
    for axis in chosen:
        for ranks in layout.groups(axis):
            tier = layout.cluster.tier_of(ranks).value
            group = make_group(sorted(ranks), rank=rank, label=axis, tier=tier, timeout_s=timeout_s, backend=backend)
            own += [group] if group is not None else []
    process_groups = [_process_group(group) for group in own]
    mesh = DeviceMesh.from_group(
        process_groups if len(chosen) > 1 else process_groups[0],
        device_type,
        mesh=_slice(block, rank, chosen) if len(chosen) > 1 else None,
        mesh_dim_names=tuple(chosen),
    )
    return PlacedMesh(mesh, tuple(own))


def _slice(block: Block, rank: int, axes: Sequence[str]) -> torch.Tensor:
    """The ranks of a block that differ from ``rank`` along ``axes`` only, an axis a dim."""
    ranks = torch.tensor(block, dtype=torch.int)
    place = (ranks == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if axis in axes else position for axis, position in zip(MESH_AXES, place, strict=True))
    return ranks[index]


def block_of(layout: Layout, pp: int) -> Block:
    """The ranks of a pipeline stage by coordinate."""
    axes = layout.axes
    return [
        [
            [layout.rank_at(pp=pp, dp_replicate=replica, dp_shard=shard, tp=tp) for tp in range(axes.tp)]
            for shard in range(axes.dp_shard)
        ]
        for replica in range(axes.dp_replicate)
    ]


def ascending(block: Block) -> Block:
    """The same groups with their members in ascending order along every axis.

    A process group orders its members by rank, whatever order is asked for, and a mesh coordinate must mean the same as
    the position in the group.

    Raises:
        PlacementError: No order of the coordinates has that.
    """
    num_shards, size = len(block[0]), len(block[0][0])
    by_tp = sorted(range(size), key=lambda tp: block[0][0][tp])
    by_shard = sorted(range(num_shards), key=lambda shard: block[0][shard][by_tp[0]])
    by_replica = sorted(range(len(block)), key=lambda replica: block[replica][by_shard[0]][by_tp[0]])
    ordered = [[[block[r][s][t] for t in by_tp] for s in by_shard] for r in by_replica]
    lines: list[Sequence[int]] = [line for plane in ordered for line in plane]
    lines += [[plane[s][t] for s in range(num_shards)] for plane in ordered for t in range(size)]
    lines += [[plane[s][t] for plane in ordered] for s in range(num_shards) for t in range(size)]
    wrong = next((line for line in lines if list(line) != sorted(line)), None)
    if wrong is not None:
        raise PlacementError(
            f"the group of ranks {list(wrong)} cannot be in ascending order together with the groups of the other "
            "axes, which a device mesh needs; number the ranks host by host (contiguous) or in turn (cyclic)"
        )
    return ordered


def _process_group(group: RankGroup) -> torch.distributed.ProcessGroup:
    assert group.process_group is not None
    return group.process_group
