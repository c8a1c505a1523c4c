"""What a server holds of a table, and in which order look-ups, gradients and steps may meet there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from lightning_dist.comm.bounded import LOOK_UP_S
from lightning_dist.errors import CollectiveTimeoutError, PeerLostError
from lightning_dist.gradsync.sparse.rows import Rows, merged

Alarm = Callable[[float], "str | None"]


class Shard:
    """Rows of a table on one server, which several threads use.

    The order: after step v is over (:meth:`publish`), look-ups that ask for version v are answered; each rank pushes
    what it has for the next step; once all have, their sum is taken (:meth:`collect`), and the next step is made by
    who called. Nobody pushes for a step before that before is over, so that at most one step's rows are waiting.

    Args:
        values: [k, ...], looked at while no step is being made; whoever steps writes into it.
        num_ranks: That push.
        timeout_s: Deadline of each wait, in seconds.
        alarm: Given the seconds waited, says why to give up, or ``None``.
    """

    def __init__(self, values: Tensor, *, num_ranks: int, timeout_s: float, alarm: Alarm) -> None:
        self.values = values
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._version = 0
        self._pushed: dict[int, Rows] = {}
        self._changed = threading.Condition()
        self._ended: str | None = None

    def publish(self, version: int) -> None:
        """Step ``version`` is over."""
        with self._changed:
            self._version = max(self._version, version)
            self._changed.notify_all()

    def look_up(self, positions: Tensor, version: int) -> Tensor:
        """[n, ...]: some rows, once step ``version`` is over."""
        self._wait(lambda: self._version >= version, f"step {version}")
        return self.values[positions]

    def push(self, rank: int, rows: Rows) -> None:
        """Take a rank's rows for the present step, numbered by position."""
        self._wait(lambda: rank not in self._pushed, "the end of the step before")
        with self._changed:
            self._pushed[rank] = rows
            self._changed.notify_all()

    def collect(self) -> Rows:
        """The sum of what all ranks have pushed, in their order; then they may push for the next step."""
        self._wait(lambda: len(self._pushed) == self._num_ranks, "the gradients of all ranks")
        with self._changed:
            pushed, self._pushed = self._pushed, {}
            self._changed.notify_all()
        return merged([pushed[rank] for rank in sorted(pushed)])

    def end(self, reason: str) -> None:
        """Nobody waits here any more."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        start_s = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: condition() or self._ended is not None, LOOK_UP_S):
                waited_s = time.monotonic() - start_s
                if waited_s >= self._timeout_s:
                    raise CollectiveTimeoutError(
                        f"waited {self._timeout_s:g} s (sync.timeout_s) at a parameter server for {what}"
                    )
                if (alarm := self._alarm(waited_s)) is not None:
                    raise PeerLostError(f"waited {waited_s:.1f} s at a parameter server for {what}: {alarm}")
            if not condition():
                raise PeerLostError(f"the parameter server has ended: {self._ended}")
