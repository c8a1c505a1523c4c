"""What a server holds of a table, and in which order look-ups, gradients and steps may meet there.

A shard is stepped in one of three ways. By its owner (no ``step``): each rank pushes for the present step, the owner
takes the sum (:meth:`Shard.collect`), steps, and says so (:meth:`Shard.publish`). By itself, in order: whoever pushes
last for a step makes it, and ranks may be ahead by ``staleness`` steps. By itself, in any order (``staleness=None``):
each push is a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.comm.bounded import LOOK_UP_S
from lightning_dist.errors import CollectiveTimeoutError, PeerLostError
from lightning_dist.gradsync.parameter_server.history import History
from lightning_dist.gradsync.parameter_server.stepping import Options, RowStep
from lightning_dist.gradsync.sparse.rows import Rows, merged

Alarm = Callable[[float], "str | None"]


@dataclass(frozen=True)
class _Pushed:
    """What a rank gives for a step."""

    rows: Rows
    options: Options


class Shard:
    """Rows of a table on one server, which several threads use.

    Version v is what v steps have made. Nobody pushes for step v + staleness before step v - 1 is over, so that
    gradients of at most staleness + 1 steps are waiting, and about as many steps are remembered.

    Args:
        values: [k, ...]; whoever steps writes into it, and nobody looks meanwhile.
        num_ranks: That push.
        timeout_s: Deadline of each wait, in seconds.
        alarm: Given the seconds waited, says why to give up, or ``None``.
        staleness: By how many steps look-ups may be behind; ``None``: by any number.
        step: Makes a step, given mean gradients and the lowest rank's options; ``None``: the owner does.
        version: So many steps have made the values.
    """

    def __init__(
        self,
        values: Tensor,
        *,
        num_ranks: int,
        timeout_s: float,
        alarm: Alarm,
        staleness: int | None = 0,
        step: RowStep | None = None,
        version: int = 0,
    ) -> None:
        self.values = values
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._staleness = staleness
        self._step = step
        self._version = version
        self._collected = version  # steps whose gradients were taken
        self._pushed: dict[int, dict[int, _Pushed]] = {}
        self._pushes = [0] * num_ranks  # steps for which each rank has pushed; where each push is a step
        self._held_from: int | None = None
        self._history = History((staleness or 0) + 2)  # one more than look-ups ask for: see changed
        self._changed = threading.Condition()
        self._memory = threading.Lock()  # values, version and history belong together
        self._stepping = threading.Lock()
        self._ended: str | None = None

    def step_by(self, step: RowStep) -> None:
        """Let it be stepped so; before anybody pushes."""
        self._step = step

    @property
    def is_elsewhere(self) -> bool:
        """Whether values are in another process, and those here none."""
        return False

    def read(self) -> Tensor:
        """[k, ...]: the values; a copy where they are elsewhere."""
        return self.values

    def publish(self, version: int) -> None:
        """Step ``version`` is over, which the owner has made."""
        with self._changed:
            self._version = max(self._version, version)
            self._changed.notify_all()

    def look_up(self, positions: Tensor, version: int | None) -> Tensor:
        """[n, ...]: some rows as step ``version`` has left them, once it is over; ``None``: as they are."""
        if version is None or self._staleness is None:
            with self._memory:
                return self.values[positions]
        self._wait(lambda: self._version >= version, f"step {version}")
        with self._memory:
            rows = self.values[positions]
            if self._version > version:
                self._history.put_back(positions, rows, version)
            return rows

    def look_up_early(self, positions: Tensor, version: int) -> tuple[int, Tensor]:
        """(which version, [n, ...] of it): some rows, which will be asked for again with what :meth:`changed`.

        Where the owner steps, whatever is there, perhaps in the middle of a step, which then counts as one to come.
        Else exactly the version asked for.
        """
        if self._step is not None:
            return version, self.look_up(positions, version)
        seen = self._version
        return seen, self.values[positions]

    def changed(self, positions: Tensor, since: int, version: int) -> tuple[Tensor, Tensor]:
        """(which, [n, ...]) of some rows: those that differ in ``version`` from a version before, once it is over."""
        self._wait(lambda: self._version >= version, f"step {version}")
        with self._memory:
            chosen = self._history.changed(positions, since, version).nonzero()[:, 0]
        return chosen, self.look_up(positions[chosen], version)

    def push(self, rank: int, step: int, rows: Rows, options: Options) -> None:
        """Take a rank's gradients for a step, numbered by position; wait while it is too far ahead.

        Args:
            rank: Whose.
            step: The number of steps for which the rank has pushed before.
            rows: Some may be none.
            options: Of the rank's optimizer.

        Raises:
            ValueError: There is no such rank, or it has pushed for the step before.
        """
        if not 0 <= rank < self._num_ranks or rank in self._pushed.get(step, {}) or step < self._collected:
            raise ValueError(f"a push of rank {rank} for step {step} that is not expected")
        if self._staleness is None:
            self._step_once(rank, step, _Pushed(rows, options))
            return
        allowed = self._staleness
        self._wait(lambda: step <= self._collected + allowed, f"the end of step {step - allowed}")
        with self._changed:
            self._pushed.setdefault(step, {})[rank] = _Pushed(rows, options)
            self._changed.notify_all()
        if self._step is not None:
            self._step_while_complete()

    def collect(self) -> Rows:
        """The sum of what all ranks have pushed for the present step, in their order; then they may push for the next.

        For the owner, who then makes the step.
        """
        self._wait(self._is_complete, "the gradients of all ranks")
        total = self._take()[0]
        with self._memory:
            self._history.note(self._collected, total.indices)
        return total

    def wait_for(self, version: int) -> None:
        """Wait until this many steps of each rank are in the values; later ones are not made until :meth:`go_on`.

        In order there can be no later one, since that needs the caller's gradients.
        """
        if self._staleness is not None:
            self._wait(lambda: self._version >= version, f"step {version}")
            return
        with self._changed:
            self._held_from = version
        self._wait(lambda: all(pushes >= version for pushes in self._pushes), f"step {version} of all ranks")
        with self._stepping:  # one that had begun has ended
            pass

    def go_on(self) -> None:
        """Steps may be made again. Safe to call twice."""
        with self._changed:
            self._held_from = None
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Nobody waits here any more."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    # -- stepping by itself -------------------------------------------------------------------------------------------

    def _step_while_complete(self) -> None:
        with self._stepping:  # another thread may just do it
            while self._is_complete():
                total, options = self._take()
                mean = Rows(total.indices, total.values / self._num_ranks)
                with self._memory:
                    self._history.note(self._collected, mean.indices, self.values[mean.indices])
                    self._make(mean, options)
                    self._version = self._collected
                with self._changed:
                    self._changed.notify_all()

    def _step_once(self, rank: int, step: int, pushed: _Pushed) -> None:
        """One rank's gradients count as much as in a mean."""
        self._wait(lambda: self._held_from is None or step < self._held_from, "a checkpoint")
        share = Rows(pushed.rows.indices, pushed.rows.values / self._num_ranks)
        with self._stepping, self._memory:
            self._make(share, pushed.options)
        with self._changed:
            self._pushes[rank] = step + 1
            self._changed.notify_all()

    def _make(self, mean: Rows, options: Options) -> None:
        assert self._step is not None, "it is set before anybody pushes"
        try:
            with torch.no_grad():
                self._step(mean, options)
        except Exception as error:
            self.end(f"its optimizer failed: {type(error).__name__}: {error}")
            raise PeerLostError(f"the parameter server has ended: {self._ended}") from error

    def _is_complete(self) -> bool:
        return len(self._pushed.get(self._collected, ())) == self._num_ranks

    def _take(self) -> tuple[Rows, Options]:
        """The sum of the present step's gradients in the order of ranks, and the lowest rank's options."""
        with self._changed:
            pushed = self._pushed.pop(self._collected)
            self._collected += 1
            self._changed.notify_all()
        ordered = [pushed[rank] for rank in sorted(pushed)]
        return merged([each.rows for each in ordered]), ordered[0].options

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
