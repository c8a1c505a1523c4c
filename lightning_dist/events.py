"""The event stream: what happened, when, in which step, on which rank.

Everything that is measured is an :class:`Event`. Emitting one costs about a microsecond: a clock, a tuple, an append to
a ring buffer that forgets the oldest. It never synchronises a device, never calls another rank, never writes a file;
readers (timeline, metrics, report, exporters) take what they need from the buffer or register a sink.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class EventKind(str, enum.Enum):
    """What an event's ``value`` means."""

    SPAN = "span"  # from start_ns to end_ns; value is unused
    COUNTER = "counter"  # value is an increment at start_ns
    INSTANT = "instant"  # something happened at start_ns


class Event(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: Span, counter or instant.
        name: Dotted name, e.g. ``"comm.cross"``.
        step: Optimizer step in which it was emitted.
        rank: Global rank.
        lane: Row it belongs to: a lane's name, or ``"main"``.
        start_ns: Monotonic clock, in nanoseconds.
        end_ns: End of a span, in nanoseconds; equal to ``start_ns`` otherwise.
        value: Increment of a counter; 0 otherwise.
        attributes: What else is known (bucket, chunk, size_bytes, tier, ...).
    """

    kind: EventKind
    name: str
    step: int
    rank: int
    lane: str
    start_ns: int
    end_ns: int
    value: float
    attributes: Mapping[str, Any]

    @property
    def duration_s(self) -> float:
        """Length of a span, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


WAIT = "comm.wait"
"""Name of a span: its thread waits for operations between ranks that lanes carry out."""

Sink = Callable[[Event], None]
_NOTHING: Mapping[str, Any] = {}


class EventStream:
    """A ring buffer of events, stamped with step and rank. Any thread may emit.

    Args:
        rank: Global rank of this process.
        capacity: Number of events kept; the oldest are forgotten.
        clock_ns: Monotonic clock in nanoseconds.
    """

    def __init__(
        self, *, rank: int = 0, capacity: int = 65536, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.rank = rank
        self.step = 0
        self.clock_ns = clock_ns
        self._events: deque[Event] = deque(maxlen=capacity)
        self._sinks: tuple[Sink, ...] = ()

    def span(
        self, name: str, start_ns: int, *, lane: str = "main", end_ns: int | None = None, **attributes: Any
    ) -> None:
        """Record something that began at ``start_ns`` and ends at ``end_ns`` (now, if not given)."""
        end = self.clock_ns() if end_ns is None else end_ns
        self._emit(Event(EventKind.SPAN, name, self.step, self.rank, lane, start_ns, end, 0.0, attributes))

    @contextmanager
    def measure(self, name: str, *, lane: str = "main", **attributes: Any) -> Iterator[None]:
        """Record the body of a ``with`` statement as a span, also when it raises."""
        start_ns = self.clock_ns()
        try:
            yield
        finally:
            self.span(name, start_ns, lane=lane, **attributes)

    def count(self, name: str, value: float = 1.0, *, lane: str = "main") -> None:
        """Add ``value`` to the counter ``name``."""
        now = self.clock_ns()
        self._emit(Event(EventKind.COUNTER, name, self.step, self.rank, lane, now, now, value, _NOTHING))

    def instant(self, name: str, *, lane: str = "main", **attributes: Any) -> None:
        """Record that something happened now."""
        now = self.clock_ns()
        self._emit(Event(EventKind.INSTANT, name, self.step, self.rank, lane, now, now, 0.0, attributes))

    def add_sink(self, sink: Sink) -> None:
        """Call ``sink`` with every event from now on, in the emitting thread. It must be quick and must not raise."""
        self._sinks = (*self._sinks, sink)

    def remove_sink(self, sink: Sink) -> None:
        """Undo :meth:`add_sink`; unknown sinks are ignored."""
        self._sinks = tuple(s for s in self._sinks if s != sink)

    def snapshot(self) -> list[Event]:
        """The events now in the buffer, oldest first."""
        return list(self._events)

    def clear(self) -> None:
        """Forget all events."""
        self._events.clear()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        for sink in self._sinks:
            sink(event)
