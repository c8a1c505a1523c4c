"""What the environment says: on which host this process runs, and, put together, where all ranks sit.

Note: which identity counts.
    An explicit name (config, ``HIERDIST_HOST``) counts for the rank that has it. Among the others the first source
    that all of them have, and that does not contradict the machines they run on, counts for all: sources mixed from
    rank to rank would give one machine two names, and variables that a launcher copied from its own node to all others
    would give all machines one.
"""

from __future__ import annotations

import enum
import json
import os
import reprlib
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_dist.config import TopologyConfig
from lightning_dist.errors import CollectiveTimeoutError, HierDistError, PeerLostError, TopologyError
from lightning_dist.topology.spec import Cluster

HOST_VARIABLE = "HIERDIST_HOST"
_KEY = "hierdist/topology"


class Source(str, enum.Enum):
    """Where a host's identity came from; first hit wins, in this order."""

    CONFIG = "config"
    VARIABLE = HOST_VARIABLE
    SLURM = "slurm"
    LAUNCHER = "launcher"
    MACHINE = "machine"


_AUTOMATIC = (Source.SLURM, Source.LAUNCHER, Source.MACHINE)


@dataclass(frozen=True)
class HostIdentity:
    """What tells one host from another.

    Attributes:
        name: Alike on all ranks of a host, different on different hosts.
        source: Where it came from.
        label: What people call the host; used as its name where no other host is called so.
    """

    name: str
    source: Source
    label: str


@dataclass(frozen=True)
class Machine:
    """Reads what the machine says of itself; each reader can be replaced.

    Attributes:
        hostname: The network name.
        boot_id: Alike for all processes under one kernel, different after each boot; empty if it cannot be read.
        network_namespace: Tells apart namespaces (containers) under one kernel; empty if it cannot be read.
    """

    hostname: Callable[[], str] = socket.gethostname
    boot_id: Callable[[], str] = lambda: _boot_id()
    network_namespace: Callable[[], str] = lambda: _network_namespace()


def host_identities(
    environ: Mapping[str, str], *, configured: str | None = None, machine: Machine | None = None
) -> tuple[HostIdentity, ...]:
    """All identities this process could give, best first. The last, the machine's own, is always there."""
    machine = machine or Machine()
    hostname = machine.hostname()
    found = []
    if configured:
        found.append(HostIdentity(configured, Source.CONFIG, configured))
    if named := environ.get(HOST_VARIABLE):
        found.append(HostIdentity(named, Source.VARIABLE, named))
    if node := environ.get("SLURMD_NODENAME"):
        found.append(HostIdentity(node, Source.SLURM, node))
    elif index := environ.get("SLURM_NODEID"):
        found.append(HostIdentity(f"node{index}", Source.SLURM, hostname))
    index = _node_rank(environ)
    if index is not None:
        found.append(HostIdentity(f"node{index}", Source.LAUNCHER, hostname))
    name = f"{machine.boot_id()}:{machine.network_namespace()}"
    found.append(HostIdentity(name, Source.MACHINE, hostname))
    return tuple(found)


def host_identity(
    environ: Mapping[str, str], *, configured: str | None = None, machine: Machine | None = None
) -> HostIdentity:
    """The host this process is on. First hit wins: config, ``HIERDIST_HOST``, SLURM, the launcher, the machine.

    Args:
        environ: The environment's variables.
        configured: The name the config gives.
        machine: Readers of the machine's own identity.
    """
    return host_identities(environ, configured=configured, machine=machine)[0]


@dataclass(frozen=True)
class Discovery:
    """A cluster, and for each rank where its host's identity came from."""

    cluster: Cluster
    sources: tuple[Source, ...]


def discover_cluster(
    config: TopologyConfig,
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    environ: Mapping[str, str],
    timeout_s: float,
    machine: Machine | None = None,
) -> Cluster:
    """Where all ranks sit; see :func:`discover`, of which this is the cluster."""
    return discover(
        config,
        rank=rank,
        world_size=world_size,
        store=store,
        environ=environ,
        timeout_s=timeout_s,
        machine=machine,
    ).cluster


