"""Where a run's keepers are: the ranks meet in the run's store.

The first rank of each host says where its keeper is, and all read what all have said. The keepers' secrets pass through
the store, as those of shared memory do.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint.buddies import buddies
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Endpoint, Keeper
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import HierDistError, StorageError
from lightning_dist.topology.addresses import own_address


@dataclass(frozen=True)
class Keepers:
    """The keepers of a run's hosts, as a rank sees them.

    Attributes:
        all: This host's first; each once.
        own: This host's; ``None`` where none runs.
        buddy: Of this rank, on another host.
        token: Of this meeting among all that there ever were; alike on all ranks.
    """

    all: Sequence[Keeper]
    own: Keeper | None
    buddy: Keeper | None
    token: str


def meet(run: RunContext, config: CheckpointConfig, path: str, *, start: bool) -> Keepers | None:
    """All keepers; every rank calls it. ``None`` on all, and a warning, if one that runs or is started cannot be used.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of a checkpoint; those beside it have the same keepers.
        start: Start a keeper where none runs.
    """
    job = split_path(path)[0]
    name = client.name_of(job)
    cluster, rank = run.cluster, run.rank
    host = cluster.host_of(rank)
    attempts = run.own_store("keepers")
    store = dist.PrefixStore(f"{attempts.add(f'attempts/{rank}', 1)}/", attempts)
    if rank == 0:
        store.set("token", secrets.token_hex(4))
    if is_first_of_host(run):
        offer = _offer(job, config, start=start, has_other_hosts=cluster.num_hosts > 1)
        store.set(f"host/{host}", json.dumps(offer))
    offers: dict[str, dict[str, Any]] = {each: json.loads(said(store, f"host/{each}", run)) for each in cluster.hosts}
    token = said(store, "token", run)
    failures = [f"host {each}: {offer['error']}" for each, offer in offers.items() if "error" in offer]
    if failures:
        if rank == 0:
            warnings.warn(f"checkpoints are not kept in memory: {failures[0]}", stacklevel=4)
        return None
    own = client.find(name)
    if own is None and start:  # it has just ended: what is asked of it fails, and is warned of
        own = Keeper(Endpoint("", name))
    found = {each: _as_seen(offer, own) for each, offer in offers.items() if offer}
    distinct = {keeper.endpoint.identity: keeper for keeper in ([own] if own is not None else [])}
    for keeper in found.values():
        distinct.setdefault(keeper.endpoint.identity, keeper)
    buddy = buddies(cluster.host_of_rank)[rank] if config.replica == "buddy" else None
    other = found.get(cluster.host_of(buddy)) if buddy is not None else None
    if start and rank == 0 and config.replica == "buddy" and (other is None or other is own):
        warnings.warn(
            "checkpoint.replica=buddy does no more than memory: the run has one host, or its hosts have one memory",
            stacklevel=4,
        )
    return Keepers(tuple(distinct.values()), own, None if other is own else other, token)


def _offer(job: str, config: CheckpointConfig, *, start: bool, has_other_hosts: bool) -> dict[str, Any]:
    """What the first rank of a host says of its keeper; nothing if there is none."""
    name = client.name_of(job)
    try:
        keeper = client.start(name, limit_bytes=config.replica_limit_bytes, job=job) if start else client.find(name)
        if keeper is None:
            return {}
        offer: dict[str, Any] = {"identity": keeper.endpoint.identity}
        if has_other_hosts:
            address = own_address(os.environ)
            offer.update(address=address, port=keeper.listen(address), secret=keeper.endpoint.secret.hex())
    except (HierDistError, OSError) as error:
        return {"error": str(error)}
    return offer


def _as_seen(offer: Mapping[str, Any], own: Keeper | None) -> Keeper:
    if own is not None and offer["identity"] == own.endpoint.identity:
        return own
    # Without an address it is this host's, which has ended since: nobody answers there.
    address, port = offer.get("address", "127.0.0.1"), int(offer.get("port", 0))
    secret = bytes.fromhex(offer.get("secret", ""))
    return Keeper(Endpoint(offer["identity"], address=address, port=port, secret=secret))


def end_keeper(run: RunContext, path: str) -> None:
    """End the keeper of this host, if one runs: what an earlier run has kept there is about to be old.

    Args:
        run: Of these ranks, which keep nothing in memory.
        path: Of a checkpoint that is about to be written.
    """
    if not is_first_of_host(run):
        return
    keeper = client.find(client.name_of(split_path(path)[0]))
    if keeper is not None:
        try:
            keeper.end()
        except StorageError as error:
            warnings.warn(f"what an earlier run keeps in memory stays there: {error}", stacklevel=3)


def attached(keeper: Keeper) -> socket.socket | None:
    """A connection that keeps a keeper from ending until it is closed; ``None``, and a warning, if it has ended."""
    try:
        return keeper.attach()
    except StorageError as error:
        warnings.warn(f"checkpoints are not kept in memory: {error}", stacklevel=4)
        return None


def is_first_of_host(run: RunContext) -> bool:
    """Whether this rank speaks for its host."""
    return run.cluster.rank_in_host(run.rank) == 0


def said(store: dist.Store, key: str, run: RunContext) -> str:
    """What a rank has said, once it has; within the run's deadline."""
    with run.collectives.opening("meeting to keep checkpoints in memory", run.world):
        store.wait([key], timedelta(seconds=run.collectives.timeout_s))
        return store.get(key).decode()


def split_path(path: str) -> tuple[str, str]:
    """The folder that a checkpoint is in, which names the job, and its own name."""
    parent, _, name = (path if "://" in path else os.path.abspath(path)).rstrip("/").rpartition("/")
    return parent, name
