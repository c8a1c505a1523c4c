"""Parallel axes laid over the ranks of a cluster; pure.

The axes are, from outside in, ``pp`` (pipeline stages), ``dp_replicate`` (replicas of the shards), ``dp_shard``
(shards of one replica) and ``tp`` (tensor parallel). A :class:`Layout` says which rank stands at which coordinate,
lists the groups of any axis, and can describe itself: which group crosses which tier, with how many bytes a step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from lightning_dist.errors import PlacementError, unknown_option
from lightning_dist.topology.hierarchy import best_order
from lightning_dist.topology.spec import Cluster, Tier

AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Axes:
    """Size of each axis, from outside in; their product is the number of ranks.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Replicas, each of which holds all shards.
        dp_shard: Shards of one replica.
        tp: Ranks that share each layer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in zip(AXIS_NAMES, astuple(self), strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlacementError(f"axis {name} has a size of at least 1, got {size!r}")

    @property
    def size(self) -> int:
        """Number of ranks the axes need."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(AXIS_NAMES, astuple(self), strict=True))


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


class GroupUse(NamedTuple):
    """One group of a layout and what it carries.

    Attributes:
        axis: Name of the axis.
        ranks: Members, in the order of their coordinate.
        tier: The slowest tier the group crosses.
        bytes_per_rank: Bytes each member sends in one optimizer step.
    """

    axis: str
    ranks: tuple[int, ...]
    tier: Tier
    bytes_per_rank: float


@dataclass(frozen=True)
class Layout:
    """Which rank stands at which coordinate.

    Attributes:
        cluster: Where the ranks sit.
        axes: Sizes of the axes.
        order: The rank at each coordinate, ``tp`` running fastest and ``pp`` slowest; each rank once.

    Raises:
        PlacementError: The axes need another number of ranks, or a ``tp`` group crosses hosts; the message names the
            groups and the cheapest legal placement.
    """

    cluster: Cluster
    axes: Axes
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_size(self.cluster, self.axes)
        if sorted(self.order) != list(range(self.cluster.world_size)):
            raise PlacementError(f"the order must list each of the ranks 0 to {self.cluster.world_size - 1} once")
        crossing = [group for group in self.groups("tp") if self.cluster.tier_of(group) is not Tier.HOST]
        if crossing:
            raise _crossing_error(self.cluster, self.axes, crossing)

    @classmethod
    def in_rank_order(cls, cluster: Cluster, axes: Axes) -> Layout:
        """The axes over ranks 0, 1, 2, ... as they are numbered, wherever they sit; pipelines one after another."""
        return cls(cluster, axes, _by_pipeline(range(cluster.world_size), axes))

    @classmethod
    def place(cls, cluster: Cluster, axes: Axes) -> Layout:
        """The axes where they cost least: ``tp`` inside a host, then ``pp`` too if it fits, then data axes by host.

        A pipeline that does not fit a host goes over neighbours, so that as few of its boundaries as possible cross.

        Uneven hosts and cyclic ranks are fine as long as ``tp`` divides the number of ranks of each host.

        Raises:
            PlacementError: No order of the ranks keeps ``tp`` inside hosts.
        """
        _check_size(cluster, axes)
        order = _fitting_order(cluster, axes)
        if order is None:
            packed = [tuple(chunk) for chunk in _chunks(best_order(cluster), axes.tp)]
            raise _crossing_error(cluster, axes, [g for g in packed if cluster.tier_of(g) is not Tier.HOST])
        return cls(cluster, axes, order)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands."""
        self.cluster.host_of(rank)  # refuses a rank out of range
        position = self._positions[rank]
        position, tp = divmod(position, self.axes.tp)
        position, dp_shard = divmod(position, self.axes.dp_shard)
        pp, dp_replicate = divmod(position, self.axes.dp_replicate)
        return Coordinates(pp, dp_replicate, dp_shard, tp)

    def rank_at(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0, tp: int = 0) -> int:
        """The rank at a coordinate."""
        position = 0
        for name, size, index in zip(AXIS_NAMES, astuple(self.axes), (pp, dp_replicate, dp_shard, tp), strict=True):
            if not 0 <= index < size:
                raise PlacementError(f"{name}={index} is out of range; axis {name} has size {size}")
            position = position * size + index
        return self.order[position]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along the given axes, group by group; together they partition the world.

        ``groups("dp_replicate", "dp_shard")`` are the groups over which gradients are averaged. Members follow their
        coordinates, in the order of the axes from outside in.
        """
        for axis in axes:
            if axis not in AXIS_NAMES:
                raise unknown_option("axis", axis, AXIS_NAMES)
        sizes = astuple(self.axes)
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        inside = [
            range(0, size * s, s) for name, size, s in zip(AXIS_NAMES, sizes, strides, strict=True) if name in axes
        ]
        across = [
            range(0, size * s, s) for name, size, s in zip(AXIS_NAMES, sizes, strides, strict=True) if name not in axes
        ]
        offsets = [sum(steps) for steps in itertools.product(*inside)]
        return tuple(
            tuple(self.order[base + offset] for offset in offsets) for base in map(sum, itertools.product(*across))
        )

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of a rank along the given axes."""
        return next(group for group in self.groups(*axes) if rank in group)

    def describe(self, *, gradient_bytes: float, tp_bytes: float = 0.0, pp_bytes: float = 0.0) -> tuple[GroupUse, ...]:
        """Every group of every axis longer than 1: the tier it crosses and the bytes a rank sends a step.

        Each rank holds M = ``gradient_bytes`` / (pp * tp). Over s shards it sends 2M(s-1)/s (a reduce-scatter of
        gradients and a gather of parameters), over r replicas 2(M/s)(r-1)/r (rings; Patarasu and Yuan 2009).

        Args:
            gradient_bytes: Size of the whole model's gradients.
            tp_bytes: Bytes of activations that a ``tp`` group all-reduces in a step.
            pp_bytes: Bytes that cross each boundary between stages in a step, forward and backward together.
        """
        axes = self.axes
        held_bytes = gradient_bytes / (axes.pp * axes.tp)
        sent = {
            "pp": pp_bytes * (axes.pp - 1) / axes.pp,
            "dp_replicate": 2 * held_bytes / axes.dp_shard * (axes.dp_replicate - 1) / axes.dp_replicate,
            "dp_shard": 2 * held_bytes * (axes.dp_shard - 1) / axes.dp_shard,
            "tp": 2 * tp_bytes * (axes.tp - 1) / axes.tp,
        }
        return tuple(
            GroupUse(axis, group, self.cluster.tier_of(group), sent[axis])
            for axis, size in zip(AXIS_NAMES, astuple(axes), strict=True)
            if size > 1
            for group in self.groups(axis)
        )

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.order)}


