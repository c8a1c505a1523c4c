"""Checkpoints of what ranks hold: who writes what, the copy that training waits for, the write that it does not.

A save is three steps, on all ranks alike: each rank takes its share of what it holds
(:func:`~lightning_dist.build.shares.share_of`), copies that into host memory, and writes it in a thread, over a process
group that nothing else uses. With ``snapshot=overlapped`` what only an optimizer's step changes is copied in that
thread, too, and training waits for it before the next step.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_dist.build.copied_shares import Copied, CopiedShares
from lightning_dist.build.keepers import end_keeper
from lightning_dist.build.replicas import Mirror, Replicas, open_replicas
from lightning_dist.build.run import RunContext
from lightning_dist.build.writer import Writer
from lightning_dist.checkpoint.background import stand_back
from lightning_dist.checkpoint.before_steps import BeforeSteps
from lightning_dist.checkpoint.host_copies import HostCopies
from lightning_dist.checkpoint.manifest import TWIN, Manifest
from lightning_dist.checkpoint.mirror import MemoryFolder, MirroredFolder
from lightning_dist.checkpoint.objects import Encoded
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.bounded import LOOK_UP_S, Bounded
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import CheckpointError, CollectiveTimeoutError, PeerLostError
from lightning_dist.parallel.held_state import HeldTensor
from lightning_dist.parallel.held_tensors import HeldTensors

COPY = "checkpoint copy"  # names of events
LATE_COPY = "checkpoint late copy"
COPY_WAIT = "checkpoint copy wait"
WAIT = "checkpoint wait"
MEMORY_WAIT = "checkpoint memory wait"
WRITE = "checkpoint write"

_HEAD_START_S = 0.1  # at most, of the caller


class SaveStarted(NamedTuple):
    """What became of a request to save.

    Attributes:
        is_skipped: It was, since the one before was still being written, or memory cannot be used.
        stall_s: How long the caller was held, in seconds.
        wait_s: How long of that by the one before.
        late_s: How long steps after the one before waited for what it copied late.
    """

    is_skipped: bool
    stall_s: float
    wait_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True)
class Saved:
    """What a committed checkpoint took.

    Attributes:
        stall_s: How long this rank's caller was held, in seconds, also by the end of the checkpoint before, and before
            the next step by what was copied late.
        background_s: How long this rank wrote, in seconds.
        rank_bytes: Tensors that this rank wrote.
        total_bytes: All files of all ranks; ``None`` where it is not known, which is on all ranks but 0.
    """

    stall_s: float
    background_s: float
    rank_bytes: int
    total_bytes: int | None


class _Written(NamedTuple):
    manifest: Manifest | None
    seconds: float


def open_checkpoint_saver(run: RunContext, config: CheckpointConfig, agreement: Agreement | None) -> CheckpointSaver:
    """The saver of a run; every rank calls it."""
    ranks = range(run.cluster.world_size)
    with run.collectives.opening("opening the checkpoints' group", run.world):
        group = make_group(
            ranks,
            rank=run.rank,
            label="checkpoints",
            tier=run.cluster.tier_of(tuple(ranks)).value,
            timeout_s=config.timeout_s,
            backend="gloo",
        )
    assert group is not None, "every rank is in it"
    return CheckpointSaver(run, config, group, agreement)


class CheckpointSaver:
    """Saves, one checkpoint at a time; every rank calls its methods alike.

    Args:
        run: For the seam and the events.
        config: Options.
        group: All ranks; for the thread that writes.
        agreement: How ranks learn whether any of them is busy, and how slow; ``None`` for one rank.

    Attributes:
        held: Describes the tensors of saves.
        known: What objects of saves into memory refer to; see :func:`lightning_dist.checkpoint.objects.encode`.
        kept_step: The optimizer step of the newest checkpoint that goes to memory; ``None`` if that has failed.
        begun_step: The same, whether it has failed or not.
        on_committed: Called with the step of each checkpoint that is there, in the thread that wrote it.
    """

    def __init__(
        self, run: RunContext, config: CheckpointConfig, group: RankGroup, agreement: Agreement | None
    ) -> None:
        self._run = run
        self._config = config
        self._group = group
        self._agreement = agreement
        self._copies = HostCopies(run.device)
        self._shares = CopiedShares(self._copies, run.rank, config)
        self._before_steps = BeforeSteps(self.settle)
        self._caller_is_gone = threading.Event()
        self._is_in_memory = threading.Event()  # or has failed to come there
        self._writer = Writer(run, group, chunk_bytes=config.chunk_bytes, intact=self._copies.complete)
        self._writing: Bounded[_Written] | None = None
        self._newest: Bounded[_Written] | None = None  # the same, until it is known as saved
        self._newest_stall_s = 0.0
        self._late_s = 0.0
        self.last_started: SaveStarted | None = None
        self._newest_bytes = 0
        self._last_saved: Saved | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._replicas: Replicas | None = None
        self._has_saved = False
        self._has_failed = False
        self._is_for_memory = False  # what is being written
        self.held = HeldTensors()
        self.known: set[tuple[bytes, bytes]] = set()
        self.kept_step: int | None = None
        self.begun_step: int | None = None
        self.on_committed: Callable[[int], None] = lambda step: None
        self.skipped = 0

    def save(
        self,
        folder: Folder | None,
        tensors: list[HeldTensor],
        objects: Mapping[str, Encoded],
        record: Mapping[str, Any],
        *,
        optimizers: Iterable[Optimizer],
        kept_as: str | None = None,
        since_ns: int | None = None,
        at_once: bool = False,
    ) -> SaveStarted:
        """Begin a save; with ``mode=sharded``, also end it.

        Args:
            folder: Of the checkpoint; one that is there is replaced. ``None``: it is written to memory only, and a
                failure is a warning.
            tensors: What this rank holds, under the names of the checkpoint; the same names in the same order on ranks
                that hold the same. The same list is taken for the same tensors.
            objects: By names that differ between ranks where the objects do.
            record: See :class:`~lightning_dist.checkpoint.manifest.Manifest`; rank 0's counts.
            optimizers: All that change the tensors.
            kept_as: The path that a run goes on from, for the copy in memory; without it there is none.
            since_ns: When the caller began to be held, by the clock of events; now, if not given.
            at_once: End it, too, and do not skip it.

        Raises:
            CheckpointError: The checkpoint before could not be written; this one has not begun.
        """
        events = self._run.events
        start_ns = events.clock_ns() if since_ns is None else since_ns
        is_stored = folder is not None
        if is_stored and self._config.when_busy == "skip" and not at_once and self.is_anyone_busy():
            self.skipped += 1
            events.count("checkpoints skipped")
            self.last_started = SaveStarted(True, (events.clock_ns() - start_ns) / 1e9)
            return self.last_started
        waited_ns = events.clock_ns()
        self.finish()
        self._note_newest()
        mirror = self._mirror_of(folder, kept_as)
        if not is_stored and mirror is None:  # there has been a warning
            return SaveStarted(True, (events.clock_ns() - start_ns) / 1e9)
        copied_ns = events.clock_ns()
        if self._config.snapshot == "overlapped":
            self._before_steps.watch(optimizers)
        self._caller_is_gone.clear()
        copied = self._shares.copied(tensors, objects)
        events.span(COPY, copied_ns, size_bytes=copied.size_bytes - copied.late_bytes)
        self._is_for_memory = not is_stored
        self._is_in_memory.clear()
        if mirror is not None:
            self.kept_step = self.begun_step = record.get("step")
            record = {**record, TWIN: secrets.token_hex(8)}  # the coordinator's counts
        self._writing = Bounded(lambda: self._write(folder, mirror, copied, record), name="hierdist-checkpoint")
        if is_stored:
            self._newest, self._newest_bytes = self._writing, copied.size_bytes
        if self._config.mode == "sharded" or at_once:
            self.finish()
        stall_s = (events.clock_ns() - start_ns) / 1e9
        started = SaveStarted(False, stall_s, (copied_ns - waited_ns) / 1e9, self._late_s)
        if is_stored:
            self.last_started, self._newest_stall_s, self._late_s = started, stall_s, 0.0
        return started

    def let_begin(self) -> None:
        """All that :meth:`save` was called for is done; copying late and writing may begin.

        Where every core is busy, they make the caller slow, and ranks often meet once more before they go on. They
        begin a moment later all the same if nobody says this.
        """
        self._caller_is_gone.set()

    def settle(self) -> None:
        """Before anything but the step of a watched optimizer changes what may be being copied late: wait for that.

        Each rank for itself. Without effect where nothing is.
        """
        if not self._copies.is_copying:
            return
        start_ns = self._run.events.clock_ns()
        self._copies.settle()
        self._run.events.span(COPY_WAIT, start_ns)
        self._late_s = (self._run.events.clock_ns() - start_ns) / 1e9
        self._newest_stall_s += self._late_s

    def slowest(self, seconds: Iterable[float]) -> list[float]:
        """Of each of some times, the longest over ranks, to a nanosecond; every rank calls it with as many."""
        if self._agreement is None:
            return list(seconds)
        return [max(self._agreement.exchange(round(each * 1e9))) / 1e9 for each in seconds]

    @property
    def last_saved(self) -> Saved | None:
        """The newest that is committed, as far as this rank knows; the same object until another one is."""
        self._note_newest()
        return self._last_saved

    def _note_newest(self) -> None:
        if self._newest is None or not self._newest.succeeds(0):
            return
        manifest, seconds = self._newest.result(0)
        total = None if manifest is None else manifest.size_bytes
        self._last_saved = Saved(self._newest_stall_s, seconds, self._newest_bytes, total)
        self._newest = None

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is committed, or has failed.

        Raises:
            CheckpointError: It has, and ``on_failure`` is ``stop``.
            CollectiveError: A rank is lost.
        """
        self.let_begin()
        self.settle()
        writing, self._writing = self._writing, None
        if writing is None:
            return
        collectives = self._run.collectives
        with (
            self._run.events.measure(WAIT),
            collectives.translated("writing a checkpoint", self._group),
            collectives.activity.waiting("the end of a checkpoint"),
        ):
            failure = self._failure_of(writing)
        if failure is not None and self._is_for_memory:
            warnings.warn(f"a checkpoint is not kept in memory: {failure}", stacklevel=2)
            failure = self.kept_step = None
        elif failure is not None:
            self.kept_step, self._has_failed = None, True
        elif not self._is_for_memory:
            self._has_failed = False
        if failure is None:
            self._do_afterwards()
            return
        self._afterwards = []  # older ones are kept
        if self._config.on_failure == "stop":
            raise failure
        warnings.warn(f"a checkpoint could not be written: {failure}", stacklevel=2)

    def await_memory(self, timeout_s: float) -> bool:
        """Wait until what goes to memory by itself is there, or has failed, each rank for itself.

        Args:
            timeout_s: How long, in seconds.

        Returns:
            Whether nothing of that kind is being written any more.

        Raises:
            PeerLostError: A rank has failed that it waits for.
        """
        if self._writing is None or self._is_in_memory.is_set():
            return True
        with self._run.events.measure(MEMORY_WAIT), self._run.collectives.activity.waiting("a checkpoint in memory"):
            start_s = time.monotonic()
            while (left_s := start_s + timeout_s - time.monotonic()) > 0:
                if self._is_in_memory.wait(min(left_s, LOOK_UP_S)):
                    break
                self._heed_alarm(time.monotonic() - start_s)
        return self._is_in_memory.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._writing is not None and self._writing.is_running

    @property
    def has_failed(self) -> bool:
        """Whether the newest that has ended could not be written."""
        return self._has_failed

    @property
    def has_skipped(self) -> bool:
        """Whether the newest that was asked for was skipped; none that it was to replace may go then."""
        return self.last_started is not None and self.last_started.is_skipped

    def end_memory(self) -> None:
        """At the end of a training that went well: storage has the last checkpoint, and memory is needed no more."""
        if self._replicas is not None and not self._has_failed:
            self._replicas.end()

    def once_committed(self, action: Callable[[], None], *, first: bool = False) -> None:
        """Do something when nothing is being written any more; not at all if that fails.

        Args:
            action: What to do.
            first: Before what was asked for until now.
        """
        self._afterwards.insert(0 if first else len(self._afterwards), action)
        if self._writing is None:
            self._do_afterwards()

    def _do_afterwards(self) -> None:
        actions, self._afterwards = self._afterwards, []
        for action in actions:
            action()

    def close(self) -> None:
        """Release the group, the memory and the optimizers. Safe to call twice.

        After a failure a checkpoint may still be being written, that of the failure itself too. It has as long to end
        as ranks wait for each other; not if they have waited in vain already.
        """
        self.settle()
        self._before_steps.release()
        writing, self._writing = self._writing, None
        is_given_up = writing is not None and not self._ends(writing)
        destroy([self._group])
        if self._replicas is not None:
            self._replicas.close()
        if not is_given_up:
            self._copies.release()

    def _ends(self, writing: Bounded[_Written]) -> bool:
        """Whether a write has ended, well or not, and what was to follow it is done; it is told if it has not."""
        collectives = self._run.collectives
        waits = not isinstance(collectives.failure, CollectiveTimeoutError)
        afterwards, self._afterwards = self._afterwards, []
        try:
            writing.result(min(self._config.timeout_s, collectives.timeout_s) if waits else 0.0)
        except Exception as error:  # something else is being raised
            warnings.warn(f"the last checkpoint was not written: {type(error).__name__}: {error}", stacklevel=3)
            return not writing.is_running
        for action in afterwards:
            action()
        return True

    def _failure_of(self, writing: Bounded[_Written]) -> CheckpointError | None:
        """Known to all ranks alike; a rank that is lost is raised instead."""
        try:
            writing.result(self._config.timeout_s, look=self._heed_alarm)
        except CheckpointError as error:
            return error
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"it was not written within checkpoint.timeout_s={self._config.timeout_s:g} seconds"
            ) from error
        return None

    def _heed_alarm(self, waited_s: float) -> None:
        if (alarm := self._run.collectives.alarm(waited_s)) is not None:
            raise PeerLostError(f"waited {waited_s:.1f} s for a checkpoint, then gave up: {alarm}")

    def is_anyone_busy(self) -> bool:
        """Whether a rank is writing something; every rank calls it."""
        is_busy = self.is_busy
        return any(self._agreement.exchange(int(is_busy))) if self._agreement is not None else is_busy

    def _mirror_of(self, folder: Folder | None, kept_as: str | None) -> Mirror | None:
        is_kept = self._config.replica != "off"
        if is_kept and kept_as is None:
            return None
        path = kept_as or (folder.url if folder is not None else "")
        if not self._has_saved:
            self._has_saved = True
            if is_kept:
                self._replicas = open_replicas(self._run, self._config, path)
            if self._replicas is None:
                end_keeper(self._run, path)
        is_apart = self._config.memory_every_n_steps is not None
        return self._replicas.mirrored(None if is_apart else folder, path) if self._replicas is not None else None

    def _write(
        self, folder: Folder | None, mirror: Mirror | None, copied: Copied, record: Mapping[str, Any]
    ) -> _Written:
        run = self._run
        try:
            self._caller_is_gone.wait(_HEAD_START_S)
            start_ns = run.events.clock_ns()
            if copied.late_bytes:
                with run.events.measure(LATE_COPY, lane="checkpoint", size_bytes=copied.late_bytes):
                    self._copies.copy_rest()
            is_kept = mirror is None or self._keep_first(mirror, copied, record, is_stored=folder is not None)
        finally:
            self._is_in_memory.set()
        if folder is None:
            return _Written(None, (run.events.clock_ns() - start_ns) / 1e9)
        stand_back()  # not before: what memory is to have is to be there before the next failure, and takes little
        mirrored = mirror.folder if mirror is not None and isinstance(mirror.folder, MirroredFolder) else None
        manifest = self._writer.write(mirrored or folder, copied, record)
        end_ns = run.events.clock_ns()
        run.events.span(WRITE, start_ns, lane="checkpoint", end_ns=end_ns, size_bytes=copied.size_bytes)
        if mirrored is not None and mirror is not None and self._replicas is not None:
            if not self._writer.spread(self._replicas, mirror):
                self.kept_step = None
        elif mirror is not None and not is_kept and run.rank == 0 and self._replicas is not None:
            self._replicas.forget_all(mirror)  # storage has something newer now
        self._tell_committed(record)
        return _Written(manifest, (end_ns - start_ns) / 1e9)

    def _keep_first(self, mirror: Mirror, copied: Copied, record: Mapping[str, Any], *, is_stored: bool) -> bool:
        """What goes to memory by itself, before storage has it or without; whether there is nothing wrong with that."""
        if not isinstance(mirror.folder, MemoryFolder) or self._replicas is None:
            return True
        try:
            if not self._writer.keep(self._replicas, mirror, copied, record):
                self.kept_step = None
        except CheckpointError as error:
            if not is_stored:
                raise
            self.kept_step = None
            if self._run.rank == 0:
                warnings.warn(f"a checkpoint is not kept in memory: {error}", stacklevel=2)
            return False
        self._tell_committed(record)
        return True

    def _tell_committed(self, record: Mapping[str, Any]) -> None:
        if isinstance(step := record.get("step"), int):
            self.on_committed(step)
