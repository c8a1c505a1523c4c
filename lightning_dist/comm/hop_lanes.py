"""Opening a hierarchical reduce-scatter and all-gather: the lanes that a cluster asks for, and what they go over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.groups import make_leg_group
from lightning_dist.comm.hop_links import GroupLink, HopLink, MemoryLink, slot_bytes_for, window_bytes
from lightning_dist.comm.hops import HopMove, hand_in, hand_in_encoded, hand_out, spread, sum_encoded, sum_up
from lightning_dist.comm.host_memory import holds_on_all_ranks, open_memory_of
from lightning_dist.comm.legs import keep_for_current_stream
from lightning_dist.comm.segments import Segments
from lightning_dist.comm.shared_memory import HostMemory
from lightning_dist.topology import Cluster, Hierarchy, Tier, hierarchy_of
from lightning_dist.topology.hierarchy import Leg
from lightning_dist.topology.routes import Hop, route_of


@dataclass(frozen=True)
class HopLane:
    """One lane.

    Attributes:
        name: Of its thread, and of its events.
        run: Takes a chunk over the hop; lets it pass where this rank takes no part, or is alone.
    """

    name: str
    run: Callable[[Segments], None]


@dataclass(frozen=True)
class HopLanes:
    """The lanes of one rank.

    Attributes:
        members: Global ranks of its group, by shard.
        scatter: The lanes of a reduce-scatter, in order.
        gather: The lanes of an all-gather, in order.
        groups: Process groups to release at the end.
        memory: What the group's ranks of this host share; ``None`` where they share none.
    """

    members: tuple[int, ...]
    scatter: tuple[HopLane, ...]
    gather: tuple[HopLane, ...]
    groups: tuple[RankGroup, ...]
    memory: HostMemory | None


@dataclass(frozen=True)
class LaneOpening:
    """What is needed to open lanes; every rank of the world has the same, but for its own number.

    Attributes:
        cluster: Who sits where.
        parts: Global ranks group by group, each rank once.
        collectives: The seam.
        device: Where the tensors live.
        store: Shared by all ranks, its keys used by nobody else.
        timeout_s: Deadline of each operation, in seconds.
        chunk_bytes: Largest chunk, in bytes.
        codec: What sums cross the top leg in, if it leaves the host.
        everywhere: Whether the codec is for all legs; memory is not shared then.
        shares_memory: Whether ranks of a host are to find out if they share memory.
    """

    cluster: Cluster
    parts: Sequence[Sequence[int]]
    collectives: Collectives
    device: torch.device
    store: dist.Store
    timeout_s: float
    chunk_bytes: int
    codec: Codec | None
    everywhere: bool
    shares_memory: bool

    @property
    def inner_codec(self) -> Codec | None:
        """What sums cross other legs in."""
        return self.codec if self.everywhere else None


def open_hop_lanes(opening: LaneOpening) -> HopLanes:
    """Make the groups of all parts and the lanes of this rank's; every rank of the world calls it."""
    rank = opening.collectives.rank
    hierarchies = [hierarchy_of(opening.cluster.restricted_to(part)) for part in opening.parts]
    own = next(number for number, part in enumerate(opening.parts) if rank in part)
    memory, makes_host_groups = _open_memory(opening, hierarchies, own)
    groups: list[RankGroup] = []
    lanes: list[tuple[tuple[HopLane, ...], tuple[HopLane, ...]]] = []
    for part, hierarchy in zip(opening.parts, hierarchies, strict=True):
        lanes.append(_lanes_of(opening, part, hierarchy, memory, makes_host_groups, groups))
    scatter, gather = lanes[own]
    return HopLanes(tuple(opening.parts[own]), scatter, gather, tuple(groups), memory)


