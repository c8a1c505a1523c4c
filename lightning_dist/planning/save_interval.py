"""How often to save, by what a save costs, how long a step takes and how often the job fails. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dist.laws import daly_interval_s, lost_time_share

FIRST_STEPS = 10
"""Steps before the first save, which makes room for the copies, and from it to the second, which is measured."""
REVISE_AT = math.sqrt(2)
"""An interval is replaced by one so many times longer or shorter; it goes with the root of what a save costs."""

_LEAST_S = 1e-6  # of what is measured; a clock may stand still


class Measured(NamedTuple):
    """Of the slowest rank, in seconds.

    Attributes:
        hold_s: For which a save holds training.
        write_s: In which it is then written; 0 if that is not known.
        step_s: An optimizer step, with everything between two of them but saves.
    """

    hold_s: float
    write_s: float
    step_s: float


@dataclass(frozen=True)
class SaveInterval:
    """What was chosen.

    Attributes:
        steps: Optimizer steps between two saves.
        lost_share: Expected share of a long job's time that is no progress.
        measured: What it was chosen from.
        time_between_failures_s: The same.
    """

    steps: int
    lost_share: float
    measured: Measured
    time_between_failures_s: float

    def __str__(self) -> str:
        held = self.measured
        return (
            f"a checkpoint every {self.steps} steps ({self.steps * held.step_s:.3g} s): a save holds training for "
            f"{held.hold_s:.2g} s and is written in {held.write_s:.2g} s, a failure is expected every "
            f"{self.time_between_failures_s / 3600:g} h; expected lost time: {self.lost_share:.2%}"
        )


def choose_interval(measured: Measured, time_between_failures_s: float, *, restart_s: float = 0.0) -> SaveInterval:
    """The interval that loses the least time, by :func:`~lightning_dist.laws.daly_interval_s`.

    It is no shorter than a write takes: the next save would wait for it.

    Args:
        measured: Of the slowest rank.
        time_between_failures_s: The mean for the whole job.
        restart_s: From a failure to work again; it changes what is lost, not the interval.
    """
    wanted_s = daly_interval_s(measured.hold_s, time_between_failures_s)
    steps = max(1, round(wanted_s / measured.step_s), math.ceil(measured.write_s / measured.step_s))
    lost = lost_time_share(steps * measured.step_s, measured.hold_s, time_between_failures_s, restart_s=restart_s)
    return SaveInterval(steps, lost, measured, time_between_failures_s)


class SavePace:
    """When to save: twice to measure, then by the interval, which is chosen anew when what is measured has changed.

    Ranks measure by their own clocks and must agree before :meth:`settle`. The calls: :meth:`begin` when training
    begins, :meth:`step_ended` after each step, and after a save :meth:`saved`, then :meth:`settle` if it gave numbers.

    Args:
        time_between_failures_s: The mean for the whole job.
        restart_s: See :func:`choose_interval`.
        clock: In seconds.
    """

    def __init__(
        self, time_between_failures_s: float, *, restart_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._time_between_failures_s = time_between_failures_s
        self._restart_s = restart_s
        self._clock = clock
        self.begin(0)

    def begin(self, step: int) -> None:
        """Training begins, after so many optimizer steps; nothing is known yet."""
        self.interval: SaveInterval | None = None
        self._next_step = step + FIRST_STEPS
        self._mark: tuple[int, float] | None = None
        self._saves = 0

    def is_due(self, step: int) -> bool:
        """Whether to save after so many optimizer steps."""
        return step >= self._next_step

    def step_ended(self, step: int) -> None:
        """So many optimizer steps have ended; the first of a run, which is longer, is not measured."""
        if self._mark is None:
            self._mark = (step, self._clock())

    def saved(self, step: int, *, hold_s: float, wait_s: float, write_s: float, is_skipped: bool) -> Measured | None:
        """A save was asked for; what this rank has measured by it, or ``None`` on all ranks alike.

        Args:
            step: After so many optimizer steps.
            hold_s: For which training was held in all.
            wait_s: For which of that by the save before, which would be over at the interval that is chosen.
            write_s: In which the save before was written; 0 if that is not known.
            is_skipped: There was none, since the one before was being written.
        """
        self._next_step = step + (FIRST_STEPS if self.interval is None else self.interval.steps)
        if is_skipped or self._mark is None or step <= self._mark[0]:
            return None
        self._saves += 1
        (marked_step, marked_s), now_s = self._mark, self._clock()
        self._mark = (step, now_s)
        if self._saves == 1:
            return None
        step_s = (now_s - marked_s - hold_s) / (step - marked_step)
        return Measured(max(hold_s - wait_s, _LEAST_S), max(write_s, 0.0), max(step_s, _LEAST_S))

    def settle(self, agreed: Measured) -> SaveInterval | None:
        """Choose by the slowest rank's numbers; the new interval, if there is one."""
        chosen = choose_interval(agreed, self._time_between_failures_s, restart_s=self._restart_s)
        if self.interval is not None and 1 / REVISE_AT < chosen.steps / self.interval.steps < REVISE_AT:
            return None
        self._next_step += chosen.steps - (FIRST_STEPS if self.interval is None else self.interval.steps)
        self.interval = chosen
        return chosen
