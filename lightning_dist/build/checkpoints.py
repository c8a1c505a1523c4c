"""Checkpoints of what ranks hold: who writes what, the copy that training waits for, the write that it does not.

A save is three steps, on all ranks alike: each rank takes its share of what it holds (:func:`share_of`), copies that
into host memory, and writes it in a thread, over a process group that nothing else uses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_dist.build.keepers import end_keeper
from lightning_dist.build.replicas import Mirror, Replicas, open_replicas
from lightning_dist.build.run import RunContext
from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.host_copies import HostCopies
from lightning_dist.checkpoint.host_pieces import Held, HostPiece, TiedTo, dtype_name
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.objects import Encoded
from lightning_dist.checkpoint.pieces import Piece, deal
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.bounded import Bounded
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.config import CheckpointConfig
from lightning_dist.errors import CheckpointError, CollectiveTimeoutError, PeerLostError
from lightning_dist.parallel.boxes import Spread
from lightning_dist.parallel.held_state import HeldTensor, TensorToFill

COPY = "checkpoint copy"  # names of events
WAIT = "checkpoint wait"
WRITE = "checkpoint write"
SPREAD = "checkpoint spread"


class SaveStarted(NamedTuple):
    """What became of a request to save.

    Attributes:
        is_skipped: It was, since the one before was still being written.
        stall_s: How long the caller was held, in seconds.
    """

    is_skipped: bool
    stall_s: float


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
        agreement: How ranks learn whether any of them is busy; ``None`` for one rank.
    """

    def __init__(
        self, run: RunContext, config: CheckpointConfig, group: RankGroup, agreement: Agreement | None
    ) -> None:
        self._run = run
        self._config = config
        self._group = group
        self._agreement = agreement
        self._copies = HostCopies(run.device)
        self._writing: Bounded[Manifest | None] | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._replicas: Replicas | None = None
        self._has_saved = False
        self._has_failed = False
        self.skipped = 0

    def save(
        self,
        folder: Folder,
        tensors: Iterable[HeldTensor],
        objects: Mapping[str, Encoded],
        record: Mapping[str, Any],
    ) -> SaveStarted:
        """Begin a save; with ``mode=sharded``, also end it.

        Args:
            folder: Of the checkpoint; one that is there is replaced.
            tensors: What this rank holds, under the names of the checkpoint; the same names in the same order on ranks
                that hold the same.
            objects: By names that differ between ranks where the objects do.
            record: See :class:`~lightning_dist.checkpoint.manifest.Manifest`; rank 0's counts.

        Raises:
            CheckpointError: The checkpoint before could not be written; this one has not begun.
        """
        events = self._run.events
        start_ns = events.clock_ns()
        if self._config.when_busy == "skip" and self._is_anyone_busy():
            self.skipped += 1
            events.count("checkpoints skipped")
            return SaveStarted(True, (events.clock_ns() - start_ns) / 1e9)
        self.finish()
        copied_ns = events.clock_ns()
        state = self._copied(tensors)
        state.update(objects)
        events.span(COPY, copied_ns, size_bytes=self._copies.size_bytes)
        mirror = self._mirror_of(folder)
        self._writing = Bounded(lambda: self._write(folder, mirror, state, record), name="hierdist-checkpoint")
        if self._config.mode == "sharded":
            self.finish()
        return SaveStarted(False, (events.clock_ns() - start_ns) / 1e9)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is committed, or has failed.

        Raises:
            CheckpointError: It has, and ``on_failure`` is ``stop``.
            CollectiveError: A rank is lost.
        """
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
        self._has_failed = failure is not None
        if failure is None:
            self._do_afterwards()
            return
        self._afterwards = []  # older ones are kept
        if self._config.on_failure == "stop":
            raise failure
        warnings.warn(f"a checkpoint could not be written: {failure}", stacklevel=2)

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
        """Release the group and the memory; what is being written is given up. Safe to call twice."""
        destroy([self._group])
        if self._replicas is not None:
            self._replicas.close()
        if self._writing is None or not self._writing.is_running:
            self._copies.release()

    def _failure_of(self, writing: Bounded[Manifest | None]) -> CheckpointError | None:
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

    def _is_anyone_busy(self) -> bool:
        is_busy = self._writing is not None and self._writing.is_running
        return any(self._agreement.exchange(int(is_busy))) if self._agreement is not None else is_busy

    def _copied(self, tensors: Iterable[HeldTensor]) -> dict[str, Any]:
        held = list(tensors)
        share = share_of(held, self._run.rank, chunk_bytes=self._config.chunk_bytes)
        copies = self._copies.take([piece.data for piece in share])
        pieces: dict[str, list[HostPiece]] = {}
        for mine, copy in zip(share, copies, strict=True):
            pieces.setdefault(mine.piece.name, []).append(HostPiece(mine.piece, copy))
        state: dict[str, Any] = {name: Held(tuple(own)) for name, own in pieces.items()}
        for each in held:
            state.update(dict.fromkeys(each.names[1:], TiedTo(each.names[0])))
        return state

    def _mirror_of(self, folder: Folder) -> Mirror | None:
        if not self._has_saved:
            self._has_saved = True
            if self._config.replica != "off":
                self._replicas = open_replicas(self._run, self._config, folder.url)
            if self._replicas is None:
                end_keeper(self._run, folder.url)
        return self._replicas.mirrored(folder) if self._replicas is not None else None

    def _write(
        self, folder: Folder, mirror: Mirror | None, state: dict[str, Any], record: Mapping[str, Any]
    ) -> Manifest | None:
        run = self._run
        start_ns = run.events.clock_ns()
        self._copies.wait()
        manifest = sharded.save(
            state,
            folder if mirror is None else mirror.folder,
            rank=run.rank,
            host=run.cluster.host_of(run.rank),
            group=self._group.process_group,
            record=record,
            chunk_bytes=self._config.chunk_bytes,
        )
        run.events.span(WRITE, start_ns, lane="checkpoint", size_bytes=self._copies.size_bytes)
        if mirror is not None and self._replicas is not None:
            with run.events.measure(SPREAD, lane="checkpoint"):
                self._replicas.spread(mirror)
            dist.barrier(group=self._group.process_group)
            self._replicas.forget_others(mirror)
        return manifest


def share_of(tensors: Iterable[HeldTensor], rank: int, *, chunk_bytes: int) -> list[HostPiece]:
    """What a rank writes of what it holds: what it alone holds, and its share of what several do.

    Args:
        tensors: The same in the same order on ranks that hold the same.
        rank: This one.
        chunk_bytes: The largest piece.
    """
    by_holders: dict[tuple[int, ...], list[HostPiece]] = {}
    for held in tensors:
        by_holders.setdefault(tuple(sorted(held.holders)), []).extend(_pieces_of(held))
    share = []
    for holders, pieces in by_holders.items():
        dealt = deal([each.piece for each in pieces], holders, max_bytes=chunk_bytes)[rank]
        by_name: dict[str, list[HostPiece]] = {}
        for each in pieces:
            by_name.setdefault(each.piece.name, []).append(each)
        for piece in dealt:
            source = next(each for each in by_name[piece.name] if each.holds(piece))
            share.append(HostPiece(piece, source.part(piece)))
    return share


def to_read(to_fill: TensorToFill) -> Held:
    """Where the reader puts the values of a tensor."""
    assert to_fill.part is not None, "wanted here"
    return Held(tuple(_host_pieces(to_fill.name, to_fill.part, to_fill.spread)))


def _pieces_of(held: HeldTensor) -> list[HostPiece]:
    return _host_pieces(held.names[0], held.local, held.spread)


def _host_pieces(name: str, part: torch.Tensor, spread: Spread) -> list[HostPiece]:
    return [
        HostPiece(Piece(name, dtype_name(part.dtype), spread.shape, box.offsets, box.sizes), part[box.in_part])
        for box in spread.boxes
    ]
