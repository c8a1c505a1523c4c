"""Opening an all-reduce: the legs that a cluster and a device ask for, their groups, the host's shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dist.comm.codecs import Codec, chunk_bytes_of, codec_of
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.encoded_inner_leg import EncodedInnerLeg
from lightning_dist.comm.encoded_leg import EncodedLeg
from lightning_dist.comm.feedback import Feedback
from lightning_dist.comm.group_legs import AllReduceLeg, ProcessGroupLeg
from lightning_dist.comm.groups import make_leg_group
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.host_leg import SharedMemoryLeg
from lightning_dist.comm.host_memory import holds_on_all_ranks, open_memory_of
from lightning_dist.comm.legs import Leg
from lightning_dist.comm.signatures import SignatureCheck
from lightning_dist.config import SyncConfig
from lightning_dist.topology import Cluster, Hierarchy, Tier, hierarchy_of
from lightning_dist.topology.hierarchy import Leg as LegPlan

_SLOTS_BESIDE_NETWORK = 2  # in a host's shared memory: chunks that are being reduced and gathered meanwhile
_SLOT_ALIGNMENT = 64


@dataclass(frozen=True)
class _Opening:
    """What is needed to open each leg."""

    config: SyncConfig
    collectives: Collectives
    device: torch.device
    rank: int
    purpose: str
    store: dist.Store
    slot_bytes: int

    @property
    def inner_codec(self) -> Codec | None:
        """What values are encoded by inside hosts; they are sent by the backend then, as if memory were not shared."""
        return codec_of(self.config) if self.config.everywhere else None


def open_all_reduce(
    cluster: Cluster,
    *,
    config: SyncConfig,
    collectives: Collectives,
    device: torch.device,
    rank: int,
    store: dist.Store,
    purpose: str = "gradients",
    feedback: Feedback | None = None,
) -> HierarchicalAllReduce:
    """Choose the legs for a cluster, make their groups, and open the host's shared memory; every rank calls it.

    Args:
        cluster: Who sits where; the same on all ranks.
        config: How to synchronise.
        collectives: The seam.
        device: Where the tensors live.
        rank: This process's global rank.
        store: Shared by all ranks.
        purpose: What it is for; keeps its keys and group names apart from others'.
        feedback: What is owed of what is sent.
    """
    if cluster.num_hosts == 1 and not config.everywhere:
        config = dataclasses.replace(config, codec="same")  # nothing crosses between hosts, also not when flat
    hierarchy = hierarchy_of(cluster.flattened() if config.algorithm == "flat" else cluster)
    messages = hierarchy.parts * hierarchy.top.width
    config = dataclasses.replace(config, chunk_bytes=chunk_bytes_of(config, messages=messages))
    slot_bytes = -(-config.chunk_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    opening = _Opening(config, collectives, device, rank, purpose, store, slot_bytes)
    legs: list[Leg] = []
    groups: list[RankGroup] = []
    inner, top = _as_inner(hierarchy, opening)
    widths = [plan.width for plan in hierarchy.legs]
    for level, plan in enumerate(inner):
        is_last_sum = level == len(inner) - 1 and top is None
        if opening.inner_codec is not None:
            legs.append(_open_encoded_leg(plan, widths[level + 1 :], level, opening.inner_codec, opening, groups))
        else:
            legs.append(_open_inner_leg(plan, level, is_last_sum, opening, groups))
    if top is not None:
        legs.append(_open_top_leg(top, not inner, opening, groups))
    # A flat all-reduce over Gloo or NCCL pipelines by itself; cutting it into chunks only adds latency.
    chunk_bytes = config.chunk_bytes if inner or config.codec != "same" else 1 << 62
    keys = dist.PrefixStore(f"hierdist/{purpose}/signatures/", store)
    return HierarchicalAllReduce(
        legs,
        groups,
        collectives=collectives,
        chunk_bytes=chunk_bytes,
        device=device,
        world_size=cluster.world_size,
        is_first=rank == 0,
        signatures=SignatureCheck(keys, collectives=collectives, ranks=range(cluster.world_size)),
        feedback=feedback,
    )


def open_all_reduce_inside(
    parts: Sequence[Sequence[int]],
    *,
    config: SyncConfig,
    collectives: Collectives,
    device: torch.device,
    rank: int,
    store: dist.Store,
    purpose: str = "inside",
) -> HierarchicalAllReduce:
    """An all-reduce inside each of some groups whose ranks sit on one host, so that nothing of it crosses hosts.

    Args:
        parts: Global ranks group by group, of any size; every rank is in one. The other arguments are those of
            :func:`open_all_reduce`.
        config: How to synchronise; exact, whatever its codec.
        collectives: The seam.
        device: Where the tensors live.
        rank: This process's global rank.
        store: Shared by all ranks.
        purpose: Keeps its keys and group names apart from others'.
    """
    config = dataclasses.replace(config, algorithm="hierarchical", codec="same", everywhere=False)
    own = next(tuple(part) for part in parts if rank in part)
    plan = LegPlan(Tier.HOST, tuple(tuple(part) for part in parts), len(own))
    slot_bytes = -(-config.chunk_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    opening = _Opening(config, collectives, device, rank, purpose, store, slot_bytes)
    groups: list[RankGroup] = []
    may_share = device.type == "cpu" and config.shared_memory == "auto" and any(len(part) > 1 for part in parts)
    leg = _open_inner_leg(plan, 0, True, opening, groups) if may_share else _open_top_leg(plan, True, opening, groups)
    keys = dist.PrefixStore(f"hierdist/{purpose}/{own[0]}/signatures/", store)
    return HierarchicalAllReduce(
        [leg],
        groups,
        collectives=collectives,
        chunk_bytes=config.chunk_bytes if may_share else 1 << 62,
        device=device,
        world_size=len(own),
        is_first=rank == own[0],
        signatures=SignatureCheck(keys, collectives=collectives, ranks=own),
    )


def open_all_reduce_across(
    parts: Sequence[Sequence[int]],
    *,
    config: SyncConfig,
    collectives: Collectives,
    device: torch.device,
    rank: int,
    store: dist.Store,
    purpose: str = "replicas",
    feedback: Feedback | None = None,
) -> HierarchicalAllReduce:
    """An all-reduce inside each of some groups that have one rank on each host, so that all of it crosses hosts.

    Args:
        parts: Global ranks group by group; every rank is in one. The other arguments are those of
            :func:`open_all_reduce`.
        config: How to synchronise.
        collectives: The seam.
        device: Where the tensors live.
        rank: This process's global rank.
        store: Shared by all ranks.
        purpose: Keeps its keys and group names apart from others'.
        feedback: What is owed of what is sent.
    """
    config = dataclasses.replace(config, chunk_bytes=chunk_bytes_of(config, messages=len(parts[0])))
    plan = LegPlan(Tier.WORLD, tuple(tuple(part) for part in parts), len(parts[0]))
    opening = _Opening(config, collectives, device, rank, purpose, store, slot_bytes=0)
    groups: list[RankGroup] = []
    leg = _open_top_leg(plan, True, opening, groups)
    own = next(tuple(part) for part in parts if rank in part)
    keys = dist.PrefixStore(f"hierdist/{purpose}/{own[0]}/signatures/", store)
    return HierarchicalAllReduce(
        [leg],
        groups,
        collectives=collectives,
        chunk_bytes=config.chunk_bytes,
        device=device,
        world_size=len(own),
        is_first=rank == own[0],
        signatures=SignatureCheck(keys, collectives=collectives, ranks=own),
        feedback=feedback,
    )


def _as_inner(hierarchy: Hierarchy, opening: _Opening) -> tuple[list[LegPlan], LegPlan | None]:
    """On one host, CPU ranks that may share memory are an inner leg with nothing above it."""
    one_host = hierarchy.top.tier is Tier.HOST
    may_share = opening.device.type == "cpu" and opening.config.shared_memory == "auto"
    may_share = may_share and opening.inner_codec is None
    if one_host and may_share and hierarchy.top.width > 1 and opening.config.algorithm != "flat":
        return [LegPlan(Tier.HOST, hierarchy.top.groups, hierarchy.top.width)], None
    return list(hierarchy.inner), hierarchy.top


def _open_inner_leg(plan: LegPlan, level: int, is_last_sum: bool, opening: _Opening, groups: list[RankGroup]) -> Leg:
    shared: SharedMemoryLeg | None = None
    if plan.tier is Tier.HOST and opening.device.type == "cpu" and opening.config.shared_memory == "auto":
        members = plan.group_of(opening.rank)
        assert members is not None, "every rank is in the leg of its host"
        if len(members) > 1:
            shared = _open_shared_leg(plan, members, is_last_sum, opening)
        keys = dist.PrefixStore(f"hierdist/{opening.purpose}/memory/", opening.store)
        if holds_on_all_ranks(shared is not None or len(members) == 1, collectives=opening.collectives, store=keys):
            return shared or _lonely_leg(plan, level, is_last_sum, opening)
    # Some host's ranks do not share memory: the groups are made on every rank, and used where they are needed.
    label = "" if plan.tier is Tier.HOST else f"{plan.tier.value}_"
    pair = [_group(plan, f"{label}{kind}", opening, groups) for kind in ("reduce", "gather")]
    if shared is not None:
        return shared
    return _process_group_leg(plan, level, is_last_sum, opening, label, pair[0], pair[1])


def _open_encoded_leg(
    plan: LegPlan, cuts: Sequence[int], level: int, codec: Codec, opening: _Opening, groups: list[RankGroup]
) -> Leg:
    label = "" if plan.tier is Tier.HOST else f"{plan.tier.value}_"
    pair = [_group(plan, f"{label}{kind}", opening, groups) for kind in ("reduce", "gather")]
    return EncodedInnerLeg(
        collectives=opening.collectives,
        reduce_group=pair[0],
        gather_group=pair[1],
        codec=codec,
        width=plan.width,
        cuts=cuts,
        label=label,
        is_first=level == 0,
    )


def _lonely_leg(plan: LegPlan, level: int, is_last_sum: bool, opening: _Opening) -> Leg:
    """The leg of a rank that is alone on its host: it passes things through."""
    return _process_group_leg(plan, level, is_last_sum, opening, "", None, None)


def _process_group_leg(
    plan: LegPlan,
    level: int,
    is_last_sum: bool,
    opening: _Opening,
    label: str,
    reduce_group: RankGroup | None,
    gather_group: RankGroup | None,
) -> Leg:
    return ProcessGroupLeg(
        collectives=opening.collectives,
        reduce_group=reduce_group,
        gather_group=gather_group,
        width=plan.width,
        label=label,
        is_last_sum=is_last_sum,
        is_first=level == 0,
    )


def _open_shared_leg(
    plan: LegPlan, members: tuple[int, ...], is_last_sum: bool, opening: _Opening
) -> SharedMemoryLeg | None:
    collectives = opening.collectives
    slots = opening.config.max_in_flight + _SLOTS_BESIDE_NETWORK
    memory = open_memory_of(
        members,
        collectives=collectives,
        store=dist.PrefixStore(f"hierdist/{opening.purpose}/host/{members[0]}/", opening.store),
        window_bytes=slots * opening.slot_bytes,
        channels=SharedMemoryLeg.CHANNELS,
        timeout_s=opening.config.timeout_s,
    )
    if memory is None:
        return None
    return SharedMemoryLeg(
        memory,
        width=plan.width,
        slot_bytes=opening.slot_bytes,
        slots=slots,
        collectives=collectives,
        group=RankGroup(members, members.index(opening.rank), None, "reduce", plan.tier.value),
        is_last_sum=is_last_sum,
    )


def _open_top_leg(plan: LegPlan, is_only: bool, opening: _Opening, groups: list[RankGroup]) -> Leg:
    codec = codec_of(opening.config) if plan.tier is not Tier.HOST else opening.inner_codec
    if codec is None:
        return AllReduceLeg(
            collectives=opening.collectives,
            group=_group(plan, "cross", opening, groups),
            max_in_flight=opening.config.max_in_flight,
            is_only=is_only,
        )
    pair = [_group(plan, label, opening, groups) for label in ("cross", "cross_gather")]
    return EncodedLeg(
        collectives=opening.collectives,
        scatter_group=pair[0],
        gather_group=pair[1],
        codec=codec,
        is_only=is_only,
        hands_on=opening.inner_codec is not None and not is_only,
    )


def _group(plan: LegPlan, label: str, opening: _Opening, groups: list[RankGroup]) -> RankGroup | None:
    group = make_leg_group(plan, rank=opening.rank, label=label, timeout_s=opening.config.timeout_s)
    if group is not None:
        groups.append(group)
    return group
