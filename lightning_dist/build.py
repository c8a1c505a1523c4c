"""The only place where a config becomes objects that talk to other ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.collectives import Collectives, FaultPoint, RankGroup
from lightning_dist.comm.groups import make_group
from lightning_dist.comm.hierarchical import HierarchicalAllReduce, open_all_reduce, open_all_reduce_across
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.comm.testimony import Activity, Testimony
from lightning_dist.config import MIB, ParallelConfig, SyncConfig, TopologyConfig
from lightning_dist.errors import CombinationError, PeerLostError, PlacementError
from lightning_dist.events import EventStream
from lightning_dist.gradsync.allreduce import AllReduceScheme
from lightning_dist.gradsync.data_parallel import DataParallel
from lightning_dist.gradsync.sparse import SparseAllReduce, has_sparse_gradients
from lightning_dist.parallel.sharded import Sharded
from lightning_dist.parallel.zero import ShardLinks, open_mesh, shard
from lightning_dist.topology import Cluster
from lightning_dist.topology.discover import discover_cluster
from lightning_dist.topology.probe import probe


@dataclass(frozen=True)
class RunContext:
    """What a run's parts share; lives from the making of the process group to teardown.

    Attributes:
        cluster: Who sits where.
        events: The event stream of this rank.
        collectives: The seam for tensors on the training device.
        store: Keys of this run only, shared by all ranks.
        device: Where the model lives.
    """

    cluster: Cluster
    events: EventStream
    collectives: Collectives
    store: dist.Store
    device: torch.device
    testimony: Testimony

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.collectives.rank

    @property
    def world(self) -> RankGroup:
        """The default process group, which belongs to the main thread."""
        ranks = tuple(range(self.cluster.world_size))
        return RankGroup(ranks, self.rank, dist.group.WORLD, "world", self.cluster.tier_of(ranks).value)

    def own_store(self, purpose: str) -> dist.Store:
        """Keys of one purpose, on a connection of their own: they may be waited for in a thread."""
        own: dist.Store = dist.PrefixStore(f"{purpose}/", self.store).clone()  # type: ignore[attr-defined]  # torch's stub
        return own

    def operation(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The seam around an operation of the default process group."""
        return self.collectives.operation(name, self.world)

    def leave_word(self, error: BaseException) -> None:
        """Let the others know that this rank ends by an error of its own."""
        self.testimony.post(f"{type(error).__name__}: {error}", own_fault=True)

    def close(self) -> None:
        """End what answers the other ranks. Safe to call twice."""
        self.testimony.close()


