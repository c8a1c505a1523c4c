"""A thread that reads the sources now and then, for as long as training goes on."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_dist.monitor.record import Sample
from lightning_dist.monitor.sampling.source import Source

FINE = 4
"""How often fine sources are read in an interval, unless that is short."""

_LEAST_FINE_S = 0.05  # between two looks of fine sources that an interval does not ask for
_INTERVALS_BEFORE_DOUBLING = 7200
_LONGEST_S = 32.0  # to which the interval is doubled; a longer one that was asked for stays

Listener = Callable[[Sample], None]


class Sampler:
    """Reads sources in a thread, and hands what they give to listeners. Nothing that fails there reaches anyone else.

    A long run is looked at less often, so that its files stay small: after each 7200 intervals the interval is
    doubled, up to 32 s.

    Args:
        sources: By what they read; closed at the end.
        listeners: Called in the thread with each sample.
        interval_s: How often, in seconds; fine sources up to four times as often.
        steps: How many steps there were by now.
        say: Takes a sentence for the user; called once for each source and listener that fails.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        listeners: Sequence[Listener],
        *,
        interval_s: float,
        steps: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._sources = dict(sources)
        self._listeners = list(listeners)
        self._interval_s = interval_s
        self._fine = max(1, min(FINE, int(interval_s / _LEAST_FINE_S)))
        self._steps = steps
        self._say = say
        self._said: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hierdist-monitor-sampler", daemon=True)
        self._thread.start()

    def close(self, *, wait_s: float = 5.0) -> None:
        """Read once more and end the thread; a source that does not come back is not waited for longer.

        Safe to call twice.
        """
        self._ending.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        ticks = 0
        due_s = time.monotonic()
        while True:
            is_last = self._ending.is_set()
            for name, source in self._sources.items():
                if is_last or source.is_fine or ticks % self._fine == 0:
                    self._read(name, source)
            if is_last:
                break
            ticks += 1
            due_s = max(due_s + self._tick_s(ticks), time.monotonic())  # what was missed is not made up for
            self._ending.wait(due_s - time.monotonic())
        for name, source in self._sources.items():
            self._guarded(f"closing {name}", source.close)

    def _tick_s(self, ticks: int) -> float:
        doublings = min(ticks // (self._fine * _INTERVALS_BEFORE_DOUBLING), 30)
        return min(self._interval_s * 2.0**doublings, max(_LONGEST_S, self._interval_s)) / self._fine

    def _read(self, name: str, source: Source) -> None:
        def read() -> None:
            for reading in source.read(time.monotonic_ns()):
                step = self._steps() if reading.step is None else reading.step
                wall_ns = time.time_ns() if reading.wall_ns is None else reading.wall_ns
                value = reading.value if isinstance(reading.value, int) else float(f"{reading.value:.6g}")
                self._hand_out(Sample(reading.metric, step, wall_ns, value))

        self._guarded(f"reading {name}", read)

    def _hand_out(self, sample: Sample) -> None:
        for number, listener in enumerate(self._listeners):
            self._guarded(f"handing on samples ({number})", functools.partial(listener, sample))

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if what not in self._said:
                self._said.add(what)
                self._say(f"{what} failed: {type(error).__name__}: {error}; training goes on")
