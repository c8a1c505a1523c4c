"""What the parts of a run share: who sits where, the seam, the store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dist.comm import watchful
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.bounded import own_connection
from lightning_dist.comm.collectives import Collectives, FaultPoint, RankGroup
from lightning_dist.comm.groups import default_group
from lightning_dist.comm.testimony import Activity, Testimony
from lightning_dist.config import SyncConfig, TopologyConfig
from lightning_dist.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from lightning_dist.events import EventStream
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
        """Keys of one purpose."""
        return dist.PrefixStore(f"{purpose}/", self.store)

    def operation(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The seam around an operation of the default process group."""
        return self.collectives.operation(name, self.world)

    def meet(self) -> None:
        """Inside an operation that blocks the host and cannot look up: wait until all ranks are there."""
        group = self.world.process_group
        assert group is not None, "the default group is one"
        watchful.meet(group, self.collectives)

    @contextlib.contextmanager
    def naming_failures(self, what: str) -> Iterator[None]:
        """Around code that may talk to other ranks beside the seam: the user's, the reducer's own.

        What autograd and the reducer say of a failed future is only its text; the error itself is raised instead.

        Args:
            what: Names the code in the error.
        """
        try:
            yield
        except (CollectiveError, StopIteration):
            raise
        except Exception as error:
            if isinstance(error, RuntimeError):  # as backends raise; an OSError here is of the user's files or sockets
                if self.collectives.failure is not None:
                    raise self.collectives.failure from error
                try:
                    with self.collectives.opening(what, self.world):  # names it if it is one between ranks
                        raise
                except CollectiveError:
                    raise
                except RuntimeError:
                    pass
            # At once: callbacks that save on an exception wait for the other ranks before on_exception is called.
            self.leave_word(error)
            raise

    @property
    def failure(self) -> str | None:
        """What has failed on this rank, so that nothing more is to be asked of the others; ``None``: nothing."""
        return str(self.collectives.failure or self.testimony.statement or "") or None

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
    store = _own_store(rank, sync.timeout_s)
    cluster = discover_cluster(
        topology,
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("topology/", store),
        environ=os.environ if environ is None else environ,
        timeout_s=sync.timeout_s,
    )
    cluster = probe(cluster, config=topology.probe, rank=rank, group=default_group(), device=device)
    activity = Activity()
    with _naming_lost_store(rank):
        testimony = Testimony(
            dist.PrefixStore("testimony/", store),
            rank=rank,
            world_size=world_size,
            activity=activity,
            holder=_store_holder(store),
            grace_s=min(3.0, sync.timeout_s),
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


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
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


def describe_ranks(cluster: Cluster) -> str:
    """E.g. ``4 ranks on 2 hosts``, and what their links measure, if they were measured."""
    hosts = "1 host" if cluster.num_hosts == 1 else f"{cluster.num_hosts} hosts"
    measured = [
        f"{tier.value} {link.bandwidth_bytes_per_s / 1e6:,.0f} MB/s, {link.latency_s * 1e6:,.0f} us"
        for tier, link in cluster.links.items()
        if link.bandwidth_bytes_per_s is not None and link.latency_s is not None
    ]
    links = f" (links measured: {'; '.join(measured)})" if measured else ""
    return f"{cluster.world_size} ranks on {hosts}{links}"


def _own_store(rank: int, timeout_s: float) -> dist.Store:
    """Keys no other opening of this process group uses: a Trainer may be used twice, a script may have several.

    A connection of its own, because a rank may read it in a thread while another waits in the first one.
    """
    default = dist.distributed_c10d._get_default_store()  # the store has no public accessor
    with _naming_lost_store(rank):
        generation = default.add(f"hierdist/generation/{rank}", 1)
        return dist.PrefixStore(f"hierdist/{generation}/", own_connection(default, timeout_s))


@contextlib.contextmanager
def _naming_lost_store(rank: int) -> Iterator[None]:
    """Before the seam is there, which names it in what follows."""
    try:
        yield
    except (dist.DistError, CollectiveTimeoutError) as error:
        raise PeerLostError(
            f"rank {rank} lost the store of the rendezvous, which rank 0 or the launcher holds: {error}"
        ) from error


def _store_holder(store: dist.Store) -> int | None:
    """The rank in whose process the store lives, if it is in one: rank 0, unless TorchElastic's agent keeps it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not in_agent else None