def discover(
    config: TopologyConfig,
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    environ: Mapping[str, str],
    timeout_s: float,
    machine: Machine | None = None,
) -> Discovery:
    """Where all ranks sit, and how that is known. All ranks call it, the same number of times on one store.

    Each rank sets one key; rank 0 reads them all, and answers with one key, in JSON. ``config.hosts`` goes there, too:
    ranks that were given different ones would make different process groups, and wait for each other.

    Args:
        config: What the user said.
        rank: Global rank of this process.
        world_size: Number of ranks.
        store: Reached by all ranks. A store that outlives a restart needs a prefix for each attempt.
        environ: The environment's variables.
        timeout_s: Deadline, in seconds.
        machine: Readers of the machine's own identity.

    Raises:
        TopologyError: The hosts or switches of the config do not fit the ranks, or are not the same on all of them.
        CollectiveTimeoutError: Some ranks did not report within the deadline; the message names them.
        PeerLostError: The store broke off.
    """
    if config.hosts is not None:
        stated = _stated_cluster(config, rank=rank, world_size=world_size)
        report: dict[str, Any] = {"stated": list(stated.host_of_rank)}
    else:
        machine = machine or Machine()
        identities = host_identities(environ, configured=config.host, machine=machine)
        report = {"boot_id": machine.boot_id(), "identities": [[i.name, i.source.value, i.label] for i in identities]}
    found = _exchange(report, rank=rank, world_size=world_size, store=store, timeout_s=timeout_s)
    return Discovery(apply_tiers(found.cluster, config), found.sources)


def apply_tiers(cluster: Cluster, config: TopologyConfig) -> Cluster:
    """The cluster with ``config.switches`` and ``config.tiers`` applied.

    Raises:
        TopologyError: ``switches`` names an unknown host, one twice, or leaves one out.
    """
    if config.tiers in ("flat", "two_tier"):
        if config.switches:
            warnings.warn(f"topology.switches has no effect with topology.tiers={config.tiers}", stacklevel=2)
        return cluster.flattened() if config.tiers == "flat" else cluster.without_switches()
    if not config.switches:
        return cluster
    hosts = {host: cluster.ranks_of_host(host) for host in cluster.hosts}
    return Cluster.from_hosts(hosts, switches=config.switches)


# -- the exchange ------------------------------------------------------------------------------------------------------


def _exchange(
    report: Mapping[str, Any], *, rank: int, world_size: int, store: dist.Store, timeout_s: float
) -> Discovery:
    if not 0 <= rank < world_size:
        raise TopologyError(f"rank {rank} is out of range for a world of {world_size}")
    # Counted a rank at a time, so that a second discovery on the same store does not read the answers of the first.
    attempt = store.add(f"{_KEY}/attempts/{rank}", 1)
    prefix = f"{_KEY}/{attempt}"
    deadline = time.monotonic() + timeout_s
    try:
        store.set(f"{prefix}/{rank}", json.dumps(report))
        if rank == 0:
            # A little earlier than the others' deadline, so that they still get to read who was missing.
            store.set(f"{prefix}/answer", json.dumps(_answer(prefix, world_size, store, timeout_s * 0.9)))
        if not _arrived(store, [f"{prefix}/answer"], max(deadline - time.monotonic(), 0.001)):
            raise CollectiveTimeoutError(
                f"topology discovery: rank {rank} waited {timeout_s:g} s for rank 0, which did not answer; "
                "is it running, and does it reach the same store?"
            )
        answer = json.loads(store.get(f"{prefix}/answer"))
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"topology discovery: rank {rank} lost the store that rank 0 or the launcher keeps"
        ) from error
    if "missing" in answer:
        raise CollectiveTimeoutError(answer["missing"])
    if "error" in answer:
        raise TopologyError(answer["error"])
    return Discovery(Cluster(tuple(answer["hosts"])), tuple(Source(source) for source in answer["sources"]))


def _answer(prefix: str, world_size: int, store: dist.Store, timeout_s: float) -> dict[str, Any]:
    """What rank 0 tells all: the hosts, or what is wrong."""
    keys = [f"{prefix}/{rank}" for rank in range(world_size)]
    if not _arrived(store, keys, timeout_s):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        shown = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
        return {
            "missing": f"topology discovery: no report within {timeout_s:.3g} s from rank {shown} of {world_size}; "
            "are these processes running, and do they reach the same store?"
        }
    reports = [json.loads(store.get(key)) for key in keys]
    stated = [report.get("stated") for report in reports]
    if any(stated):
        other = next((rank for rank, hosts in enumerate(stated) if hosts != stated[0]), None)
        if other is not None:
            return {"error": _differ(stated, other)}
        return {"hosts": stated[0], "sources": [Source.CONFIG.value] * world_size}
    try:
        hosts, sources = hosts_from_reports(reports)
    except HierDistError as error:
        return {"error": str(error)}
    return {"hosts": hosts, "sources": [source.value for source in sources]}


