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
from threading import get_ident
from typing import Any, NamedTuple, Protocol


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
        thread: Whose it is: the emitting thread's identity; of work on a device, what its clock says.
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
    thread: int = 0

    @property
    def duration_s(self) -> float:
        """Length of a span, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


WAIT = "comm.wait"
"""Name of a span: its thread waits for operations between ranks that lanes carry out."""

Mark = Any
"""A moment: nanoseconds of the monotonic clock, or what a device has been asked to note."""


class DeviceClock(Protocol):
    """Moments of work that a device does later than the host asks for it. Nothing here waits for the device."""

    def mark(self) -> Mark:
        """Ask the device to note when it comes to this point of the current stream."""

    def thread_of(self, mark: Mark) -> int:
        """Which row of work the point is in, as :attr:`Event.thread` says it."""

    def when_known(self, marks: tuple[Mark, ...], call: Callable[..., None]) -> None:
        """Call ``call`` with the marks as nanoseconds of the monotonic clock, some time after the device has come to
        all of them, in the order in which it was asked.
        """


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
        self.device_clock: DeviceClock | None = None  # of work on a device, while somebody listens
        self._events: deque[Event] = deque(maxlen=capacity)
        self._sinks: tuple[Sink, ...] = ()

    def span(
        self,
        name: str,
        start_ns: int,
        *,
        lane: str = "main",
        end_ns: int | None = None,
        thread: int | None = None,
        **attributes: Any,
    ) -> None:
        """Record something that began at ``start_ns`` and ends at ``end_ns`` (now, if not given).

        It is the calling thread's, unless ``thread`` says whose: 0 for what no thread of this process carries out.
        """
        end = self.clock_ns() if end_ns is None else end_ns
        whose = get_ident() if thread is None else thread
        self._emit(Event(EventKind.SPAN, name, self.step, self.rank, lane, start_ns, end, 0.0, attributes, whose))

    def mark(self) -> Mark:
        """This moment of the work that the caller does or, where a device does it, asks for."""
        return self.clock_ns() if self.device_clock is None else self.device_clock.mark()

    def span_from(
        self,
        name: str,
        start: Mark,
        *,
        lane: str = "main",
        end: Mark = None,
        thread: int | None = None,
        **attributes: Any,
    ) -> None:
        """Like :meth:`span`, of work between two :meth:`mark`; recorded once a device has done it."""
        clock = self.device_clock
        if isinstance(start, int):
            if end is None or isinstance(end, int):
                self.span(name, start, lane=lane, end_ns=end, thread=thread, **attributes)
            return  # begun before there was a device's clock
        if clock is None:  # it has gone since
            return
        step, end = self.step, clock.mark() if end is None else end

        def known(start_ns: int, end_ns: int) -> None:
            whose = clock.thread_of(end) if thread is None else thread
            self._emit(Event(EventKind.SPAN, name, step, self.rank, lane, start_ns, end_ns, 0.0, attributes, whose))

        clock.when_known((start, end), known)

    @contextmanager
    def measure(self, name: str, *, lane: str = "main", **attributes: Any) -> Iterator[None]:
        """Record the body of a ``with`` statement as a span, also when it raises."""
        start_ns = self.clock_ns()
        try:
            yield
        finally:
            self.span(name, start_ns, lane=lane, **attributes)

    @contextmanager
    def measure_work(self, name: str, *, lane: str = "main", **attributes: Any) -> Iterator[None]:
        """Like :meth:`measure`, of what may be done by a device."""
        start = self.mark()
        try:
            yield
        finally:
            self.span_from(name, start, lane=lane, **attributes)

    def count(self, name: str, value: float = 1.0, *, lane: str = "main") -> None:
        """Add ``value`` to the counter ``name``."""
        now = self.clock_ns()
        self._emit(Event(EventKind.COUNTER, name, self.step, self.rank, lane, now, now, value, _NOTHING, get_ident()))

    def instant(self, name: str, *, lane: str = "main", **attributes: Any) -> None:
        """Record that something happened now."""
        now = self.clock_ns()
        self._emit(Event(EventKind.INSTANT, name, self.step, self.rank, lane, now, now, 0.0, attributes, get_ident()))

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