def _check_size(cluster: Cluster, axes: Axes) -> None:
    if axes.size != cluster.world_size:
        raise PlacementError(
            f"{axes} needs {axes.size} ranks, the cluster has {cluster.world_size}; "
            "the product of the axes must be the number of ranks"
        )


def _fitting_order(cluster: Cluster, axes: Axes) -> tuple[int, ...] | None:
    """Ranks by coordinate such that ``tp`` stays inside hosts, and each pipeline sits together; ``None`` if impossible.

    Pipelines that fit a host are not put across two; so where hosts are uneven, what is left over on them makes the
    others.
    """
    if any(size % axes.tp for size in cluster.ranks_per_host):
        return None
    return _by_pipeline(_together(cluster, axes.tp * axes.pp), axes)


def _together(cluster: Cluster, size: int) -> tuple[int, ...]:
    """The ranks by switch and host, such that groups of ``size`` in a row leave their host as rarely as can be."""
    packed = best_order(cluster)
    inside: list[int] = []
    left_over: list[int] = []
    for host in dict.fromkeys(map(cluster.host_of, packed)):
        ranks = [rank for rank in packed if cluster.host_of(rank) == host]
        fitting = len(ranks) // size * size
        inside += ranks[:fitting]
        left_over += ranks[fitting:]
    return (*inside, *left_over)


def _by_pipeline(ranks: Sequence[int], axes: Axes) -> tuple[int, ...]:
    """The order of a layout whose pipelines are neighbours in ``ranks``, stage by stage."""
    pipelines = _chunks(ranks, axes.tp * axes.pp)
    return tuple(
        rank
        for stage in range(axes.pp)
        for pipeline in pipelines
        for rank in pipeline[stage * axes.tp : (stage + 1) * axes.tp]
    )


def _crossing_error(cluster: Cluster, axes: Axes, crossing: Sequence[tuple[int, ...]]) -> PlacementError:
    """The error for ``tp`` groups that cross hosts: which, and what to write instead."""
    named = "; ".join(
        f"{list(group)} on {', '.join(dict.fromkeys(map(cluster.host_of, group)))}" for group in crossing[:4]
    )
    more = f" and {len(crossing) - 4} more" if len(crossing) > 4 else ""
    if _fitting_order(cluster, axes) is not None:
        advice = "the same axes fit if ranks are placed by host: use Layout.place(cluster, axes)"
    else:
        advice = f"the cheapest legal placement is {_cheapest_axes(cluster, axes)}"
    return PlacementError(f"{axes}: tp must stay inside a host, but tp groups cross hosts: {named}{more}; {advice}")


def _cheapest_axes(cluster: Cluster, axes: Axes) -> Axes:
    """The nearest axes that fit: the largest ``tp`` that does, the rest to the axis that sends least between hosts."""
    tp = math.gcd(axes.tp, *cluster.ranks_per_host)
    spare = axes.tp // tp
    candidates = [
        replace(axes, tp=tp, dp_shard=axes.dp_shard * spare),
        replace(axes, tp=tp, pp=axes.pp * spare),
    ]
    return min(candidates, key=lambda candidate: _crossing_bytes(Layout.place(cluster, candidate)))


def _crossing_bytes(layout: Layout) -> float:
    """Bytes of gradients that groups crossing hosts send in a step, per byte of gradient."""
    uses = layout.describe(gradient_bytes=1.0)
    return sum(use.bytes_per_rank * len(use.ranks) for use in uses if use.tier is not Tier.HOST)


def _chunks(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]
