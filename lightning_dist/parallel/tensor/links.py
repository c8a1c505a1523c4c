"""What a split model is connected by: who shares layers, who holds the same parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import destroy
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.parallel.tensor.mesh import PlacedMesh
from lightning_dist.topology.layout import Layout


@dataclass(frozen=True)
class TensorLinks:
    """The groups of a split model.

    Attributes:
        layout: Which rank stands where.
        placed: The mesh; its axis ``tp`` is this rank's group of those that share layers, and ``dp_shard``, if it has
            that, those of the shards.
        data: The ranks that hold the same parts and read other batches, this one among them; for the main thread.
        scatter: Lanes over the same ranks; ``None`` where nothing is averaged by them.
        collectives: The seam.
    """

    layout: Layout
    placed: PlacedMesh
    data: RankGroup
    scatter: HierarchicalScatter | None
    collectives: Collectives

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share layers."""
        return self.placed.mesh["tp"] if self.placed.mesh.ndim > 1 else self.placed.mesh

    @property
    def tensor(self) -> RankGroup:
        """The ranks that share layers."""
        return self.placed.group("tp")

    @property
    def operation(self) -> Callable[[str], AbstractContextManager[None]]:
        """Opens the seam around an operation of the ranks that share layers, given its name."""
        return lambda name: self.collectives.operation(name, self.tensor)

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""
        if self.scatter is not None:
            self.scatter.close()
        destroy([self.data])
        self.placed.close()
