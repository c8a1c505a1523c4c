"""The newest checkpoint in memory: the keepers of a run's hosts, what is written to them, and what is found in them.

Ranks meet in the run's store: the first of each host says where its keeper is, and all read what all have said. The
keepers' secrets pass through it, as those of shared memory do.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint.buddies import buddies
from lightning_dist.checkpoint.catalog import Checkpoint, open_checkpoint, survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Endpoint, Keeper
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.mirror import MirroredFolder
from lightning_dist.checkpoint.rate import RateLimit
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import CheckpointError, HierDistError, StorageError
from lightning_dist.events import EventStream
from lightning_dist.topology.addresses import own_address

MEMORY = "checkpoint memory"  # name of an event
_PART_BYTES = 1 << 20
_LAST = "last.ckpt"


@dataclass(frozen=True)
class Mirror:
    """A save that goes to memory, too.

    Attributes:
        folder: Where it is written.
        name: Of its folder in memory.
    """

    folder: MirroredFolder
    name: str


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


class Kept(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        checkpoint: Which.
        presence: Keeps this host's keeper from ending until it is closed; ``None`` where none runs.
    """

    checkpoint: Checkpoint
    presence: socket.socket | None


class Replicas:
    """Keeps the newest checkpoint of a run in memory; every rank has one.

    Args:
        keepers: To write to.
        is_first: Whether this is the first rank of its host.
        bytes_per_s: What it sends to its buddy, at most.
        events: Where the memory used is said.
    """

    def __init__(self, keepers: Keepers, *, is_first: bool, bytes_per_s: float | None, events: EventStream) -> None:
        self._keepers = keepers
        self._own = keepers.all[0]
        self._is_first = is_first
        self._rate = RateLimit(bytes_per_s)
        # At most seconds apart, so that the other side does not take this one for stuck.
        self._part_bytes = _PART_BYTES if bytes_per_s is None else max(4096, min(_PART_BYTES, int(bytes_per_s)))
        self._events = events
        self._presence = _attached(self._own)
        self._saves = 0

    def mirrored(self, storage: Folder) -> Mirror:
        """A folder that is written to memory, too; every rank calls it for each save."""
        self._saves += 1
        name = f"{_split(storage.url)[1]}@{self._keepers.token}-{self._saves}"
        return Mirror(MirroredFolder(storage, KeptFolder(self._keepers.all, name)), name)

    def spread(self, mirror: Mirror) -> None:
        """Send what this rank has written to its buddy; if that fails, there is a warning."""
        buddy = self._keepers.buddy
        if buddy is None:
            return
        for file in mirror.folder.written:
            try:
                size = self._own.list(mirror.name).get(file)
                if size is None:
                    raise StorageError(f"{self._own.endpoint} has lost {file}")
                buddy.write(mirror.name, file, self._parts(mirror.name, file, size))
            except StorageError as error:
                warnings.warn(f"a checkpoint is not kept on another host: {error}", stacklevel=2)

    def forget_others(self, mirror: Mirror) -> None:
        """Drop what this host keeps of older checkpoints; after all ranks have spread this one."""
        if not self._is_first:
            return
        try:
            self._own.keep(mirror.name)
            self._events.count(MEMORY, self._own.about()["used_bytes"], lane="checkpoint")
        except StorageError as error:
            warnings.warn(f"older checkpoints stay in memory: {error}", stacklevel=2)

    def close(self) -> None:
        """Let this host's keeper end, after its time. Safe to call twice."""
        if self._presence is not None:
            self._presence.close()

    def _parts(self, folder: str, file: str, size: int) -> Iterator[memoryview]:
        scratch = memoryview(bytearray(min(self._part_bytes, size)))
        for start in range(0, size, self._part_bytes):
            part = scratch[: size - start]
            if self._own.read_into(folder, file, start, part) != len(part):
                raise StorageError(f"{self._own.endpoint} has lost {file}")
            self._rate.take(len(part))
            yield part


def open_replicas(run: RunContext, config: CheckpointConfig, path: str) -> Replicas | None:
    """Begin to keep checkpoints in memory; every rank calls it. ``None``, and a warning, if it cannot be.

    Keepers are started where none runs.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of a checkpoint; those beside it have the same keepers.
    """
    keepers = _meet(run, config, path, start=True)
    if keepers is None:
        return None
    return Replicas(keepers, is_first=_is_first(run), bytes_per_s=config.replica_bytes_per_s, events=run.events)


