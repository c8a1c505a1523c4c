"""What the ranks of a pipeline, and those that hold the same stages of other pipelines, are connected by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import destroy
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.errors import CollectiveError
from lightning_dist.parallel.pipeline.channels import Channels
from lightning_dist.parallel.tensor import PlacedMesh
from lightning_dist.topology.layout import Layout


class LayerMesh:
    """The mesh over which the layers of a stage are split, until :meth:`close`.

    Its connections close when nothing refers to its groups any more; so these are kept nowhere else.

    Args:
        placed: Over the ranks that share the layers.
    """

    def __init__(self, placed: PlacedMesh) -> None:
        self._placed: PlacedMesh | None = placed

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; one axis."""
        assert self._placed is not None, "not closed"
        return self._placed.mesh

    def close(self) -> None:
        """Close the connections, so that who waits for this rank is told at once. Safe to call twice."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()


@dataclass(frozen=True)
class StageLinks:
    """The groups of a model cut into stages.

    Attributes:
        layout: Which rank stands where.
        pipeline: The ranks of this rank's pipeline, in order.
        data: The ranks that hold the same stages and read other batches, this one among them.
        channels: Between stages.
        scatter: Lanes over the ranks of ``data``; ``None`` where there is one.
        collectives: The seam.
        groups: Process groups to release at the end.
        readers: The ranks that read the same batches: those of the pipeline, and those that share layers with them.
        tensor: The ranks that share the layers of this rank's stages; ``None`` where layers are whole.
        layers: The mesh of the same ranks, for the layers themselves.
    """

    layout: Layout
    pipeline: RankGroup
    data: RankGroup
    channels: Channels
    scatter: HierarchicalScatter | None
    collectives: Collectives
    groups: list[RankGroup]
    readers: RankGroup
    tensor: RankGroup | None
    layers: LayerMesh | None

    @property
    def among_replicas(self) -> Callable[[str], AbstractContextManager[None]]:
        """Opens the seam around an operation of the ranks that hold the same stages, given its name."""
        return lambda name: self.collectives.operation(name, self.data)

    def among_sharers(self, name: str) -> AbstractContextManager[None]:
        """Opens the seam around an operation of the ranks that share layers, given its name."""
        assert self.tensor is not None, "layers are split"
        return self.collectives.operation(name, self.tensor)

    def raise_if_between_sharers(self, error: Exception, doing: str) -> None:
        """What went wrong between ranks that share layers, in a collective of DTensor's own, is raised as such.

        Args:
            error: Of a layer, or of what computes the loss.
            doing: What it came out of.

        Raises:
            CollectiveError: It was that.
        """
        if self.tensor is None or not isinstance(error, RuntimeError):
            return
        try:
            with self.collectives.opening(doing, self.tensor):
                raise error
        except CollectiveError:
            raise
        except RuntimeError:
            return

    def hang_up(self) -> None:
        """Close the connections by which ranks wait for each other inside a batch. Safe to call twice."""
        self.channels.close()
        if self.layers is not None:
            self.layers.close()

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""
        self.hang_up()
        if self.scatter is not None:
            self.scatter.close()
        destroy(self.groups)
