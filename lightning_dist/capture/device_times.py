"""Moments of a device's work, noted by the device and read when it has long passed them: nothing waits for it.

An event is recorded on the stream of the work and asked later, without blocking, whether it has come. Its distance from
one that is known already gives its place on the host's monotonic clock; the first one is taken to come when it is
recorded, since nothing has been asked of the device before a fit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident

import torch

COMPUTE = -1
"""What :meth:`DeviceTimes.thread_of` says of the stream that trains."""


class DeviceMark:
    """A point of a stream.

    Args:
        event: Recorded there.
        thread: :data:`COMPUTE`, or the identity of the thread that works on another stream.
    """

    __slots__ = ("at_ns", "event", "thread")

    def __init__(self, event: torch.Event, thread: int) -> None:
        self.event = event
        self.thread = thread
        self.at_ns: int | None = None


_Waiting = tuple[tuple[DeviceMark, ...], Callable[..., None]]


class DeviceTimes:
    """A :class:`~lightning_dist.events.DeviceClock` of one accelerator.

    Args:
        device: Whose.
        clock_ns: The host's monotonic clock.
        new_event: Makes an event that can be recorded, asked and compared.
        current_stream: Of the calling thread on the device.
    """

    def __init__(
        self,
        device: torch.device,
        clock_ns: Callable[[], int],
        *,
        new_event: Callable[[torch.device], torch.Event] = lambda device: torch.Event(device, enable_timing=True),
        current_stream: Callable[[torch.device], torch.Stream] = lambda device: torch.accelerator.current_stream(
            device
        ),
    ) -> None:
        self._device = device
        self._new_event = new_event
        self._current_stream = current_stream
        self._compute = current_stream(device)
        self._waiting: deque[_Waiting] = deque()
        self._base = self.mark()
        self._base.at_ns = clock_ns()

    def mark(self) -> DeviceMark:
        """See :class:`~lightning_dist.events.DeviceClock`."""
        stream = self._current_stream(self._device)
        event = self._new_event(self._device)
        event.record(stream)
        return DeviceMark(event, COMPUTE if stream == self._compute else get_ident())

    def thread_of(self, mark: DeviceMark) -> int:
        """See :class:`~lightning_dist.events.DeviceClock`."""
        return mark.thread

    def when_known(self, marks: tuple[DeviceMark, ...], call: Callable[..., None]) -> None:
        """See :class:`~lightning_dist.events.DeviceClock`; the calls are made by :meth:`read`."""
        self._waiting.append((marks, call))

    def read(self) -> int:
        """Make the calls whose moments have come, in their order; how many are left. Waits for nothing."""
        while self._waiting:
            marks, call = self._waiting[0]
            if not all(mark.at_ns is not None or mark.event.query() for mark in marks):
                break
            self._waiting.popleft()
            call(*(self._known(mark) for mark in marks))
        return len(self._waiting)

    def read_within(self, limit_s: float, pause_s: float = 0.001) -> int:
        """:meth:`read` until nothing is left, for at most some time; for the end of a fit."""
        give_up_s = time.monotonic() + limit_s
        while (left := self.read()) and time.monotonic() < give_up_s:
            time.sleep(pause_s)
        return left

    def measure_from(self, mark: DeviceMark) -> None:
        """From now on tell moments by their distance from this one, which is known: distances lose precision."""
        if mark.at_ns is not None:
            self._base = mark

    def _known(self, mark: DeviceMark) -> int:
        if mark.at_ns is None:
            assert self._base.at_ns is not None
            mark.at_ns = self._base.at_ns + round(self._base.event.elapsed_time(mark.event) * 1e6)
        return mark.at_ns