def find_kept(run: RunContext, config: CheckpointConfig, path: str) -> Kept | None:
    """A checkpoint in the memory of these hosts; every rank calls it, and gets the same one. Storage is not asked.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of the checkpoint; ``last.ckpt`` takes the newest of those beside it.

    Returns:
        ``None`` on all ranks if there is none of which every rank sees all files.
    """
    keepers = _meet(run, config, path, start=False)
    if keepers is None:
        return None
    store = dist.PrefixStore(f"{keepers.token}/", run.own_store("kept"))
    if run.rank == 0:
        store.set("chosen", _newest(KeptFolder(keepers.all), _split(path)[1]))
    chosen = _get(store, "chosen", run)
    if not chosen:
        return None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(KeptFolder(keepers.all, chosen))
    except CheckpointError as error:
        warnings.warn(f"{path} is read from storage: {error}", stacklevel=3)
        store.add("blind", 1)
    if store.add("looked", 1) == run.cluster.world_size:  # the last one, and so all have said what they see
        store.set("number blind", str(store.add("blind", 0)))
    is_seen_by_all = _get(store, "number blind", run) == "0"
    if checkpoint is None or not is_seen_by_all:
        return None
    return Kept(checkpoint, _attached(keepers.own) if keepers.own is not None else None)


def forget_kept(run: RunContext, path: str) -> None:
    """End the keeper of this host, if one runs: what an earlier run has kept there is about to be old.

    Args:
        run: Of these ranks, which keep nothing in memory.
        path: Of a checkpoint that is about to be written.
    """
    if not _is_first(run):
        return
    keeper = client.find(client.name_of(_split(path)[0]))
    if keeper is not None:
        try:
            keeper.end()
        except StorageError as error:
            warnings.warn(f"what an earlier run keeps in memory stays there: {error}", stacklevel=3)


def _newest(root: KeptFolder, name: str) -> str:
    """The folder of the newest whole checkpoint of a name, of any name for that of the last one; empty if none is."""
    try:
        found = survey(root)
    except StorageError:
        return ""
    for entry in found:
        if entry.checkpoint is not None and entry.problem is None and name in (_LAST, entry.name.rpartition("@")[0]):
            return entry.name
    return ""


def _meet(run: RunContext, config: CheckpointConfig, path: str, *, start: bool) -> Keepers | None:
    """All keepers, on every rank; ``None`` on all, and a warning, if one that runs or is started cannot be used."""
    name = client.name_of(_split(path)[0])
    cluster, rank = run.cluster, run.rank
    host = cluster.host_of(rank)
    attempts = run.own_store("keepers")
    store = dist.PrefixStore(f"{attempts.add(f'attempts/{rank}', 1)}/", attempts)
    if rank == 0:
        store.set("token", secrets.token_hex(4))
    if _is_first(run):
        offer = _offer(name, config, start=start, has_other_hosts=cluster.num_hosts > 1)
        store.set(f"host/{host}", json.dumps(offer))
    offers: dict[str, dict[str, Any]] = {each: json.loads(_get(store, f"host/{each}", run)) for each in cluster.hosts}
    token = _get(store, "token", run)
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
    if other is not None and other is own and rank == 0:
        warnings.warn(
            "checkpoint.replica=buddy has no effect beyond memory: what are called several hosts have one memory",
            stacklevel=4,
        )
    return Keepers(tuple(distinct.values()), own, None if other is own else other, token)


def _offer(name: str, config: CheckpointConfig, *, start: bool, has_other_hosts: bool) -> dict[str, Any]:
    """What the first rank of a host says of its keeper; nothing if there is none."""
    try:
        keeper = client.start(name, limit_bytes=config.replica_limit_bytes) if start else client.find(name)
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


def _attached(keeper: Keeper) -> socket.socket | None:
    try:
        return keeper.attach()
    except StorageError as error:
        warnings.warn(f"checkpoints are not kept in memory: {error}", stacklevel=4)
        return None


def _is_first(run: RunContext) -> bool:
    return run.cluster.rank_in_host(run.rank) == 0


def _get(store: dist.Store, key: str, run: RunContext) -> str:
    with run.collectives.opening("meeting to keep checkpoints in memory", run.world):
        store.wait([key], timedelta(seconds=run.collectives.timeout_s))
        return store.get(key).decode()


def _split(path: str) -> tuple[str, str]:
    """The folder that a checkpoint is in, which names the job, and its own name."""
    parent, _, name = (path if "://" in path else os.path.abspath(path)).rstrip("/").rpartition("/")
    return parent, name
