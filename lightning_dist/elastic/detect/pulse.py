"""A rank's own side of the board: it turns what training does into beats."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning_dist.elastic.detect.board import FILE, Board, Cell
from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.launched import launched


class Pulse:
    """Writes how far this rank is into its cell, from the thread that trains.

    Args:
        board: Of this host; closed with this.
        local_rank: Whose cell.
        round: Of the present start.
        clock_s: A monotonic clock.
    """

    def __init__(
        self,
        board: Board,
        *,
        local_rank: int,
        round: int,  # noqa: A002  # the field's word
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = board.path.parent
        self.local_rank = local_rank
        self.round = round
        self.cell: Cell = board.cell(local_rank)
        self.cell.resume(round=round)
        self._board = board
        self._clock_s = clock_s
        self._waited_s: Callable[[], float] | None = None
        self._phase = Phase.STARTING
        self._begun: tuple[float, float | None] | None = None  # of the step: when, and the waiting up to then
        self._is_open = True
        self._timeouts = 0
        self._closing = threading.RLock()

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None) -> Pulse | None:
        """That of this process; ``None``: no agent has started it.

        Raises:
            LaunchError: The agent's board cannot be used.
        """
        environ = os.environ if environ is None else environ
        began = launched(environ)
        if began.agent is None:
            return None
        local_rank = int(environ.get("LOCAL_RANK", "0"))
        return cls(Board.open(Path(began.agent) / FILE), local_rank=local_rank, round=began.round)

    def know_waits(self, waited_s: Callable[[], float]) -> None:
        """Say how long this rank waited in each step from now on.

        Args:
            waited_s: For how long it has waited for other ranks so far, in seconds.
        """
        self._waited_s = waited_s

    @property
    def phase(self) -> Phase:
        """What this rank is about."""
        return self._phase

    @property
    def timeouts(self) -> int:
        """Hangs that the agent of this host has found so far; once this is closed, up to then."""
        with self._closing:
            if self._is_open:
                self._timeouts = self._board.timeouts
            return self._timeouts

    def order(self) -> Order:
        """What the agent wants of this rank in this round; costs some microseconds."""
        if not self._is_open:
            return Order.NONE
        order, number = self.cell.ordered()
        return order if number == self.round else Order.NONE

    def answer(self, step: int) -> None:
        """Say that what was ordered is done.

        Args:
            step: At which.
        """
        with self._closing:
            if self._is_open:
                self.cell.answer(step)

    def snapshot(self, step: int) -> None:
        """Say that the snapshot of a step is committed, from any thread.

        Args:
            step: Which.
        """
        with self._closing:
            if self._is_open:
                self.cell.commit(step)

    def offer_to_stay(self) -> None:
        """Say that this process means to stay for the next round, should another rank fail."""
        with self._closing:
            if self._is_open:
                self.cell.offer_to_stay()

    @property
    def may_stay(self) -> bool:
        """Whether this process has offered to stay, in this round."""
        beat = self.cell.read()
        return beat is not None and beat.may_stay

    def enter(self, phase: Phase) -> None:
        """It is about something else, or still about the same and making progress."""
        if phase != Phase.TRAINING:
            self._begun = None  # what is between two steps belongs to none
        self._write(phase=phase)

    def mark(self, *, begun: int, waits: int, what: str) -> None:
        """Say what this rank waits for, from any thread; see :meth:`~lightning_dist.elastic.detect.board.Cell.mark`."""
        with self._closing:
            if self._is_open:
                self.cell.mark(begun=begun, waits=waits, what=what)

    @contextmanager
    def entered(self, phase: Phase) -> Iterator[None]:
        """Inside, it is about something else."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def step_begins(self, step: int) -> None:
        """A training batch is there. The wait for it counts as part of the step, unless something else came between.

        Args:
            step: Optimizer steps done before it.
        """
        if self._phase != Phase.TRAINING:
            self._write(phase=Phase.TRAINING if self._has_stepped else Phase.FIRST_STEP, step=step)
        if self._begun is None:
            self._begun = self._now()

    def step_ends(self, step: int) -> None:
        """A training batch is done.

        Args:
            step: Optimizer steps done in all.
        """
        now_s, waited_s = ended = self._now()
        step_s = own_s = None
        if self._begun is not None:
            step_s = now_s - self._begun[0]
            if waited_s is not None and self._begun[1] is not None:
                own_s = max(0.0, step_s - (waited_s - self._begun[1]))
        self._begun = ended
        self._write(phase=Phase.TRAINING, step=step, step_s=step_s, own_s=own_s)

    def close(self) -> None:
        """Let go of the board. Safe to call twice."""
        with self._closing:
            if self._is_open:
                self._timeouts = self._board.timeouts
                self._is_open = False
                self._board.close()

    @property
    def _has_stepped(self) -> bool:
        beat = self.cell.read()
        return beat is not None and beat.first_step_ns > 0

    def _now(self) -> tuple[float, float | None]:
        return self._clock_s(), None if self._waited_s is None else self._waited_s()

    def _write(
        self, *, phase: Phase, step: int | None = None, step_s: float | None = None, own_s: float | None = None
    ) -> None:
        if self._is_open:
            self._phase = phase
            self.cell.write(phase=phase, step=step, step_s=step_s, own_s=own_s)
