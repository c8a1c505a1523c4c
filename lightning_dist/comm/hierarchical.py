"""Hierarchical all-reduce: legs in a row, chunks in a pipeline.

The tensor is cut into chunks. Each chunk is reduced inside the host, crosses between hosts, and is gathered inside the
host; while one chunk crosses, the next is being reduced and the one before gathered. The legs and their lanes are
chosen once, from the hierarchy and the device; after that every tensor goes the same way, so that all ranks are in the
same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.group_legs import AllReduceLeg, EncodedLeg, ProcessGroupLeg
from lightning_dist.comm.groups import destroy, make_leg_group
from lightning_dist.comm.host_leg import SharedMemoryLeg
from lightning_dist.comm.lanes import Pipeline, StreamPipeline, ThreadPipeline
from lightning_dist.comm.legs import Chunk, ChunkStep, Leg, NamedStep, keep_for_current_stream
from lightning_dist.comm.shared_memory import open_host_memory
from lightning_dist.comm.signatures import SignatureCheck, amount_of
from lightning_dist.config import SyncConfig
from lightning_dist.errors import CollectiveError
from lightning_dist.topology import Cluster, Hierarchy, Tier, hierarchy_of
from lightning_dist.topology.hierarchy import Leg as LegPlan

_SLOTS_BESIDE_NETWORK = 2  # in a host's shared memory: chunks that are being reduced and gathered meanwhile
_SLOT_ALIGNMENT = 64


class HierarchicalAllReduce:
    """Sums over all ranks, leg by leg, in the order of submission. Make it with :func:`open_all_reduce`.

    Args:
        legs: From inside to outside; the last may be a top leg, which has no way down.
        groups: Process groups to release at the end.
        collectives: The seam.
        chunk_bytes: Largest chunk, in bytes.
        device: Where the tensors live.
        world_size: Number of ranks, by which a mean divides.
        signatures: Makes sure that ranks ask for the same.
    """

    def __init__(
        self,
        legs: Sequence[Leg],
        groups: Sequence[RankGroup],
        *,
        collectives: Collectives,
        chunk_bytes: int,
        device: torch.device,
        world_size: int,
        signatures: SignatureCheck | None = None,
    ) -> None:
        self._signatures = signatures
        self._legs = tuple(legs)
        self._groups = tuple(groups)
        self._collectives = collectives
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._world_size = world_size
        self._sequence = 0
        self._steps = _row_of_lanes(self._legs)
        names = [step.lane for step in self._steps]
        self._pipeline: Pipeline = (
            StreamPipeline(names, device)
            if device.type == "cuda"
            else ThreadPipeline(names, on_failure=lambda error: self.abort(str(error)))
        )

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes, in order."""
        return tuple(step.lane for step in self._steps)

    @property
    def description(self) -> str:
        """The legs in words, from inside to outside."""
        return "; then ".join(leg.description for leg in self._legs)

    def start(
        self, tensor: torch.Tensor, *, mean: bool = False, attributes: dict[str, int] | None = None
    ) -> Future[torch.Tensor]:
        """Begin to reduce ``tensor`` in place; every rank calls it, in the same order, with the same shape and dtype.

        Args:
            tensor: Any shape, 0-dim and empty included, contiguous or not. Bool is combined by "or".
            mean: Divide the sum by the number of ranks; floating and complex types only.
            attributes: What the events should say, e.g. ``{"bucket": 3}``.

        Returns:
            A future of ``tensor``; it fails with a :class:`~lightning_dist.errors.CollectiveError`. On CUDA the
            future's ``wait`` makes the current stream wait.
        """
        future: Future[torch.Tensor] = Future(devices=[self._device]) if self._device.type == "cuda" else Future()
        if self._signatures is not None and self._world_size > 1:
            try:
                asked = f"the {'mean' if mean else 'sum'} of {amount_of(tensor)}"
                self._signatures.check(asked, operation="all_reduce")
            except CollectiveError as error:
                self.abort(str(error))
                raise
        flat, is_copy = _flat(tensor)
        if flat.numel() == 0 or self._world_size == 1:
            future.set_result(tensor)
            return future
        pieces = flat.split(max(1, self._chunk_bytes // flat.element_size()))
        for index, piece in enumerate(pieces):
            chunk = Chunk(
                piece,
                sequence=self._sequence,
                maximum=tensor.dtype is torch.bool,
                scale=1.0 / self._world_size if mean else None,
                scale_first=tensor.dtype is torch.float16,
                attributes={**(attributes or {}), "chunk": index},
            )
            self._sequence += 1
            is_last = index == len(pieces) - 1
            self._submit(chunk, future, tensor, flat if is_copy else None, is_last)
        return future

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool = False) -> torch.Tensor:
        """:meth:`start`, waited for."""
        return self.start(tensor, mean=mean).wait()

    def abort(self, reason: str) -> None:
        """Free everyone who waits in a leg, here and, where they can be told, at the peers."""
        for leg in self._legs:
            leg.abort(reason)

    def close(self, timeout_s: float = 5.0) -> None:
        """End lanes, shared memory and groups. Safe to call twice."""
        self._pipeline.close(timeout_s)
        for leg in self._legs:
            leg.close()
        destroy(self._groups)
        self._groups = ()

    def _submit(
        self,
        chunk: Chunk,
        future: Future[torch.Tensor],
        tensor: torch.Tensor,
        copy: torch.Tensor | None,
        is_last: bool,
    ) -> None:
        def done() -> None:
            if is_last:
                if copy is not None:
                    keep_for_current_stream(copy)
                    tensor.copy_(copy.view(tensor.dtype).view(tensor.shape))
                future.set_result(tensor)

        def failed(error: BaseException) -> None:
            if is_last:
                future.set_exception(error)  # type: ignore[arg-type]  # annotated for any T, takes an exception

        self._pipeline.submit([_bind(step.run, chunk) for step in self._steps], done=done, failed=failed)


def _bind(step: ChunkStep, chunk: Chunk) -> Any:
    return lambda: step(chunk)


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[n] of a type that can be summed, sharing memory with ``tensor`` if it can; and whether it is a copy."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.dtype is torch.bool:
        values = values.view(torch.uint8) if values.is_contiguous() else values.contiguous().view(torch.uint8)
    contiguous = values.contiguous()
    return contiguous.view(-1), contiguous.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous()


def _row_of_lanes(legs: Sequence[Leg]) -> list[NamedStep]:
    """All steps from the first to the last; the step that waits for the top is joined with the first way down."""
    steps = [step for leg in legs for step in leg.up]
    down = [step for leg in reversed(legs) for step in leg.down]
    if steps and down and steps[-1].lane == "finish":
        finish, first = steps.pop().run, down[0]

        def finish_and_gather(chunk: Chunk) -> None:
            finish(chunk)
            first.run(chunk)

        down[0] = NamedStep(first.lane, finish_and_gather)
    return steps + down


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


def open_all_reduce(
    cluster: Cluster,
    *,
    config: SyncConfig,
    collectives: Collectives,
    device: torch.device,
    rank: int,
    store: dist.Store,
    purpose: str = "gradients",
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
    """
    if cluster.num_hosts == 1:
        config = dataclasses.replace(config, wire_dtype="same")  # nothing crosses between hosts, also not when flat
    hierarchy = hierarchy_of(cluster if config.algorithm == "hierarchical" else cluster.flattened())
    slot_bytes = -(-config.chunk_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    opening = _Opening(config, collectives, device, rank, purpose, store, slot_bytes)
    legs: list[Leg] = []
    groups: list[RankGroup] = []
    inner, top = _as_inner(hierarchy, opening)
    for level, plan in enumerate(inner):
        is_last_sum = level == len(inner) - 1 and top is None
        legs.append(_open_inner_leg(plan, level, is_last_sum, opening, groups))
    if top is not None:
        legs.append(_open_top_leg(top, not inner, opening, groups))
    # A flat all-reduce over Gloo or NCCL pipelines by itself; cutting it into chunks only adds latency.
    chunk_bytes = config.chunk_bytes if inner or config.wire_dtype != "same" else 1 << 62
    keys = dist.PrefixStore(f"hierdist/{purpose}/signatures/", store).clone()  # type: ignore[attr-defined]  # torch's stub
    return HierarchicalAllReduce(
        legs,
        groups,
        collectives=collectives,
        chunk_bytes=chunk_bytes,
        device=device,
        world_size=cluster.world_size,
        signatures=SignatureCheck(keys, collectives=collectives, ranks=range(cluster.world_size)),
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
    """
    plan = LegPlan(Tier.WORLD, tuple(tuple(part) for part in parts), len(parts[0]))
    opening = _Opening(config, collectives, device, rank, purpose, store, slot_bytes=0)
    groups: list[RankGroup] = []
    leg = _open_top_leg(plan, True, opening, groups)
    own = next(tuple(part) for part in parts if rank in part)
    keys = dist.PrefixStore(f"hierdist/{purpose}/{own[0]}/signatures/", store).clone()  # type: ignore[attr-defined]  # torch's stub
    return HierarchicalAllReduce(
        [leg],
        groups,
        collectives=collectives,
        chunk_bytes=config.chunk_bytes,
        device=device,
        world_size=len(own),
        signatures=SignatureCheck(keys, collectives=collectives, ranks=own),
    )


def _as_inner(hierarchy: Hierarchy, opening: _Opening) -> tuple[list[LegPlan], LegPlan | None]:
    """On one host, CPU ranks that may share memory are an inner leg with nothing above it."""
    one_host = hierarchy.top.tier is Tier.HOST
    may_share = opening.device.type == "cpu" and opening.config.shared_memory == "auto"
    if one_host and may_share and hierarchy.top.width > 1 and opening.config.algorithm == "hierarchical":
        return [LegPlan(Tier.HOST, hierarchy.top.groups, hierarchy.top.width)], None
    return list(hierarchy.inner), hierarchy.top


def _open_inner_leg(plan: LegPlan, level: int, is_last_sum: bool, opening: _Opening, groups: list[RankGroup]) -> Leg:
    shared: SharedMemoryLeg | None = None
    if plan.tier is Tier.HOST and opening.device.type == "cpu" and opening.config.shared_memory == "auto":
        members = plan.group_of(opening.rank)
        assert members is not None, "every rank is in the leg of its host"
        if len(members) > 1:
            shared = _open_shared_leg(plan, members, is_last_sum, opening)
        if _all_ranks(shared is not None or len(members) == 1, "memory", opening):
            return shared or _lonely_leg(plan, level, is_last_sum, opening)
    # Some host's ranks do not share memory: the groups are made on every rank, and used where they are needed.
    label = "" if plan.tier is Tier.HOST else f"{plan.tier.value}_"
    pair = [_group(plan, f"{label}{kind}", opening, groups) for kind in ("reduce", "gather")]
    if shared is not None:
        return shared
    return _process_group_leg(plan, level, is_last_sum, opening, label, pair[0], pair[1])


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


def _all_ranks(holds: bool, what: str, opening: _Opening) -> bool:
    """Whether something holds on every rank; all ranks call it."""
    store = dist.PrefixStore(f"hierdist/{opening.purpose}/{what}/", opening.store)
    world_size = len(opening.collectives.host_of_rank)
    keys = [str(rank) for rank in range(world_size)]
    store.set(str(opening.rank), "yes" if holds else "no")
    store.wait(keys, opening.collectives.deadline)
    return all(value == b"yes" for value in store.multi_get(keys))


def _open_shared_leg(
    plan: LegPlan, members: tuple[int, ...], is_last_sum: bool, opening: _Opening
) -> SharedMemoryLeg | None:
    collectives = opening.collectives
    slots = opening.config.max_in_flight + _SLOTS_BESIDE_NETWORK
    memory = open_host_memory(
        dist.PrefixStore(f"hierdist/{opening.purpose}/host/{members[0]}/", opening.store),
        members=members,
        index=members.index(opening.rank),
        window_bytes=slots * opening.slot_bytes,
        channels=SharedMemoryLeg.CHANNELS,
        describe=lambda position: collectives.where(members[position]),
        alarm=collectives.alarm,
        timeout_s=opening.config.timeout_s,
        setup_timeout_s=opening.config.timeout_s,
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
    codec = codec_of(opening.config.wire_dtype) if plan.tier is not Tier.HOST else None
    if codec is None:
        return AllReduceLeg(
            collectives=opening.collectives,
            group=_group(plan, "cross", opening, groups),
            max_in_flight=opening.config.max_in_flight,
            is_only=is_only,
        )
    pair = [_group(plan, label, opening, groups) for label in ("cross", "cross_gather")]
    return EncodedLeg(
        collectives=opening.collectives, scatter_group=pair[0], gather_group=pair[1], codec=codec, is_only=is_only
    )


def _group(plan: LegPlan, label: str, opening: _Opening, groups: list[RankGroup]) -> RankGroup | None:
    group = make_leg_group(plan, rank=opening.rank, label=label, timeout_s=opening.config.timeout_s)
    if group is not None:
        groups.append(group)
    return group
