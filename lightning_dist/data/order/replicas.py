"""Who reads: the replicas of the model, and which host each is on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run. Ranks that share a model are one replica and read the same.

    Attributes:
        host_of: Of each replica, the number of its host.
        own: Number of the one that this rank belongs to.
    """

    host_of: tuple[int, ...] = (0,)
    own: int = 0

    @property
    def count(self) -> int:
        """How many."""
        return len(self.host_of)


def of_nodes(num_replicas: int, own: int, num_nodes: int) -> Replicas:
    """Replicas on nodes of equal size, numbered node by node; on one node if they do not divide evenly."""
    nodes = num_nodes if num_nodes > 0 and num_replicas % num_nodes == 0 else 1
    return Replicas(tuple(replica // (num_replicas // nodes) for replica in range(num_replicas)), own)


def of_launcher(world_size: int, rank: int, environ: Mapping[str, str]) -> Replicas:
    """Each rank a replica, on the nodes that the launcher names.

    Only variables that are the same on all ranks count, since all have to come to the same result: torchrun's and
    SLURM's number of nodes. Another host than the right one costs bytes from storage, nothing else.
    """
    for name in ("GROUP_WORLD_SIZE", "SLURM_NNODES"):
        if environ.get(name, "").isdigit():
            return of_nodes(world_size, rank, int(environ[name]))
    return of_nodes(world_size, rank, 1)
