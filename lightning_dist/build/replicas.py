"""The newest checkpoint in memory: the keepers of a run's hosts, what is written to them, and what is found in them.

Ranks meet in the run's store: the first of each host says where its keeper is, and all read what all have said. The
keepers' secrets pass through it, as those of shared memory do.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint.buddies import buddies
from lightning_dist.checkpoint.catalog import Checkpoint, survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Endpoint, Keeper
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.mirror import MirroredFolder
from lightning_dist.checkpoint.rate import RateLimit
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import StorageError

_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_PART_BYTES = 1 << 20
_LAST = "last.ckpt"


class Replicas:
    """What keepers hold of a run's checkpoints; every rank has one.

    Args:
        keepers: This host's first.
        buddy: Of this rank, on another host.
        token: Of this run among all that save to these keepers; alike on all ranks.
        is_first: Whether this is the first rank of its host.
        bytes_per_s: What it sends to its buddy, at most.
        presence: Keeps this host's keeper from ending.
    """

    def __init__(
        self,
        keepers: Sequence[Keeper],
        *,
        buddy: Keeper | None,
        token: str,
        is_first: bool,
        bytes_per_s: float | None,
        presence: socket.socket | None = None,
    ) -> None:
        self._keepers = tuple(keepers)
        self._buddy = buddy
        self._token = token
        self._is_first = is_first
        self._rate = RateLimit(bytes_per_s)
        self._presence = presence
        self._saves = 0

    def mirrored(self, storage: Folder) -> Mirror:
        """A folder that is written to memory, too; every rank calls it for each save."""
        self._saves += 1
        name = f"{storage.url.rstrip('/').rpartition('/')[2]}@{self._token}-{self._saves}"
        return Mirror(MirroredFolder(storage, KeptFolder(self._keepers, name)), name)

    def spread(self, mirror: Mirror) -> None:
        """Send what this rank has written to its buddy; one that fails is a warning."""
        if self._buddy is None:
            return
        for file in mirror.folder.written:
            try:
                size = self._keepers[0].list(mirror.name)[file]
                self._buddy.write(mirror.name, file, self._parts(mirror.name, file, size))
            except (StorageError, KeyError) as error:
                warnings.warn(f"a checkpoint is not kept on another host: {error}", stacklevel=2)

    def forget_others(self, mirror: Mirror) -> None:
        """Drop what this host keeps of older checkpoints; after all ranks have spread this one."""
        if self._is_first:
            try:
                self._keepers[0].keep(mirror.name)
            except StorageError as error:
                warnings.warn(f"older checkpoints stay in memory: {error}", stacklevel=2)

    def newest(self, name: str) -> tuple[str, Checkpoint] | None:
        """The newest whole checkpoint of a name, and its folder; of any, if that of the last one is asked for."""
        for found in survey(KeptFolder(self._keepers)):
            is_wanted = name in (_LAST, found.name.rpartition("@")[0])
            if is_wanted and found.problem is None and found.checkpoint is not None:
                return found.name, found.checkpoint
        return None

    def folder(self, name: str) -> KeptFolder:
        """A folder of the keepers."""
        return KeptFolder(self._keepers, name)

    def close(self) -> None:
        """Let this host's keeper end, after its time. Safe to call twice."""
        if self._presence is not None:
            self._presence.close()

    def _parts(self, folder: str, file: str, size: int) -> Any:
        scratch = memoryview(bytearray(_PART_BYTES))
        for start in range(0, size, _PART_BYTES):
            part = scratch[: min(_PART_BYTES, size - start)]
            self._keepers[0].read_into(folder, file, start, part)
            self._rate.take(len(part))
            yield part


@dataclass(frozen=True)
class Mirror:
    """A save that goes to memory, too.

    Attributes:
        folder: Where it is written.
        name: Of its folder in memory.
    """

    folder: MirroredFolder
    name: str


def open_replicas(run: RunContext, config: CheckpointConfig, path: str) -> Replicas | None:
    """The keepers of all hosts, started where none runs; every rank calls it. ``None``, and a warning, if that fails.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of a checkpoint; those beside it have the same keepers.
    """
    return _open(run, config, path, start=True)


