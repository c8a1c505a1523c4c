"""The seam: every operation between ranks goes through here.

It is the one place that knows the deadline, emits an event for each operation, lets a fault plan strike, and turns what
the backend says when something breaks into an error that names rank, host and operation. Nothing else in the package
calls ``torch.distributed`` collectives.

Sums are sums: nothing here averages. Gloo's AVG is not to be trusted, so callers divide.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_dist.comm.bounded import LOOK_UP_S
from lightning_dist.comm.testimony import Activity, Testimony
from lightning_dist.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from lightning_dist.events import EventStream, Mark

FaultPoint = Callable[[str, str, int], None]
"""Called with (operation, label of its group, rank) before each operation; may raise, sleep or kill, as a test's fault
plan says."""


# Words of the backends and of torch's own waits, and no others: a user's error may speak of a peer or a connection too.
_BETWEEN_RANKS = ("gloo", "nccl", "operation timed out", "wait timeout", "caused pair closure")
_SHOWN_PEERS = 8
_STILL_WAITING = "Operation timed out!"  # what c10d's Work.wait says when it returned and the work goes on


@dataclass(frozen=True)
class RankGroup:
    """A process group and who is in it.

    Attributes:
        ranks: Global ranks, in group order.
        index: This process's position in ``ranks``.
        process_group: The backend's group, which belongs to one lane only; ``None`` where ranks meet in shared memory.
        label: What it is for, e.g. ``"cross"``; names events and errors.
        tier: The slowest tier it crosses, e.g. ``"world"``.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    label: str
    tier: str

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other global ranks."""
        return tuple(rank for position, rank in enumerate(self.ranks) if position != self.index)


class Work(Protocol):
    """What an asynchronous backend operation returns."""

    def wait(self, timeout: datetime.timedelta = ...) -> Any:
        """Block the host (Gloo) or the current stream (NCCL) until the operation is done."""


class Pending:
    """Operations under way; :meth:`wait` ends them, emits their event and translates their errors."""

    def __init__(
        self,
        owner: Collectives,
        works: Sequence[Work],
        operation: str,
        group: RankGroup,
        size: int,
        *,
        may_retry: bool = False,
    ) -> None:
        self._owner = owner
        self._works = works
        self._operation = operation
        self._group = group
        self._size_bytes = size
        self._may_retry = may_retry  # whether a wait that timed out may be repeated; not so for Gloo's send and receive
        self._start = owner.mark()

    def wait(self, **attributes: Any) -> None:
        """Block until done; on CUDA only the current stream waits. The event spans from start to end.

        Args:
            **attributes: What else the event should say.

        Raises:
            CollectiveTimeoutError: A peer did not answer within the deadline.
            PeerLostError: A peer died or closed its connection.
        """
        self._wait(self._start, attributes)

    def wait_late(self) -> None:
        """:meth:`wait` for what may be done long since: the event spans the waiting only."""
        self._wait(self._owner.mark(), {})

    def _wait(self, start: Mark, attributes: Mapping[str, Any]) -> None:
        owner, group = self._owner, self._group
        waiting = owner.activity.waiting(f"{self._operation} on {group.label!r}")
        with owner.translated(self._operation, group), waiting:
            for work in self._works:
                if not owner.blocks_host:
                    work.wait()
                elif self._may_retry:
                    owner.wait_watchfully(work)
                else:
                    work.wait(owner.deadline)
        owner.events.span_from(
            f"comm.{group.label}",
            start,
            end=owner.mark(),
            lane=group.label,
            operation=self._operation,
            tier=group.tier,
            size_bytes=self._size_bytes,
            **attributes,
        )


class Collectives:
    """Operations between ranks, with a deadline, an event and a fault point each.

    Args:
        events: Where each operation's span goes.
        timeout_s: Deadline of each operation, in seconds.
        rank: This process's global rank.
        host_of_rank: Host name of each global rank, for messages.
        blocks_host: Whether waiting blocks the calling thread (Gloo) or only its CUDA stream (NCCL).
        testimony: Where ranks leave word of what failed, to tell the dead from the bereaved.
        activity: What this rank waits for is written down here, for the testimony's witness.
        fault_point: Called before each operation.
    """

    def __init__(
        self,
        *,
        events: EventStream,
        timeout_s: float,
        rank: int,
        host_of_rank: Sequence[str],
        blocks_host: bool = True,
        testimony: Testimony | None = None,
        activity: Activity | None = None,
        fault_point: FaultPoint | None = None,
    ) -> None:
        self.events = events
        self.timeout_s = timeout_s
        self.deadline = datetime.timedelta(seconds=timeout_s)
        self.rank = rank
        self.host_of_rank = tuple(host_of_rank)
        self.blocks_host = blocks_host
        self.testimony = testimony
        self.activity = activity or Activity()
        self.fault_point = fault_point
        self._first_failure: CollectiveError | None = None
        self._failure_lock = threading.Lock()

    def mark(self) -> Mark:
        """This moment, of the host where it waits for its operations, of the device's stream else."""
        return self.events.clock_ns() if self.blocks_host else self.events.mark()

    def blocking_host(self) -> Collectives:
        """The same seam for groups on CPU memory, whatever the tensors of training live on."""
        return Collectives(
            events=self.events,
            timeout_s=self.timeout_s,
            rank=self.rank,
            host_of_rank=self.host_of_rank,
            testimony=self.testimony,
            activity=self.activity,
            fault_point=self.fault_point,
        )

    @property
    def failure(self) -> CollectiveError | None:
        """The first failed operation of this process; later ones are consequences."""
        return self._first_failure

    def start_all_reduce(
        self, tensor: torch.Tensor, group: RankGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """Begin to reduce ``tensor`` in place over ``group``; every rank of the group calls it.

        Args:
            tensor: Contiguous, any shape, the same shape and dtype on every rank.
            group: Who takes part.
            op: SUM, MAX, MIN or PRODUCT.
        """
        with self.translated("all_reduce", group):
            self._strike("all_reduce", group)
            work = dist.all_reduce(tensor, op=op, group=group.process_group, async_op=True)
        return Pending(self, [work], "all_reduce", group, _size_bytes(tensor), may_retry=True)

    def all_reduce(
        self, tensor: torch.Tensor, group: RankGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """:meth:`start_all_reduce`, waited for."""
        self.start_all_reduce(tensor, group, op).wait()

    def broadcast(self, tensor: torch.Tensor, group: RankGroup, *, source: int) -> None:
        """Give every rank of the group the values of one; every rank of the group calls it.

        Args:
            tensor: Contiguous, the same shape and dtype on every rank; filled on the others.
            group: Who takes part.
            source: Global rank of the one.
        """
        with self.translated("broadcast", group):
            self._strike("broadcast", group)
            work = dist.broadcast(tensor, source, group=group.process_group, async_op=True)
        Pending(self, [work], "broadcast", group, _size_bytes(tensor), may_retry=True).wait()

    def start_exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        group: RankGroup,
        operation: str,
        tag: int = 0,
    ) -> Pending:
        """Begin point-to-point transfers inside a group; every rank calls it with lists that match its peers'.

        Args:
            sends: (position in the group, contiguous tensor) to send.
            receives: (position in the group, contiguous tensor) to fill.
            group: Who takes part.
            operation: What the transfers make up together, for events and errors, e.g. ``"reduce_scatter"``.
            tag: Only transfers of one tag meet, where the backend looks at it (Gloo does).
        """
        with self.translated(operation, group):
            self._strike(operation, group)
            works = self._exchange(sends, receives, group, tag)
        return Pending(self, works, operation, group, sum(_size_bytes(t) for _, t in sends))

    def _exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        group: RankGroup,
        tag: int,
    ) -> Sequence[Work]:
        pg = group.process_group
        operations = [dist.P2POp(dist.irecv, t, group.ranks[i], pg, tag) for i, t in receives if t.numel()]
        operations += [dist.P2POp(dist.isend, t, group.ranks[i], pg, tag) for i, t in sends if t.numel()]
        return dist.batch_isend_irecv(operations) if operations else []

    def start_reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, group: RankGroup) -> Pending:
        """Begin the backend's own reduce-scatter (SUM) of equal parts; ``output`` may be this rank's part of
        ``tensor``.

        Args:
            output: [n / size], this rank's part.
            tensor: [n], n a multiple of the group's size.
            group: Who takes part; part i goes to position i.
        """
        with self.translated("reduce_scatter", group):
            self._strike("reduce_scatter", group)
            work = dist.reduce_scatter_tensor(output, tensor, group=group.process_group, async_op=True)
        return Pending(self, [work], "reduce_scatter", group, _size_bytes(tensor))

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, group: RankGroup) -> Pending:
        """Begin the backend's own all-gather of equal parts; ``tensor`` may be this rank's part of ``output``.

        Args:
            output: [n], n a multiple of the group's size.
            tensor: [n / size], this rank's part.
            group: Who takes part; position i gives part i.
        """
        with self.translated("all_gather", group):
            self._strike("all_gather", group)
            work = dist.all_gather_into_tensor(output, tensor, group=group.process_group, async_op=True)
        return Pending(self, [work], "all_gather", group, _size_bytes(output))

    def alarm(self, waited_s: float) -> str | None:
        """Why who has waited for ``waited_s`` seconds should give up, or ``None``; to be asked each ``LOOK_UP_S``."""
        if self.activity.released is not None:
            return self.activity.released
        return self.testimony.alarm(waited_s) if self.testimony is not None else None

    def wait_watchfully(self, work: Work) -> None:
        """Wait until the deadline or the testimony's alarm: whom a dead rank leaves behind need not wait it out."""
        start_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - start_s
            left_s = self.timeout_s - waited_s
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, min(left_s, LOOK_UP_S))))
                return
            except RuntimeError as error:
                if _STILL_WAITING not in str(error) or left_s <= LOOK_UP_S:
                    raise
                alarm = self.alarm(waited_s)
                if alarm is not None:
                    raise PeerLostError(f"waited {waited_s:.1f} s, then gave up: {alarm}") from error

    @contextmanager
    def operation(self, name: str, group: RankGroup, **attributes: Any) -> Iterator[None]:
        """Run the body as one operation of ``group``: fault point before, event around, errors translated."""
        start = self.mark()
        with self.translated(name, group), self.activity.waiting(f"{name} on {group.label!r}"):
            self._strike(name, group)
            yield
        self.events.span_from(
            f"comm.{group.label}",
            start,
            end=self.mark(),
            lane=group.label,
            operation=name,
            tier=group.tier,
            **attributes,
        )

    @contextmanager
    def translated(self, operation: str, group: RankGroup) -> Iterator[None]:
        """Turn what breaks in the body into an error of our tree that names rank, host, operation and who is lost.

        Nested uses translate once. What is no failure between ranks (no memory left, a type the backend does not know)
        becomes a plain :class:`~lightning_dist.errors.CollectiveError`, and the others learn that it is this rank's
        own.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, CollectiveError) and error.is_named:
                raise
            translated = self._translate(error, operation, group)
            translated.is_named = True
            self._remember(translated)
            raise translated from error

    @contextmanager
    def opening(self, what: str, group: RankGroup) -> Iterator[None]:
        """Around what makes groups or wraps a model: translates what breaks between ranks, lets other errors pass."""
        try:
            with self.activity.waiting(what):
                self._strike(what, group)
                yield
        except (RuntimeError, OSError) as error:
            if not (isinstance(error, CollectiveError) or _is_between_ranks(error, str(error))):
                raise
            with self.translated(what, group):
                raise

    def own_failure(self, error: CollectiveError) -> CollectiveError:
        """Leave word that the failure began on this rank; returns ``error``, whose message must name rank and host."""
        error.is_named = True
        if self.testimony is not None:
            self.testimony.post(str(error), own_fault=True)
        self._remember(error)
        return error

    def where(self, rank: int) -> str:
        """``rank 3 (host b)``."""
        return f"rank {rank} (host {self.host_of_rank[rank]})"

    def _strike(self, operation: str, group: RankGroup) -> None:
        if self.fault_point is not None:
            self.fault_point(operation, group.label, self.rank)

    def _remember(self, error: CollectiveError) -> None:
        with self._failure_lock:
            if self._first_failure is None:
                self._first_failure = error

    def _translate(self, error: RuntimeError | OSError, operation: str, group: RankGroup) -> CollectiveError:
        text = str(error) or type(error).__name__
        what = f"{operation} on group {group.label!r}"
        kind: type[CollectiveError]
        if isinstance(error, CollectiveError):
            kind, said = type(error), text.rstrip(".")
        elif not _is_between_ranks(error, text):
            return self.own_failure(
                CollectiveError(f"{self.where(self.rank)}: {what} failed: {type(error).__name__}: {text}")
            )
        elif self.activity.released is not None:
            kind, said = PeerLostError, "it was told to wait no longer"
        elif "timed out" in text.lower() or "timeout" in text.lower():
            kind, said = CollectiveTimeoutError, f"no answer within {self.timeout_s:g} s (sync.timeout_s)"
        else:
            kind, said = PeerLostError, "a peer closed its connection"
        message = f"{self.where(self.rank)}: {what} failed: {said}."
        if self.testimony is not None:
            verdict = self.testimony.verdict(f"{what}: {said}", self.where)
            message += "" if verdict in message else f" {verdict}"
        if group.peers and not isinstance(error, CollectiveError):
            message += f" Peers in the group: {', '.join(self.where(rank) for rank in group.peers[:_SHOWN_PEERS])}"
            message += f" and {len(group.peers) - _SHOWN_PEERS} more." if len(group.peers) > _SHOWN_PEERS else "."
            message += f" Backend said: {text.splitlines()[0].split('. This is typically')[0][:300]}"
        return kind(message)


def _is_between_ranks(error: RuntimeError | OSError, text: str) -> bool:
    """Whether a backend's error is about other ranks. Gloo raises plain RuntimeErrors, known by its source's path."""
    return isinstance(error, dist.DistError | OSError) or any(word in text.lower() for word in _BETWEEN_RANKS)


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