def _differ(stated: Sequence[Sequence[str] | None], other: int) -> str:
    def text(hosts: Sequence[str] | None) -> str:
        if hosts is None:
            return "not set"
        cluster = Cluster(tuple(hosts))
        return reprlib.repr({host: list(cluster.ranks_of_host(host)) for host in cluster.hosts})

    return (
        f"topology.hosts is {text(stated[0])} on rank 0 and {text(stated[other])} on rank {other}: "
        "give all ranks the same"
    )


def _arrived(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    """Whether all keys are set within the deadline."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError, except that FileStore raises the plain kind
        return store.check(keys)
    return True


def hosts_from_reports(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Source]]:
    """Host name and source of identity of each rank, from what each rank reported (see the Note above).

    Args:
        reports: By rank: ``boot_id`` and ``identities``, a list of (name, source, label), best first.
    """
    try:
        by_source = [
            {Source(source): HostIdentity(name, Source(source), label) for name, source, label in r["identities"]}
            for r in reports
        ]
        boot_ids = [str(report["boot_id"]) for report in reports]
    except (KeyError, TypeError, ValueError) as error:
        raise TopologyError(f"a rank's report cannot be read: {error!r}; do all ranks run the same version?") from error
    explicit = [next((ids[s] for s in (Source.CONFIG, Source.VARIABLE) if s in ids), None) for ids in by_source]
    automatic = [rank for rank, identity in enumerate(explicit) if identity is None]
    source = next(s for s in _AUTOMATIC if _usable(s, automatic, by_source, boot_ids))
    chosen = [identity or by_source[rank][source] for rank, identity in enumerate(explicit)]
    names = _readable(chosen)
    return [names[identity.name] for identity in chosen], [identity.source for identity in chosen]


def _usable(
    source: Source, ranks: Sequence[int], by_source: Sequence[Mapping[Source, HostIdentity]], boot_ids: Sequence[str]
) -> bool:
    """Whether all of the ranks have this source, and it never calls two machines by one name."""
    if source is Source.MACHINE:
        return True
    if not all(source in by_source[rank] for rank in ranks):
        return False
    machines: dict[str, set[str]] = {}
    for rank in ranks:
        if boot_ids[rank]:
            machines.setdefault(by_source[rank][source].name, set()).add(boot_ids[rank])
    merged = [name for name, ids in machines.items() if len(ids) > 1]
    if merged:
        warnings.warn(
            f"the {source.value} variables call different machines {merged[0]!r}: they are not used to tell hosts "
            f"apart. Set {HOST_VARIABLE} on each host to name it",
            stacklevel=2,
        )
    return not merged


def _readable(identities: Sequence[HostIdentity]) -> dict[str, str]:
    """Identity -> name of the host: its label where no other host has it, else something that tells them apart."""
    labels: dict[str, set[str]] = {}
    for identity in identities:
        labels.setdefault(identity.name, set()).add(identity.label)
    bearers: dict[str, list[str]] = {}
    for name, given in labels.items():
        for label in given:
            bearers.setdefault(label, []).append(name)
    readable = {}
    for identity in identities:
        alike = bearers[identity.label]
        if len(alike) == 1 and len(labels[identity.name]) == 1:
            readable[identity.name] = identity.label
        elif identity.source is Source.MACHINE:
            readable[identity.name] = f"{identity.label}#{alike.index(identity.name)}"
        else:
            readable[identity.name] = identity.name
    if len(set(readable.values())) < len(readable):  # a label that is another host's name
        return {name: name for name in readable}
    return readable


# -- the config and the environment ------------------------------------------------------------------------------------


def _stated_cluster(config: TopologyConfig, *, rank: int, world_size: int) -> Cluster:
    cluster = Cluster.from_hosts(config.hosts or {})
    if cluster.world_size != world_size:
        raise TopologyError(
            f"topology.hosts lists {cluster.world_size} ranks, but {world_size} run; list each rank of the run once"
        )
    if config.host is not None and cluster.host_of(rank) != config.host:
        raise TopologyError(
            f"topology.host says rank {rank} is on {config.host!r}, topology.hosts says {cluster.host_of(rank)!r}; "
            "leave one of them out"
        )
    return cluster


def _node_rank(environ: Mapping[str, str]) -> str | None:
    """Index of the node as the launcher counts: torchrun sets GROUP_RANK, Lightning and users NODE_RANK."""
    order = ("GROUP_RANK", "NODE_RANK") if "TORCHELASTIC_RUN_ID" in environ else ("NODE_RANK", "GROUP_RANK")
    return next((environ[name] for name in order if environ.get(name)), None)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
