"""Whether ranks ask for the same operation, found out before any data moves.

Backends do not check it. Where sizes differ, Gloo ends the process (SIGABRT, from a thread of its own); where only
types differ, bytes of one type are added to bytes of another, silently.

An operation that follows the same operation as before is taken for agreed, so a training step repeats the check of its
first occurrence at no cost. Any other is compared with the first rank's, by one key in the store: that rank only
writes, so it waits for nobody, and a rank that differs fails before it sends.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.bounded import LOOK_UP_S, Bounded, comes, own_connection
from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from lightning_dist.events import WAIT, EventStream

_LONG_S = 2.0  # how long a wait for a result lasts until it looks whether the ranks ask for the same


class WatchedFuture(Future[torch.Tensor]):
    """A future on CPU; who waits long for it looks now and then whether the ranks ask for the same.

    Args:
        events: What was waited for it is recorded there.
    """

    look: Callable[[float], None] | None = None

    def __init__(self, events: EventStream) -> None:
        super().__init__()
        self._events = events

    def wait(self) -> torch.Tensor:
        """The value.

        Raises:
            CollectiveMismatchError: The first rank asks for something else.
            PeerLostError: Another rank has failed meanwhile.
        """
        if self.done():
            return super().wait()
        with self._events.measure(WAIT):
            return self._wait()

    def _wait(self) -> torch.Tensor:
        if self.look is not None:
            ended, start_s = threading.Event(), time.monotonic()
            self.add_done_callback(lambda _: ended.set())
            while not ended.wait(_LONG_S):
                self.look(time.monotonic() - start_s)
        return super().wait()


def amount_of(tensor: torch.Tensor) -> str:
    """How many values of which type, e.g. ``10 x float32``; shapes may differ where the numbers do not."""
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


def tag_of(asked: str) -> int:
    """A number by which messages of different operations do not meet."""
    return zlib.crc32(asked.encode()) & 0x7FFFFFFF


class SignatureCheck:
    """Compares what ranks ask for; every rank calls :meth:`check` before each operation, in the same order.

    Args:
        store: Shared by the ranks; its keys are prefixed by the caller. A connection of its own is made to it, since it
            is used in threads.
        collectives: The seam.
        ranks: Global ranks that take part; the first is the one the others compare with.

    Raises:
        CollectiveError: The store does not answer.
    """

    def __init__(self, store: dist.Store, *, collectives: Collectives, ranks: Sequence[int]) -> None:
        self._collectives = collectives
        self._first = ranks[0]
        index = tuple(ranks).index(collectives.rank)
        self._group = RankGroup(tuple(ranks), index, None, "signatures", "world")
        self._agreed: set[tuple[str, str]] = set()
        self._previous = ""
        self._count = 0
        self._asking: Bounded[None] | None = None
        with collectives.translated("opening a connection to the store", self._group):
            self._store = own_connection(store, collectives.timeout_s, look=self._heed_alarm)

    def check(self, asked: str, *, operation: str) -> Callable[[float], None]:
        """Make sure that the first rank asks for the same.

        Args:
            asked: What this rank asks for, in words that are the same on all ranks; see :func:`amount_of`.
            operation: Name of the operation, for messages.

        Returns:
            To be called, with the seconds waited, by who waits long for the result.

        Raises:
            CollectiveMismatchError: The first rank asks for something else.
            CollectiveTimeoutError: It did not get here within the deadline.
            PeerLostError: The store is gone.
        """
        pair, number = (self._previous, asked), self._count
        self._previous, self._count = asked, self._count + 1
        if self._group.size > 1 and pair not in self._agreed:
            self._compare(number, asked, operation)
            self._agreed.add(pair)
        return lambda waited_s: self._look(number, asked, operation, waited_s)

    def _look(self, number: int, asked: str, operation: str, waited_s: float) -> None:
        collectives = self._collectives
        if self._group.size == 1:
            return
        with collectives.translated(operation, self._group):
            self._heed_alarm(waited_s)
        if self._asking is not None and self._asking.is_running:
            return
        said: list[str] = []

        def ask(given_up: threading.Event) -> None:
            if collectives.rank == self._first:
                self._store.set(str(number), asked)
            elif self._store.check([str(number)]):
                said.append(self._store.get(str(number)).decode())

        try:
            self._in_time(ask, min(LOOK_UP_S, collectives.timeout_s))
        except (dist.DistError, CollectiveTimeoutError, PeerLostError):
            return  # whether the wait should end then is said by others
        if said:
            self._refuse_other(number, asked, said[0], operation)

    def _compare(self, number: int, asked: str, operation: str) -> None:
        collectives, first = self._collectives, self._first
        with (
            collectives.translated(operation, self._group),
            collectives.activity.waiting(f"a comparison with rank {first}"),
        ):
            said: list[str] = []

            def ask(given_up: threading.Event) -> None:
                if collectives.rank == first:
                    self._store.set(str(number), asked)
                else:
                    self._wait_for(str(number), given_up)
                    said.append(self._store.get(str(number)).decode())

            self._in_time(ask, collectives.timeout_s)
        if said:
            self._refuse_other(number, asked, said[0], operation)

    def _refuse_other(self, number: int, asked: str, wanted: str, operation: str) -> None:
        collectives, first = self._collectives, self._first
        if wanted != asked:
            raise collectives.own_failure(
                CollectiveMismatchError(
                    f"{collectives.where(collectives.rank)} asks for {asked} as operation {number} ({operation}), "
                    f"{collectives.where(first)} for {wanted}: the ranks' models or the order in which they use them "
                    "differ"
                )
            )

    def _wait_for(self, key: str, given_up: threading.Event) -> None:
        """In short waits, so that the thread ends soon after nobody waits for it any more."""
        while not given_up.is_set():
            if comes(self._store, key, LOOK_UP_S):
                return
        raise PeerLostError("given up")

    def _in_time(self, ask: Callable[[threading.Event], None], timeout_s: float) -> None:
        """Run what uses the store until the deadline or the testimony's alarm.

        Args:
            ask: Given an event that is set when nobody waits for it any more.
            timeout_s: The deadline.
        """
        given_up = threading.Event()
        asking = self._asking = Bounded(lambda: ask(given_up), name="hierdist-signature")
        try:
            asking.result(timeout_s, look=self._heed_alarm)
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"rank {self._first} did not get here, or the store of the rendezvous did not answer, within "
                f"{timeout_s:g} s"
            ) from error
        finally:
            given_up.set()

    def _heed_alarm(self, waited_s: float) -> None:
        if (alarm := self._collectives.alarm(waited_s)) is not None:
            raise PeerLostError(f"waited {waited_s:.1f} s, then gave up: {alarm}")