def open_run(
    topology: TopologyConfig,
    sync: SyncConfig,
    *,
    events: EventStream,
    device: torch.device,
    environ: Mapping[str, str] | None = None,
    fault_point: FaultPoint | None = None,
) -> RunContext:
    """Find out who sits where and make the seam; every rank calls it after the default process group is made.

    Raises:
        TopologyError: The placement given or found is no cluster.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = _own_store(rank)
    cluster = discover_cluster(
        topology,
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("topology/", store),
        environ=os.environ if environ is None else environ,
        timeout_s=sync.timeout_s,
    )
    cluster = probe(cluster, config=topology.probe, rank=rank, group=_default_group(), device=device)
    activity = Activity()
    testimony = Testimony(
        dist.PrefixStore("testimony/", store),
        rank=rank,
        world_size=world_size,
        activity=activity,
        holder=_store_holder(store),
        grace_s=min(3.0, sync.timeout_s / 2),
    )
    collectives = Collectives(
        events=events,
        timeout_s=sync.timeout_s,
        rank=rank,
        host_of_rank=cluster.host_of_rank,
        blocks_host=device.type == "cpu",
        testimony=testimony,
        activity=activity,
        fault_point=fault_point,
    )
    return RunContext(cluster, events, collectives, store, device, testimony)


def open_agreement(run: RunContext) -> Agreement:
    """How ranks take small decisions alike; every rank calls it."""
    blocking = run.collectives.blocking_host()
    with blocking.opening("opening the agreement", run.world):
        return Agreement(blocking, run.cluster.world_size)


def open_gradient_all_reduce(run: RunContext, sync: SyncConfig) -> HierarchicalAllReduce:
    """Lanes, groups and shared memory for gradients; every rank calls it."""
    with run.collectives.opening("opening the gradients' groups", run.world):
        return open_all_reduce(
            run.cluster,
            config=sync,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.store,
        )


def wrap_data_parallel(
    module: torch.nn.Module,
    all_reduce: HierarchicalAllReduce,
    sparse: SparseAllReduce | None = None,
    *,
    run: RunContext,
    parallel: ParallelConfig,
    sync: SyncConfig,
    extra: Mapping[str, object],
) -> DataParallel:
    """Wrap a module so that its gradients are averaged by ``all_reduce``; every rank calls it.

    Args:
        module: On the run's device already.
        all_reduce: How dense buckets travel.
        sparse: How sparse buckets travel; see :func:`open_sparse_all_reduce`.
        run: For the seam and the device.
        parallel: Options of the wrapper.
        sync: For the size of buckets.
        extra: Further arguments of :class:`~torch.nn.parallel.DistributedDataParallel`, as the user gave them.
    """
    arguments: dict[str, object] = {
        "find_unused_parameters": parallel.find_unused_parameters,
        "static_graph": parallel.static_graph,
        "gradient_as_bucket_view": parallel.gradient_as_bucket_view,
        "bucket_cap_mb": sync.bucket_bytes / MIB,
        **extra,
    }
    if not parallel.broadcast_buffers:  # torch 2.13 warns of it by name, also at its default
        arguments["broadcast_buffers"] = False
    with _side_stream(run.device), run.collectives.opening("wrapping the model", run.world):
        device_ids = [run.device.index] if run.device.type == "cuda" else None
        wrapped = DataParallel(module, operation=run.operation, device_ids=device_ids, **arguments)
    AllReduceScheme(all_reduce, sparse).attach(wrapped)
    return wrapped


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """On CUDA a stream of its own, on which DDP then accumulates gradients; ordered with the present one both ways.

    See https://pytorch.org/docs/stable/notes/cuda.html#id5. The order matters where a model is wrapped anew between two
    batches: wrapping broadcasts parameters that the optimizer may still be writing and the next forward will read.
    """
    if device.type != "cuda":
        yield
        return
    present, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(present)
    with torch.cuda.stream(side):
        yield
    present.wait_stream(side)


def open_sparse_all_reduce(run: RunContext, module: torch.nn.Module) -> SparseAllReduce | None:
    """A lane and a group for the module's sparse gradients, if it has any; every rank calls it."""
    if not has_sparse_gradients(module):
        return None
    return SparseAllReduce(run.collectives, run.cluster.world_size, run.own_store("sparse"))


def open_shard_links(run: RunContext, parallel: ParallelConfig, sync: SyncConfig) -> ShardLinks:
    """Lanes and groups for sharded parameters; every rank calls it.

    Raises:
        PlacementError: The mode needs as many ranks on each host, and they differ.
    """
    cluster, world_size = run.cluster, run.cluster.world_size
    hosts = [cluster.ranks_of_host(host) for host in cluster.hosts]
    by_host = parallel.mode == "hsdp" or parallel.secondary_shard == "host"
    if by_host and len(set(cluster.ranks_per_host)) > 1:
        asked = "parallel=hsdp" if parallel.mode == "hsdp" else "parallel.secondary_shard=host"
        raise PlacementError(
            f"{asked} needs as many ranks on each host; {', '.join(cluster.hosts)} have "
            f"{', '.join(map(str, cluster.ranks_per_host))}. Write parallel=zero3 with parallel.secondary_shard=off"
        )
    with run.collectives.opening("opening the shards' groups", run.world):
        groups = _ShardGroups(run, sync)
        replicas = tuple(zip(*hosts, strict=True)) if by_host else ()
        parts: Sequence[Sequence[int]] = hosts if parallel.mode == "hsdp" else [range(world_size)]
        secondary = parallel.secondary_shard == "host" and cluster.num_hosts > 1
        return ShardLinks(
            mesh=open_mesh([groups.make(parts, "shards")], device_type=run.device.type),
            scatter=groups.scatter(parts, "shards"),
            secondary=open_mesh(
                [groups.make(replicas, "hosts"), groups.make(hosts, "host")], device_type=run.device.type, ranks=hosts
            )
            if secondary
            else None,
            secondary_scatter=groups.scatter(hosts, "secondary") if secondary else None,
            across=groups.all_reduce(replicas) if parallel.mode == "hsdp" and cluster.num_hosts > 1 else None,
            world=groups.make([range(world_size)], "whole"),
            collectives=run.collectives,
            vote=Agreement(run.collectives.blocking_host(), world_size),
            operation=run.operation,
            groups=groups.made,
        )


