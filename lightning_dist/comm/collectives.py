"""The seam: every operation between ranks goes through here.

It is the one place that knows the deadline, emits an event for each operation, lets a fault plan strike, and turns what the
backend says when something breaks into an error that names rank, host and operation. Nothing else in the package calls
``torch.distributed`` collectives.

Sums are sums: nothing here averages. Gloo's AVG is not to be trusted, so callers divide.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_dist.comm.testimony import Testimony
from lightning_dist.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from lightning_dist.events import EventStream

FaultPoint = Callable[[str, str, int], None]
"""Called with (operation, label of its group, rank) before each operation; may raise, sleep or kill, as a test's fault
plan says."""


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

    def __init__(self, owner: Collectives, works: Sequence[Work], operation: str, group: RankGroup, size: int) -> None:
        self._owner = owner
        self._works = works
        self._operation = operation
        self._group = group
        self._size_bytes = size
        self._start_ns = owner.events.clock_ns()

    def wait(self, *, span_from_wait: bool = False, **attributes: Any) -> None:
        """Block until done; on CUDA only the current stream waits.

        Args:
            span_from_wait: Let the event begin now instead of at the start: for what may be done long since.
            **attributes: What else the event should say.

        Raises:
            CollectiveTimeoutError: A peer did not answer within the deadline.
            PeerLostError: A peer died or closed its connection.
        """
        owner, group = self._owner, self._group
        start_ns = owner.events.clock_ns() if span_from_wait else self._start_ns
        with owner.translated(self._operation, group):
            for work in self._works:
                if owner.blocks_host:
                    work.wait(owner.deadline)
                else:
                    work.wait()
        owner.events.span(
            f"comm.{group.label}",
            start_ns,
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
        fault_point: FaultPoint | None = None,
    ) -> None:
        self.events = events
        self.timeout_s = timeout_s
        self.deadline = datetime.timedelta(seconds=timeout_s)
        self.rank = rank
        self.host_of_rank = tuple(host_of_rank)
        self.blocks_host = blocks_host
        self.testimony = testimony
        self.fault_point = fault_point
        self._first_failure: CollectiveError | None = None
        self._failure_lock = threading.Lock()

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
        self._strike("all_reduce", group)
        with self.translated("all_reduce", group):
            work = dist.all_reduce(tensor, op=op, group=group.process_group, async_op=True)
        return Pending(self, [work], "all_reduce", group, _size_bytes(tensor))

    def all_reduce(
        self, tensor: torch.Tensor, group: RankGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """:meth:`start_all_reduce`, waited for."""
        self.start_all_reduce(tensor, group, op).wait()

    def start_exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        group: RankGroup,
        operation: str,
    ) -> Pending:
        """Begin point-to-point transfers inside a group; every rank calls it with lists that match its peers'.

        Args:
            sends: (position in the group, contiguous tensor) to send.
            receives: (position in the group, contiguous tensor) to fill.
            group: Who takes part.
            operation: What the transfers make up together, for events and errors, e.g. ``"reduce_scatter"``.
        """
        self._strike(operation, group)
        with self.translated(operation, group):
            works = self._exchange(sends, receives, group)
        return Pending(self, works, operation, group, sum(_size_bytes(t) for _, t in sends))

    def _exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        group: RankGroup,
    ) -> list[Work]:
        pg = group.process_group
        operations = [dist.P2POp(dist.irecv, t, group.ranks[i], pg) for i, t in receives if t.numel()]
        operations += [dist.P2POp(dist.isend, t, group.ranks[i], pg) for i, t in sends if t.numel()]
        return dist.batch_isend_irecv(operations) if operations else []

    def start_reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, group: RankGroup) -> Pending:
        """Begin the backend's own reduce-scatter (SUM) of equal parts; ``output`` may be this rank's part of ``tensor``.

        Args:
            output: [n / size], this rank's part.
            tensor: [n], n a multiple of the group's size.
            group: Who takes part; part i goes to position i.
        """
        self._strike("reduce_scatter", group)
        with self.translated("reduce_scatter", group):
            work = dist.reduce_scatter_tensor(output, tensor, group=group.process_group, async_op=True)
        return Pending(self, [work], "reduce_scatter", group, _size_bytes(tensor))

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, group: RankGroup) -> Pending:
        """Begin the backend's own all-gather of equal parts; ``tensor`` may be this rank's part of ``output``.

        Args:
            output: [n], n a multiple of the group's size.
            tensor: [n / size], this rank's part.
            group: Who takes part; position i gives part i.
        """
        self._strike("all_gather", group)
        with self.translated("all_gather", group):
            work = dist.all_gather_into_tensor(output, tensor, group=group.process_group, async_op=True)
        return Pending(self, [work], "all_gather", group, _size_bytes(output))

    @contextmanager
    def operation(self, name: str, group: RankGroup, **attributes: Any) -> Iterator[None]:
        """Run the body as one operation of ``group``: fault point before, event around, errors translated."""
        self._strike(name, group)
        start_ns = self.events.clock_ns()
        with self.translated(name, group):
            yield
        self.events.span(
            f"comm.{group.label}", start_ns, lane=group.label, operation=name, tier=group.tier, **attributes
        )

    @contextmanager
    def translated(self, operation: str, group: RankGroup) -> Iterator[None]:
        """Turn a backend's error into one of our tree that names rank, host, operation and suspects."""
        try:
            yield
        except CollectiveError as error:
            self._remember(error)
            raise
        except (RuntimeError, OSError) as error:
            translated = self._translate(error, operation, group)
            self._remember(translated)
            raise translated from error

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

    def _translate(self, error: BaseException, operation: str, group: RankGroup) -> CollectiveError:
        text = str(error)
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        what = (
            f"no answer within {self.timeout_s:g} s (sync.timeout_s)" if timed_out else "a peer closed its connection"
        )
        peers = ", ".join(self.where(rank) for rank in group.peers)
        message = f"{self.where(self.rank)}: {operation} on group {group.label!r} failed: {what}; peers: {peers}."
        if self.testimony is not None:
            message += " " + self.testimony.verdict(f"{operation} on {group.label!r}: {what}", self.where)
        message += f" Backend said: {text.splitlines()[0][:300] if text else type(error).__name__}"
        return CollectiveTimeoutError(message) if timed_out else PeerLostError(message)


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
