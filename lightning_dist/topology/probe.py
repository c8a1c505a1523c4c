"""What the links measure: bandwidth and latency of each tier, in under two seconds, kept in a file a cluster.

Note: the measurement.
    One pair of ranks stands for each tier; the tiers are measured one after the other, so that they do not disturb
    each other. The pair's first rank leads. It sends one header of 8 bytes before every payload, so that the follower
    needs no clock and no plan: n > 0 announces n bytes, which the follower receives and acknowledges with 8 bytes; 0
    ends the measurement. Latency is half the fastest round trip of a payload of one byte. Payloads then grow fourfold
    as long as the next is expected to fit into the tier's share of the time; the last one, which no burst allowance
    hides, gives the bandwidth. One stream may not fill a link that many share: the figure is what one pair of ranks
    sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.config import ProbeConfig
from lightning_dist.errors import CollectiveTimeoutError, TopologyError
from lightning_dist.topology.spec import Cluster, Link, Tier

FIRST_PAYLOAD_BYTES = 64 * 1024
LARGEST_PAYLOAD_BYTES = 64 * 1024 * 1024
LATENCY_ROUNDS = 16
_GROWTH = 4
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FORMAT = 1


def probe_pairs(cluster: Cluster) -> dict[Tier, tuple[int, int]]:
    """For each tier of the cluster, near to far, a pair of ranks whose messages cross it and no slower one."""
    pairs: dict[Tier, tuple[int, int]] = {}
    first_of_host = [cluster.ranks_of_host(host)[0] for host in cluster.hosts]
    for tier in cluster.tiers:
        if tier is Tier.HOST:
            host = next(host for host in cluster.hosts if len(cluster.ranks_of_host(host)) > 1)
            first, second = cluster.ranks_of_host(host)[:2]
            pairs[tier] = (first, second)
        elif tier is Tier.SWITCH:
            hosts = next(hosts for switch in cluster.switches if len(hosts := cluster.hosts_of_switch(switch)) > 1)
            pairs[tier] = (cluster.ranks_of_host(hosts[0])[0], cluster.ranks_of_host(hosts[1])[0])
        else:
            pairs[tier] = next(
                (first_of_host[0], other)
                for other in first_of_host
                if cluster.tier_of((first_of_host[0], other)) is tier
            )
    return pairs


def probe(
    cluster: Cluster,
    *,
    config: ProbeConfig,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> Cluster:
    """The cluster with its links measured, or as they were when they were measured before. All ranks call it.

    Rank 0 looks into its cache and says whether to measure; afterwards it writes the cache. Without
    ``config.enabled`` the cluster comes back as it is.

    Args:
        cluster: Where the ranks sit; alike on all ranks.
        config: Budget, cache folder, whether to measure again.
        rank: Global rank of this process.
        group: A process group of all ranks, in rank order, in which nothing else is under way.
        device: Where the payloads live: CPU for Gloo, the rank's own device for NCCL.
        environ: The environment's variables; ``None``: this process's.
        timeout_s: Deadline of each message, in seconds.

    Raises:
        TopologyError: The group has another size than the cluster.
        CollectiveTimeoutError: A message did not arrive within the deadline.
    """
    if not config.enabled:
        return cluster
    if group.size() != cluster.world_size:
        raise TopologyError(f"the probe's group has {group.size()} ranks, the cluster {cluster.world_size}")
    environ = os.environ if environ is None else environ
    path = cache_path(cluster, config=config, environ=environ)
    channel = Channel(group, device or torch.device("cpu"), timeout_s)
    known = read_cache(path, cluster, environ) if rank == 0 and not config.refresh else None
    table = channel.sum(_to_table(known or {}, known is not None))
    if table[0] > 0:
        return cluster.with_links(_from_table(table))
    links = measure_links(cluster, rank=rank, channel=channel, budget_s=config.budget_s)
    links = _from_table(channel.sum(_to_table(links, False)))
    if rank == 0:
        write_cache(path, cluster, links, environ)
    return cluster.with_links(links)


class Channel:
    """Messages of one process group, each with a deadline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    def sum(self, values: list[float]) -> list[float]:
        """The sum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._wait(self._group.allreduce([tensor]), "all ranks")
        return [float(value) for value in tensor.tolist()]

    def send(self, payload: torch.Tensor, peer: int) -> None:
        """Send to a rank; returns when the payload may be used again."""
        self._wait(self._group.send([payload], peer, 0), f"rank {peer} to receive")

    def receive(self, payload: torch.Tensor, peer: int) -> None:
        """Receive from a rank, into the payload."""
        self._wait(self._group.recv([payload], peer, 0), f"rank {peer} to send")

    def payload(self, size_bytes: int) -> torch.Tensor:
        """``size_bytes`` bytes on the channel's device."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)

    def number(self, value: int = 0) -> torch.Tensor:
        """A header: one 64-bit number on the channel's device."""
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def _wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"link probe: waited {self._timeout.total_seconds():g} s for {what}: {error}"
            ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_links(
    cluster: Cluster,
    *,
    rank: int,
    channel: Channel,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Tier, Link]:
    """Measure the tiers; each leading rank returns what it measured, the others nothing. See the Note above."""
    links = {}
    pairs = probe_pairs(cluster)
    for tier, (leader, follower) in pairs.items():
        if rank == leader:
            links[tier] = _lead(channel, follower, budget_s / len(pairs), clock)
        elif rank == follower:
            _follow(channel, leader)
    return links