def _open_memory(opening: LaneOpening, hierarchies: Sequence[Hierarchy], own: int) -> tuple[HostMemory | None, bool]:
    """This rank's memory, and whether process groups are needed inside hosts, on this one or another."""
    if opening.device.type != "cpu" or not opening.shares_memory or opening.inner_codec is not None:
        return None, True
    if not any(len(group) > 1 for hierarchy in hierarchies for leg in _in_host(hierarchy) for group in leg.groups):
        return None, False
    part, hierarchy, collectives = opening.parts[own], hierarchies[own], opening.collectives
    members = next((_placed(leg, part).group_of(collectives.rank) for leg in _in_host(hierarchy)), None)
    memory: HostMemory | None = None
    is_alone = members is None or len(members) == 1
    if members is not None and not is_alone:
        lanes = _lanes_in_host(hierarchy)
        memory = open_memory_of(
            members,
            collectives=collectives,
            store=dist.PrefixStore(f"memory/{members[0]}/", opening.store),
            window_bytes=window_bytes(slot_bytes_for(opening.chunk_bytes, len(part)), lanes),
            channels=lanes,
            timeout_s=opening.timeout_s,
        )
    agreed = dist.PrefixStore("memory/agreed/", opening.store)
    return memory, not holds_on_all_ranks(memory is not None or is_alone, collectives=collectives, store=agreed)


def _lanes_of(
    opening: LaneOpening,
    part: Sequence[int],
    hierarchy: Hierarchy,
    memory: HostMemory | None,
    makes_host_groups: bool,
    groups: list[RankGroup],
) -> tuple[tuple[HopLane, ...], tuple[HopLane, ...]]:
    """The lanes of one part; for who is not in it the call makes groups only."""
    rank = opening.collectives.rank
    inside = opening.cluster.restricted_to(part)
    hops = {h.leg: h for h in route_of(inside, part.index(rank), hierarchy).hops} if rank in part else {}
    last = len(hierarchy.legs) - 1
    inner = opening.inner_codec
    codec = opening.codec if hierarchy.top.tier is not Tier.HOST else inner
    number_in_host = count()

    def lane(kind: str, number: int, move: HopMove) -> HopLane:
        leg = _placed(hierarchy.legs[number], part)
        name = f"{kind}_{leg.tier.value}"
        in_host = leg.tier is Tier.HOST
        channel = next(number_in_host) if in_host else -1
        group: RankGroup | None = None
        if makes_host_groups or not in_host:
            group = make_leg_group(leg, rank=rank, label=name, timeout_s=opening.timeout_s)
            groups.extend([group] if group is not None else [])
        members = leg.group_of(rank)
        link: HopLink | None = None
        if in_host and memory is not None and members is not None and len(members) > 1:
            link = MemoryLink(
                memory,
                lane=channel,
                num_rows=len(part),
                slot_bytes=slot_bytes_for(opening.chunk_bytes, len(part)),
                collectives=opening.collectives,
                group=RankGroup(members, members.index(rank), None, name, leg.tier.value),
            )
        elif group is not None:
            link = GroupLink(opening.collectives, group)
        return HopLane(name, _bound(move, hops.get(number), link))

    out, back = range(last), range(last - 1, -1, -1)

    def sums(codec: Codec | None, kind: str) -> HopMove:
        return sum_up if codec is None else sum_encoded(codec, kind)

    scatter = [lane("scatter_out", n, sums(inner, f"out {n}")) for n in out]
    scatter += [lane("scatter_top", last, sums(codec, "part"))]
    scatter += [lane("scatter_in", n, hand_in if inner is None else hand_in_encoded(inner, f"in {n}")) for n in back]
    gather = [lane("gather_out", n, hand_out) for n in out] + [lane("gather_top", last, spread)]
    gather += [lane("gather_in", n, spread) for n in back]
    return tuple(scatter), tuple(gather)


def _bound(move: HopMove, hop: Hop | None, link: HopLink | None) -> Callable[[Segments], None]:
    def run(segments: Segments) -> None:
        keep_for_current_stream(segments.rows)
        if hop is not None and link is not None:
            move(segments, hop, link)

    return run


def _in_host(hierarchy: Hierarchy) -> Iterator[Leg]:
    """The leg inside hosts, if there is one; there are never more."""
    return (leg for leg in hierarchy.legs if leg.tier is Tier.HOST)


def _lanes_in_host(hierarchy: Hierarchy) -> int:
    """A scatter and a gather; under a top leg each on the way out and on the way in."""
    return 2 if hierarchy.top.tier is Tier.HOST else 4


def _placed(leg: Leg, part: Sequence[int]) -> Leg:
    """A leg of a part with global ranks."""
    return dataclasses.replace(leg, groups=tuple(tuple(part[i] for i in group) for group in leg.groups))
