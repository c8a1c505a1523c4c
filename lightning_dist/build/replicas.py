"""The newest checkpoint in memory: what a run writes to its keepers, and what it finds in them."""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from lightning_dist.build.keepers import Keepers, attached, is_first_of_host, meet, said, split_path
from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint.catalog import Checkpoint, open_checkpoint, survey
from lightning_dist.checkpoint.keeper.client import Line
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.checkpoint.kept_save import KeptSave, Lines
from lightning_dist.checkpoint.lineage import Lineage
from lightning_dist.checkpoint.mirror import MemoryFolder, MirroredFolder
from lightning_dist.checkpoint.rate import RateLimit
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import CheckpointError, StorageError
from lightning_dist.events import EventStream

MEMORY = "checkpoint memory"  # name of an event
_PART_BYTES = 1 << 20
_LAST = "last.ckpt"


@dataclass(frozen=True)
class Mirror:
    """A save that goes to memory, too.

    Attributes:
        folder: Where it is written, to storage as well or not.
        name: Of its folder in memory.
    """

    folder: MirroredFolder | MemoryFolder
    name: str


class Kept(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        checkpoint: Which.
        presence: Keeps this host's keeper from ending until it is closed; ``None`` where none runs.
    """

    checkpoint: Checkpoint
    presence: socket.socket | None

    @property
    def name(self) -> str:
        """Of the checkpoint, without what makes its folder in memory one of its own."""
        return self.checkpoint.folder.url.rpartition("/")[2].rpartition("@")[0]


class Replicas:
    """Keeps the newest checkpoint of a run in memory; every rank has one.

    Args:
        keepers: To write to.
        job: The folder whose checkpoints they hold.
        is_first: Whether this is the first rank of its host.
        bytes_per_s: What it sends to its buddy, at most.
        events: Where the memory used is said.
    """

    def __init__(
        self, keepers: Keepers, job: str, *, is_first: bool, bytes_per_s: float | None, events: EventStream
    ) -> None:
        self._keepers = keepers
        self._job = job
        self._has_left_out = False
        self._own = keepers.all[0]
        self._is_first = is_first
        self._rate = RateLimit(bytes_per_s)
        # At most seconds apart, so that the other side does not take this one for stuck.
        self._part_bytes = _PART_BYTES if bytes_per_s is None else max(4096, min(_PART_BYTES, int(bytes_per_s)))
        self._events = events
        self._presence = attached(self._own)
        self._saves = 0
        lines = {keeper.endpoint.identity: Line(keeper) for keeper in keepers.all}
        buddy = None if keepers.buddy is None else lines.get(keepers.buddy.endpoint.identity)
        self._lines = Lines(
            tuple(lines.values()), buddy, rate=self._rate, part_bytes=self._part_bytes, used=self._say_used
        )

    def mirrored(self, storage: Folder | None, path: str) -> Mirror | None:
        """A folder that is written to memory, too; every rank calls it for each save.

        Args:
            storage: Of the checkpoint; ``None``: it is written to memory only.
            path: That a run goes on from.

        Returns:
            ``None`` for one that is beside others than the first: it could not be told from one of its name there.
        """
        job, own_name = split_path(path)
        if job != self._job:
            if not self._has_left_out:
                self._has_left_out = True
                warnings.warn(
                    f"{path} is not kept in memory, nor are others in its folder: a run keeps those of one folder, "
                    f"here {self._job}",
                    stacklevel=4,
                )
            return None
        self._saves += 1
        name = f"{own_name}@{self._keepers.token}-{self._saves}"
        kept = KeptFolder(self._keepers.all, name)
        return Mirror(MemoryFolder(kept) if storage is None else MirroredFolder(storage, kept), name)

    def kept_save(self, mirror: Mirror) -> KeptSave:
        """The way into memory for a save by a plan that has been made before."""
        return KeptSave(self._lines, mirror.name)

    def spread(self, mirror: Mirror) -> bool:
        """Send what this rank has written to its buddy; whether that is there. If it fails, there is a warning."""
        buddy, is_there = self._keepers.buddy, True
        if buddy is None:
            return is_there
        for file in mirror.folder.written:
            try:
                size = self._own.list(mirror.name).get(file)
                if size is None:
                    raise StorageError(f"{self._own.endpoint} has lost {file}")
                buddy.write(mirror.name, file, self._parts(mirror.name, file, size))
            except StorageError as error:
                warnings.warn(f"a checkpoint is not kept on another host: {error}", stacklevel=2)
                is_there = False
        return is_there

    def forget_others(self, mirror: Mirror) -> None:
        """Drop what this host keeps of older checkpoints; after all ranks have spread this one."""
        if not self._is_first:
            return
        try:
            self._own.keep(mirror.name)
            self._say_used(self._own.about()["used_bytes"])
        except StorageError as error:
            warnings.warn(f"older checkpoints stay in memory: {error}", stacklevel=2)

    def forget_all(self, mirror: Mirror) -> None:
        """Drop what all keepers have, which is old, and nothing of this save."""
        if isinstance(mirror.folder, MemoryFolder):
            with contextlib.suppress(NoKeeperError):  # none is there
                mirror.folder.forget_all()

    def end(self) -> None:
        """End this host's keeper; after all ranks have spread the last checkpoint."""
        self.close()
        if self._is_first:
            with contextlib.suppress(NoKeeperError):  # it has ended
                self._own.end()

    def close(self) -> None:
        """Let this host's keeper end, after its time. Safe to call twice."""
        self._lines.close()
        if self._presence is not None:
            self._presence.close()

    def _say_used(self, size_bytes: int) -> None:
        if self._is_first:
            self._events.count(MEMORY, size_bytes, lane="checkpoint")

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
    keepers = meet(run, config, path, start=True)
    if keepers is None:
        return None
    return Replicas(
        keepers,
        split_path(path)[0],
        is_first=is_first_of_host(run),
        bytes_per_s=config.replica_bytes_per_s,
        events=run.events,
    )


def find_kept(run: RunContext, config: CheckpointConfig, path: str) -> Kept | None:
    """A checkpoint in the memory of these hosts; every rank calls it, and gets the same one. Storage is not asked.

    Args:
        run: Of these ranks.
        config: Options.
        path: Of the checkpoint; ``last.ckpt`` takes the newest of those beside it.

    Returns:
        ``None`` on all ranks if there is none of which every rank sees all files.
    """
    return _find(run, config, path, lambda root: _newest(root, split_path(path)[1]))


def find_own_kept(run: RunContext, config: CheckpointConfig, folder: str, lineage: Lineage) -> Kept | None:
    """The newest that this run has saved itself, as :func:`find_kept`.

    Args:
        run: Of these ranks.
        config: Options.
        folder: Whose checkpoints they are.
        lineage: Which run this is; rank 0's counts.
    """
    return _find(run, config, f"{folder.rstrip('/')}/{_LAST}", lambda root: _newest_own(root, lineage))


def _find(run: RunContext, config: CheckpointConfig, path: str, choose: Callable[[KeptFolder], str]) -> Kept | None:
    keepers = meet(run, config, path, start=False)
    if keepers is None:
        return None
    store = dist.PrefixStore(f"{keepers.token}/", run.own_store("kept"))
    if run.rank == 0:
        store.set("chosen", choose(KeptFolder(keepers.all)))
    chosen = said(store, "chosen", run)
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
    is_seen_by_all = said(store, "number blind", run) == "0"
    if checkpoint is None or not is_seen_by_all:
        return None
    return Kept(checkpoint, attached(keepers.own) if keepers.own is not None else None)


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


def _newest_own(root: KeptFolder, lineage: Lineage) -> str:
    try:
        own = lineage.newest_first(survey(root))
    except StorageError:
        return ""
    return own[0].name if own else ""
