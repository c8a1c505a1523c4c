"""What the shards of a model travel over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_dist.comm.agreement import Agreement, GroupVote, PartingVote
from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.feedback import Feedback
from lightning_dist.comm.groups import destroy
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.row_blocks import RowAverage
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.parallel.sharded import Sharded
from lightning_dist.topology.layout import Layout


@dataclass(frozen=True)
class ShardLinks:
    """What shards travel over.

    Attributes:
        layout: Which rank stands where.
        axes: Of the layout, over which shards are spread.
        mesh: [shards], this rank's group of shards.
        scatter: Lanes over the same ranks.
        secondary: [hosts, ranks a host]: where parameters are kept between forward and backward; ``None``: nowhere.
        secondary_scatter: Lanes over the ranks of the host.
        across: Sums shards over replicas; ``None`` where there is one replica.
        world: All ranks that hold the model, or the same stages of it; for parameters that are whole on each.
        collectives: The seam.
        vote: How ranks learn what any of them used.
        operation: Opens the seam around an operation of the default process group.
        groups: Process groups to release at the end.
        brings_values: Whether values are still to be made alike on all ranks, rank 0's.
        gathers: How parameters travel where they leave a host; ``None``: as they are.
        inside: The ranks that train together once others train apart; ``None``: all do.
        rows: Averages rows of matrices over hosts in another way than value by value; ``None``: nobody does.
        in_host: Lanes over the ranks of this host, for that.
    """

    layout: Layout
    axes: frozenset[str]
    mesh: DeviceMesh
    scatter: HierarchicalScatter
    secondary: DeviceMesh | None
    secondary_scatter: HierarchicalScatter | None
    across: HierarchicalAllReduce | None
    world: RankGroup
    collectives: Collectives
    vote: Agreement | GroupVote | PartingVote
    operation: Callable[[str], AbstractContextManager[None]]
    groups: Sequence[RankGroup]
    brings_values: bool = True
    gathers: Codec | None = None
    inside: RankGroup | None = None
    rows: RowAverage | None = None
    in_host: HierarchicalScatter | None = None

    @property
    def feedback(self) -> Feedback | None:
        """What is owed of gradients; ``None``: nothing is lost of them."""
        return self.scatter.feedback if self.rows is None else self.rows.feedback

    @property
    def shards(self) -> RankGroup:
        """The ranks that share the shards."""
        members = self.scatter.members
        return RankGroup(members, self.scatter.index, self.mesh.get_group(), "shards", self.world.tier)

    def part(self, model: Sharded) -> None:
        """Replicas of a model train apart from now on."""
        if self.inside is not None:
            model.part(self.inside)
        if isinstance(self.vote, PartingVote):
            self.vote.part()

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""
        for part in (self.rows, self.in_host, self.across, self.scatter, self.secondary_scatter, self.vote):
            if part is not None:
                part.close()
        destroy(self.groups)
        # DTensor's caches keep meshes, and take a later mesh of the same ranks for the one they know (torch 2.13).
        _clear_sharding_prop_cache()
        for mesh in (self.mesh, self.secondary):
            if mesh is not None:
                mesh._pg_registry.clear()