def _lead(channel: Channel, peer: int, budget_s: float, clock: Callable[[], float]) -> Link:
    def round_trip_s(size_bytes: int) -> float:
        payload = channel.payload(size_bytes)
        start = clock()
        channel.send(channel.number(size_bytes), peer)
        channel.send(payload, peer)
        channel.receive(channel.number(), peer)
        return clock() - start

    round_trip_s(1)  # opens the connection
    start = clock()
    trips = [round_trip_s(1)]
    while len(trips) < LATENCY_ROUNDS and clock() - start + trips[-1] < budget_s / 4:
        trips.append(round_trip_s(1))
    trip_s = min(trips)
    size_bytes = FIRST_PAYLOAD_BYTES
    while True:
        taken_s = round_trip_s(size_bytes)
        larger = next_payload(size_bytes, taken_s=taken_s, left_s=budget_s - (clock() - start))
        if larger is None:
            break
        size_bytes = larger
    channel.send(channel.number(0), peer)
    return link_from(size_bytes, taken_s=taken_s, trip_s=trip_s)


def _follow(channel: Channel, peer: int) -> None:
    header = channel.number()
    while True:
        channel.receive(header, peer)
        size_bytes = int(header.item())
        if size_bytes <= 0:
            return
        channel.receive(channel.payload(size_bytes), peer)
        channel.send(header, peer)


def next_payload(size_bytes: int, *, taken_s: float, left_s: float) -> int | None:
    """The next payload in bytes, or ``None`` if it is too large or would not be through in the time left."""
    larger = size_bytes * _GROWTH
    return larger if larger <= LARGEST_PAYLOAD_BYTES and taken_s * _GROWTH < left_s else None


def link_from(size_bytes: int, *, taken_s: float, trip_s: float) -> Link:
    """The link on which a payload with its acknowledgement took ``taken_s`` and an empty one ``trip_s``.

    Where the payload is so small or the link so fast that both take alike, ``taken_s`` alone counts.
    """
    moved_s = taken_s - trip_s
    return Link(size_bytes / (moved_s if moved_s > 0.1 * taken_s else taken_s), trip_s / 2)


def _to_table(links: Mapping[Tier, Link], known: bool) -> list[float]:
    """A flag, then bandwidth and latency a tier; 0 where unknown."""
    table = [float(known)]
    for tier in Tier:
        link = links.get(tier, Link())
        table += [link.bandwidth_bytes_per_s or 0.0, link.latency_s or 0.0]
    return table


def _from_table(table: list[float]) -> dict[Tier, Link]:
    links = {}
    for index, tier in enumerate(Tier):
        bandwidth, latency = table[1 + 2 * index : 3 + 2 * index]
        if bandwidth > 0:
            links[tier] = Link(bandwidth, latency)
    return links


# -- the cache ---------------------------------------------------------------------------------------------------------


def describe_cluster(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, Any]:
    """What makes a cluster the same one: its hosts, their sizes and switches, and the interface that is used."""
    return {
        "hosts": sorted([host, len(cluster.ranks_of_host(host))] for host in cluster.hosts),
        "switches": sorted([host, switch] for host, switch in cluster.switch_of_host.items()),
        "interface": next((environ[name] for name in _INTERFACE_VARIABLES if environ.get(name)), ""),
    }


def cache_path(cluster: Cluster, *, config: ProbeConfig, environ: Mapping[str, str]) -> Path:
    """The file of a cluster: in ``config.cache_dir``, else ``$XDG_CACHE_HOME`` or ``~/.cache``, ``/lightning_dist``."""
    if config.cache_dir is not None:
        folder = Path(config.cache_dir).expanduser()
    else:
        folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_dist"
    text = json.dumps(describe_cluster(cluster, environ), sort_keys=True)
    return folder / f"links-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_cache(path: Path, cluster: Cluster, environ: Mapping[str, str]) -> dict[Tier, Link] | None:
    """The links in the file, or ``None`` if there is none; a file that cannot be used is skipped with a warning."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT or values["cluster"] != describe_cluster(cluster, environ):
            raise ValueError("it describes another cluster, or was written by another version")
        links = {
            Tier(name): Link(float(link["bandwidth_bytes_per_s"]), float(link["latency_s"]))
            for name, link in values["links"].items()
        }
        if set(links) != set(cluster.tiers):
            raise ValueError("it does not have all tiers")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"measured links in {path} are not used: {error!r}; the links are measured again", stacklevel=2)
        return None
    return links


def write_cache(path: Path, cluster: Cluster, links: Mapping[Tier, Link], environ: Mapping[str, str]) -> None:
    """Keep the links in the file, whole or not at all; where that fails, warn."""
    values = {
        "format": _FORMAT,
        "cluster": describe_cluster(cluster, environ),
        "links": {
            tier.value: {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}
            for tier, link in links.items()
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(values, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(f"measured links cannot be kept in {path}: {error!r}", stacklevel=2)
