"""What a source of values is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """One value.

    Attributes:
        metric: A name of :data:`~lightning_dist.monitor.record.METRICS`.
        value: In the metric's unit.
        wall_ns: When, as ``time.time_ns`` says; ``None``: at the time of reading.
        step: In which step; ``None``: in that of the time of reading.
    """

    metric: str
    value: float
    wall_ns: int | None = None
    step: int | None = None


class Source(Protocol):
    """Gives the values of some metrics now and then.

    One thread calls ``read`` again and again, then ``close`` once. What ``read`` raises is said once, and it is asked
    again the next time. A class raises :class:`~lightning_dist.errors.UnmeasurableError` when it is made where there is
    nothing to read.
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """What it may give."""
        ...

    @property
    def is_fine(self) -> bool:
        """Whether it is read several times an interval, for the shape of its curve."""
        ...

    def read(self, now_ns: int) -> Iterable[Reading]:
        """The values since the last call; the first call may give none.

        Args:
            now_ns: Monotonic clock.
        """
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