class _ShardGroups:
    """Makes groups and lanes over parts of the world, in the same order on every rank, and keeps what it made."""

    def __init__(self, run: RunContext, sync: SyncConfig) -> None:
        self.made: list[RankGroup] = []
        self._run = run
        self._sync = sync
        flat = sync.algorithm == "flat"
        self._cluster = run.cluster.flattened() if flat else run.cluster
        self._codec = codec_of(sync.wire_dtype) if run.cluster.num_hosts > 1 else None

    def make(self, parts: Sequence[Sequence[int]], label: str) -> RankGroup:
        """This rank's group among ``parts``."""
        run, own = self._run, None
        for part in parts:
            tier = run.cluster.tier_of(part).value
            group = make_group(part, rank=run.rank, label=label, tier=tier, timeout_s=self._sync.timeout_s)
            own = group if group is not None else own
        assert own is not None, "every rank is in a part"
        self.made.append(own)
        return own

    def scatter(self, parts: Sequence[Sequence[int]], purpose: str) -> HierarchicalScatter:
        """Lanes over the parts."""
        run = self._run
        return HierarchicalScatter(
            self._cluster,
            collectives=run.collectives,
            device=run.device,
            rank=run.rank,
            store=run.own_store(purpose),
            timeout_s=self._sync.timeout_s,
            chunk_bytes=self._sync.chunk_bytes,
            parts=parts,
            codec=self._codec,
        )

    def all_reduce(self, parts: Sequence[Sequence[int]]) -> HierarchicalAllReduce:
        """Sums over parts that have one rank on each host."""
        run, sync = self._run, self._sync
        return open_all_reduce_across(
            parts, config=sync, collectives=run.collectives, device=run.device, rank=run.rank, store=run.store
        )


def shard_model(
    module: torch.nn.Module, links: ShardLinks, *, run: RunContext, parallel: ParallelConfig, by_child: bool
) -> Sharded:
    """Shard a module; every rank calls it.

    Args:
        module: Whole, or on the meta device.
        links: What shards travel over.
        run: For the seam and the device.
        parallel: Mode and options.
        by_child: See :func:`~lightning_dist.parallel.zero.shard`.

    Raises:
        CombinationError: The module has gradients that cannot be sharded.
    """
    if has_sparse_gradients(module):
        raise CombinationError(
            f"nn.Embedding(sparse=True) does not go with parallel.mode={parallel.mode}, whose gradients are dense: "
            "write sparse=False, or parallel=ddp, which sends only the rows that were used"
        )
    seed = [torch.initial_seed() % (1 << 62)]
    if run.cluster.world_size > 1:
        with run.operation("broadcast of the seed"):
            dist.broadcast_object_list(seed, 0)
    with _side_stream(run.device), run.collectives.opening("sharding the model", run.world):
        return shard(module, parallel, links, device=run.device, seed=seed[0], by_child=by_child)


def describe(run: RunContext, all_reduce: HierarchicalAllReduce) -> str:
    """Who takes part and which way gradients go, in a line."""
    cluster = run.cluster
    hosts = "1 host" if cluster.num_hosts == 1 else f"{cluster.num_hosts} hosts"
    return f"hierdist: {cluster.world_size} ranks on {hosts}; gradients: {all_reduce.description}"


def describe_shards(run: RunContext, sharded: Sharded, links: ShardLinks) -> str:
    """How the model is spread, in a few lines."""
    shards = links.scatter.members
    replicas = run.cluster.world_size // len(shards)
    copies = f", {replicas} replicas" if replicas > 1 else ""
    return f"hierdist: {run.cluster.world_size} ranks; {len(shards)} shards{copies}\n{sharded.description}"


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the default process group exists"
    return group


def _own_store(rank: int) -> dist.Store:
    """Keys no other opening of this process group uses: a Trainer may be used twice, a script may have several.

    A connection of its own, because a rank may read it in a thread while another waits in the first one.
    """
    default = dist.distributed_c10d._get_default_store()  # the store has no public accessor
    try:
        generation = default.add(f"hierdist/generation/{rank}", 1)
        return dist.PrefixStore(f"hierdist/{generation}/", default.clone())  # type: ignore[attr-defined]  # torch's stub
    except dist.DistError as error:
        raise PeerLostError(
            f"rank {rank} lost the store of the rendezvous, which rank 0 or the launcher holds: {error}"
        ) from error


def _store_holder(store: dist.Store) -> int | None:
    """The rank in whose process the store lives, if it is in one: rank 0, unless TorchElastic's agent keeps it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not in_agent else None