def find_kept(run: RunContext, config: CheckpointConfig, path: str) -> KeptFolder | None:
    """A checkpoint in the memory of these hosts; every rank calls it, and gets the same one. Storage is not asked.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of the checkpoint; ``last.ckpt`` takes the newest of those beside it.

    Returns:
        Its folder; ``None`` if there is no whole one.
    """
    replicas = _open(run, config, path, start=False)
    if replicas is None:
        return None
    store, key = run.own_store("kept"), f"{replicas._token}/chosen"
    if run.rank == 0:
        try:
            found = replicas.newest(_split(path)[1])
        except StorageError:
            found = None
        store.set(key, "" if found is None else found[0])
    name = _get(store, key, run)
    return replicas.folder(name) if name else None


def _open(run: RunContext, config: CheckpointConfig, path: str, *, start: bool) -> Replicas | None:
    name = client.name_of(_split(path)[0])
    cluster, rank = run.cluster, run.rank
    host = cluster.host_of(rank)
    is_first = cluster.ranks_of_host(host)[0] == rank
    store = run.own_store("keepers")
    attempt = store.add(f"attempts/{rank}", 1)
    if rank == 0:
        store.set(f"{attempt}/token", secrets.token_hex(4))
    if is_first:
        store.set(f"{attempt}/host/{host}", json.dumps(_offer(name, config, start, cluster.num_hosts > 1)))
    said = {each: json.loads(_get(store, f"{attempt}/host/{each}", run)) for each in cluster.hosts}
    token = _get(store, f"{attempt}/token", run)
    failures = [f"host {each}: {offer['error']}" for each, offer in said.items() if "error" in offer]
    if failures:
        if rank == 0:
            warnings.warn(f"checkpoints are not kept in memory: {failures[0]}", stacklevel=4)
        return None
    own = client.find(name)
    keepers = {each: _keeper(offer, own) for each, offer in said.items() if offer}
    if start and own is None:
        warnings.warn(f"checkpoints are not kept in memory: the keeper of host {host} has ended", stacklevel=4)
    identities: dict[str, Keeper] = {} if own is None else {own.endpoint.identity: own}
    for keeper in keepers.values():
        identities.setdefault(keeper.endpoint.identity, keeper)
    buddy = buddies(cluster.host_of_rank)[rank] if config.replica == "buddy" else None
    other = keepers.get(cluster.host_of(buddy)) if buddy is not None else None
    return Replicas(
        list(identities.values()),
        buddy=None if other is own else other,
        token=f"{token}",
        is_first=is_first,
        bytes_per_s=config.replica_bytes_per_s,
        presence=own.attach() if start and own is not None else None,
    )


def _offer(name: str, config: CheckpointConfig, start: bool, has_other_hosts: bool) -> dict[str, Any]:
    """What the first rank of a host says of its keeper; nothing if there is none."""
    try:
        keeper = client.start(name, limit_bytes=config.replica_limit_bytes) if start else client.find(name)
        if keeper is None:
            return {}
        offer: dict[str, Any] = {"identity": keeper.endpoint.identity}
        if has_other_hosts:
            address = address_on_cluster(os.environ)
            offer.update(address=address, port=keeper.listen(address), secret=keeper.endpoint.secret.hex())
    except (StorageError, OSError) as error:
        return {"error": f"{error}"}
    return offer


def _keeper(offer: Mapping[str, Any], own: Keeper | None) -> Keeper:
    if own is not None and offer["identity"] == own.endpoint.identity:
        return own
    secret = bytes.fromhex(offer.get("secret", ""))
    return Keeper(Endpoint(offer["identity"], None, offer.get("address", ""), int(offer.get("port", 0)), secret))


def _get(store: dist.Store, key: str, run: RunContext) -> str:
    with run.collectives.opening("finding checkpoints in memory", run.world):
        store.wait([key], timedelta(seconds=run.collectives.timeout_s))
        return store.get(key).decode()


def _split(path: str) -> tuple[str, str]:
    """The folder that a checkpoint is in, which names the job, and its own name."""
    parent, _, name = (path if "://" in path else os.path.abspath(path)).rstrip("/").rpartition("/")
    return parent, name


def address_on_cluster(environ: Mapping[str, str]) -> str:
    """This host's IPv4 address on the network of the run.

    That of the interface which ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names, else the one from which
    ``MASTER_ADDR`` is reached; loopback without any of them.
    """
    named = next((environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if environ.get(name)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if named:
            request = struct.pack("256s", named.partition(",")[0].lstrip("=^").encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _INTERFACE_ADDRESS, request)[20:24])
        probe.connect((environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])
